"""Every setting there is: one module per section, with its checks. A field's sentence is also its
help text.

Invariant: nothing here imports torch, ray or transformers, so that a wrong key is refused at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from skyasync.config.frozen import SettingsGroup
from skyasync.config.keys import key
from skyasync.config.schema.algorithm import AlgorithmConfig
from skyasync.config.schema.data import DataConfig
from skyasync.config.schema.environment import EnvironmentConfig
from skyasync.config.schema.generator import GeneratorConfig
from skyasync.config.schema.models import (
    CriticConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    RefConfig,
    RewardConfig,
    TeacherConfig,
)
from skyasync.config.schema.placement import ParallelConfig, PlacementConfig
from skyasync.config.schema.sampling import SamplingConfig
from skyasync.config.schema.trainer import TrainerConfig

__all__ = [
    "AlgorithmConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "EnvironmentConfig",
    "GeneratorConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PlacementConfig",
    "PolicyConfig",
    "RayConfig",
    "RefConfig",
    "RewardConfig",
    "SamplingConfig",
    "TeacherConfig",
    "TrainerConfig",
]


@dataclass
class RayConfig(SettingsGroup):
    address: str = key("", open_ended=True)
    """Cluster to join ('auto' or host:port); empty starts one on this machine's loopback."""


@dataclass
class Config(SettingsGroup):
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    data: DataConfig = field(default_factory=DataConfig)
    ray: RayConfig = field(default_factory=RayConfig)
