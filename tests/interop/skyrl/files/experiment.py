"""An entry point: a configuration with its own keys, and an experiment that replaces a part."""

from dataclasses import dataclass, field

from skyasync.interop.skyrl import AlgorithmConfig, BasePPOExp, SkyRLTrainConfig, make_config, validate_cfg


@dataclass
class MineConfig:
    offset: int = 3


@dataclass
class Config(SkyRLTrainConfig):
    mine: MineConfig = field(default_factory=MineConfig)


@dataclass
class OverlongConfig(AlgorithmConfig):
    overlong_buffer_len: int = 4


WithOverlong = make_config(algorithm_cls=OverlongConfig)


class MineExp(BasePPOExp):
    def get_train_dataset(self):
        rows = super().get_train_dataset()
        return rows[self.cfg.mine.offset :]


def configure(arguments):
    cfg = Config.from_cli_overrides(arguments)
    validate_cfg(cfg)
    return cfg
