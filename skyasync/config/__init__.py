"""Strict, typed settings: the schema, and how a command line becomes a configuration.

Invariant: importing this package imports no torch, Ray or transformers, so that a wrong key is refused at once.
"""

from skyasync.config.check import check_config
from skyasync.config.load import ConfigError, dump_config, exit_with, load_config, parse_or_exit
from skyasync.config.schema import Config, key

__all__ = ["Config", "ConfigError", "check_config", "dump_config", "exit_with", "key", "load_config", "parse_or_exit"]
