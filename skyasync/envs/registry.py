"""Environments by name: a registered id, or ``module:Class`` for one in a file of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skyasync.envs.base import BaseTextEnv
from skyasync.registry import Registry, resolve_reference

ENVS = Registry(
    "environment",
    [
        "skyasync.envs.gsm8k",
        "skyasync.envs.reward",
        *(f"skyasync.envs.adapters.{library}" for library in ("gymnasium", "openrlhf", "textarena")),
    ],
    capabilities={"extra": ""},  # of this library, that installs what it needs
)
EnvFactory = Callable[..., BaseTextEnv]


def register(name: str, factory: EnvFactory | str) -> None:
    """Make ``environment.env_class=name`` mean this class (or ``module:Class``)."""
    ENVS[name] = factory


def make(name: str, env_config: dict[str, Any] | None = None, extras: dict[str, Any] | None = None) -> BaseTextEnv:
    """One environment, to be played by hand: ``init`` it with a conversation, then ``step`` through it.

    Raises:
        UserError: if there is none of this name, listing the nearest.
    """
    return env_factory(name)(env_config=env_config or {}, extras=extras or {})


def env_factory(name: str) -> EnvFactory:
    """The class behind a name.

    Raises:
        UserError: if there is none, listing the nearest names.
    """
    found: Any = name if ":" in name else ENVS[name]
    return resolve_reference(found, kind="environment") if isinstance(found, str) else found
