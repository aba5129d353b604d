"""Strict, typed settings: the schema, and how a command line becomes a configuration.

Invariant: importing this package imports no torch, Ray or transformers, so that a wrong key is
refused at once; nor OmegaConf or rich before a name is used that needs them, so that a worker runs
where neither is installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyasync.config.check import check_config
    from skyasync.config.load import ConfigError, dump_config, exit_with, load_config, parse_or_exit
    from skyasync.config.schema import Config, key

_HOMES = {
    "Config": "schema",
    "ConfigError": "load",
    "check_config": "check",
    "dump_config": "load",
    "exit_with": "load",
    "key": "schema",
    "load_config": "load",
    "parse_or_exit": "load",
}

__all__ = [
    "Config",
    "ConfigError",
    "check_config",
    "dump_config",
    "exit_with",
    "key",
    "load_config",
    "parse_or_exit",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module(f"{__name__}.{_HOMES[name]}"))[name]
