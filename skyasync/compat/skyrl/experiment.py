"""SkyRL's experiment and configuration, by its names.

Invariant: the configuration is ours, keys and all; their keys are answered with ours (``skyasync translate``).
Source: ``skyrl/train/entrypoints/main_base.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from skyasync.compat.skyrl.generators import InferenceEngineClient
from skyasync.config import Config as Ours
from skyasync.config import load_config
from skyasync.config.check import check_config
from skyasync.config.load import ConfigError
from skyasync.envs.registry import Foreign
from skyasync.experiment import BasePPOExp as _BasePPOExp
from skyasync.rollout.requests import sampling_params


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


def initialize_ray(cfg: Ours) -> None:
    """Nothing: ``BasePPOExp.run`` joins or starts Ray, and sends along what the program has registered."""


class BasePPOExp(_BasePPOExp):
    """Ours, whose inference client also answers batches in SkyRL's form."""

    def get_inference_client(self) -> Foreign:
        client = super().get_inference_client()
        sampling = sampling_params(self.cfg.generator.sampling_params)
        length = self.engine_config().max_model_len
        return InferenceEngineClient(client, lambda: self._tokenizer, sampling, length, _name(self.cfg))


def _name(cfg: Ours) -> str:
    return str(cfg.trainer.policy.model.path)


def _written(value: object) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value)
