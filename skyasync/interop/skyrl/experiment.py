"""SkyRL's experiment and configuration, by its names.

Invariant: the configuration is ours, keys and all; their keys are answered with ours (``skyasync translate``).
Source: ``skyrl/train/entrypoints/main_base.py``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import Self

from skyasync.config import Config as Ours
from skyasync.config import load_config
from skyasync.config.check import check_config
from skyasync.config.load import ConfigError
from skyasync.config.schema import GeneratorConfig, TrainerConfig
from skyasync.config.schema.algorithm import AlgorithmConfig
from skyasync.envs.registry import Foreign
from skyasync.interop.skyrl.generators import InferenceEngineClient
from skyasync.registry import add_user_parts, user_parts
from skyasync.rollout.generator_api import sampling_params
from skyasync.run.experiment import BasePPOExp as _BasePPOExp
from skyasync.run.placement import plan_slots
from skyasync.run.ray_cluster import start_on_loopback
from skyasync.workers.roles import ROLES


@dataclass
class Config(Ours):
    """Ours, made from overrides. Keys of one's own are fields of a subclass."""

    @classmethod
    def from_cli_overrides(cls, args: Sequence[str] | Mapping[str, object]) -> Self:
        """From ``key=value`` arguments, or a mapping of keys to values.

        Raises:
            UserError: naming each key or value that is wrong, with the nearest right one.
        """
        if isinstance(args, Mapping):
            args = [f"{name}={_written(value)}" for name, value in args.items()]
        return load_config(list(args), schema=cls)


SkyRLTrainConfig = Config


def validate_cfg(cfg: Ours) -> None:
    """Raises ``UserError`` if settings contradict each other (which loading them has refused already)."""
    if problems := check_config(cfg):
        raise ConfigError(problems)


def make_config(
    algorithm_cls: type = AlgorithmConfig, trainer_cls: type = TrainerConfig, generator_cls: type = GeneratorConfig
) -> type[Config]:
    """A configuration whose groups are these classes, with keys of their own."""
    trainer = make_dataclass(trainer_cls.__name__, [_group("algorithm", algorithm_cls)], bases=(trainer_cls,))
    fields = [_group("trainer", trainer), _group("generator", generator_cls)]
    return make_dataclass("Config", fields, bases=(Config,))


def initialize_ray(cfg: Ours) -> None:
    """Start Ray on this machine, whose processes know what the program has registered so far.

    An experiment can run in a task then, as SkyRL's entry points do it; ``exp.run()`` alone needs none of this.
    """
    import ray

    if ray.is_initialized() or cfg.ray.address:
        return
    parts = user_parts()

    def know_the_parts() -> None:
        add_user_parts(parts)

    bundles = plan_slots(cfg, gpus=False, roles=[role for role in ROLES.values() if role.has_ranks(cfg)]).bundles
    cores = max(os.cpu_count() or 1, len(bundles) + 1)  # the entry point's task has one
    start_on_loopback(num_cpus=cores, runtime_env={"worker_process_setup_hook": know_the_parts})


def _group(name: str, group: type) -> tuple[str, type, Foreign]:
    return name, group, field(default_factory=group)


class BasePPOExp(_BasePPOExp):
    """Ours, whose inference client also answers batches in SkyRL's form."""

    def get_inference_client(self) -> Foreign:
        client = super().get_inference_client()
        sampling = sampling_params(self.cfg.generator.sampling_params)
        length = self.engine_config().max_model_len
        return InferenceEngineClient(client, lambda: self.tokenizer, sampling, length, _name(self.cfg))

    def _setup_trainer(self) -> WholeRun:
        """For an experiment whose own ``run`` is ``asyncio.run(self._setup_trainer().train())``."""
        return WholeRun(self)


class WholeRun:
    """What such an experiment takes for its trainer."""

    def __init__(self, experiment: _BasePPOExp) -> None:
        self._experiment = experiment

    async def train(self) -> None:
        await asyncio.to_thread(_BasePPOExp.run, self._experiment)


def _name(cfg: Ours) -> str:
    return str(cfg.trainer.policy.model.path)


def _written(value: object) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value)
