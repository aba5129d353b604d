"""Environments: the base class, the registry, and the built-in ones."""

from skyasync.envs.base import BaseTextEnv, BaseTextEnvStepOutput
from skyasync.envs.registry import ENVS, env_factory, make, register
from skyasync.envs.tools import ToolError, tool

__all__ = ["ENVS", "BaseTextEnv", "BaseTextEnvStepOutput", "ToolError", "env_factory", "make", "register", "tool"]
