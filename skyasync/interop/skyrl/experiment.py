"""SkyRL's experiment and configuration, by its names.

Invariant: the configuration is ours, keys and all; their keys are answered with ours (``skyasync translate``).
Source: ``skyrl/train/entrypoints/main_base.py``.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from types import SimpleNamespace
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
from skyasync.run import experiment
from skyasync.run.placement import plan_slots
from skyasync.run.ray_cluster import start_on_loopback
from skyasync.workers.roles import ROLES


@dataclass
class SkyRLTrainConfig(Ours):
    """Ours, made from overrides. Keys of one's own are fields of a subclass."""

    @classmethod
    def from_cli_overrides(cls, args: Sequence[str] | Mapping[str, object]) -> Self:
        """From ``key=value`` arguments, or a mapping of keys to values.

        Raises:
            UserError: naming each key or value that is wrong, with the nearest right one.
        """
        if isinstance(args, Mapping):
            args = [f"{name}={v if isinstance(v, str) else json.dumps(v)}" for name, v in args.items()]
        return load_config(list(args), schema=cls)


Config = SkyRLTrainConfig


def validate_cfg(cfg: Ours) -> None:
    """Raises ``UserError`` if settings contradict each other (which loading them has already rejected)."""
    if problems := check_config(cfg):
        raise ConfigError(problems)


def make_config(
    algorithm_cls: type = AlgorithmConfig, trainer_cls: type = TrainerConfig, generator_cls: type = GeneratorConfig
) -> type[SkyRLTrainConfig]:
    """A configuration whose groups are these classes, with keys of their own."""
    algorithm = ("algorithm", algorithm_cls, field(default_factory=algorithm_cls))
    trainer = make_dataclass(trainer_cls.__name__, [algorithm], bases=(trainer_cls,))
    groups = [
        (name, group, field(default_factory=group))
        for name, group in (("trainer", trainer), ("generator", generator_cls))
    ]
    return make_dataclass("Config", groups, bases=(SkyRLTrainConfig,))


def initialize_ray(cfg: Ours) -> None:
    """Start Ray on this machine, whose processes know what the program has registered so far.

    An experiment can run in a task then, as SkyRL's entry points do it; ``exp.run()`` alone needs none of this.
    """
    import ray

    if ray.is_initialized() or cfg.ray.address:
        return
    parts = user_parts()

    def add_parts() -> None:
        add_user_parts(parts)

    bundles = plan_slots(cfg, gpus=False, roles=[role for role in ROLES.values() if role.has_ranks(cfg)]).bundles
    cores = max(os.cpu_count() or 1, len(bundles) + 1)  # the entry point's task has one
    start_on_loopback(num_cpus=cores, runtime_env={"worker_process_setup_hook": add_parts})


class SkyRLExperiment(experiment.BasePPOExp):
    """Ours, whose inference client also answers batches in SkyRL's form."""

    def get_inference_client(self) -> Foreign:
        sampling, model = sampling_params(self.cfg.generator.sampling_params), str(self.cfg.trainer.policy.model.path)
        length = self.engine_config().max_model_len
        client = super().get_inference_client()
        return InferenceEngineClient(client, lambda: self.tokenizer, sampling, length, model)

    def _setup_trainer(self) -> SimpleNamespace:
        """For an experiment whose own ``run`` is ``asyncio.run(self._setup_trainer().train())``: the whole run."""
        return SimpleNamespace(train=lambda: asyncio.to_thread(experiment.BasePPOExp.run, self))


BasePPOExp = SkyRLExperiment
