"""An entry point: a configuration with keys of its own, and an experiment that swaps a part."""

from dataclasses import dataclass, field

from skyasync.compat.skyrl import BasePPOExp, SkyRLTrainConfig, initialize_ray, validate_cfg


@dataclass
class MineConfig:
    offset: int = 3


@dataclass
class Config(SkyRLTrainConfig):
    mine: MineConfig = field(default_factory=MineConfig)


class MineExp(BasePPOExp):
    def get_train_dataset(self):
        rows = super().get_train_dataset()
        return rows[self.cfg.mine.offset :]


def configure(arguments):
    cfg = Config.from_cli_overrides(arguments)
    validate_cfg(cfg)
    initialize_ray(cfg)
    return cfg
