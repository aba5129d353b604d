"""Environments: the base class, the registry, and the built-in ones."""

from skyasync.envs.base import BaseTextEnv, BaseTextEnvStepOutput
from skyasync.envs.registry import ENVS, env_factory, register

__all__ = ["ENVS", "BaseTextEnv", "BaseTextEnvStepOutput", "env_factory", "register"]
