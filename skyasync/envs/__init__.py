"""Environments by name: a registered id, ``module:Class`` in a file of the user, ``openenv:URL``.

Every name gives a subclass of ``BaseTextEnv``. A class with ``reset(seed)`` and a ``step`` of five
values (gem, gymnasium) is played by ``skyasync.envs.adapters.gem``; a function that makes
environments becomes a class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from skyasync.envs.base import BaseTextEnv, BaseTextEnvStepOutput, EnvConfig, Row
from skyasync.envs.tools import ToolError, tool
from skyasync.errors import UserError
from skyasync.other_frameworks import other_frameworks
from skyasync.registry import Registry, resolve_reference

ENVS = Registry(
    "environment",
    {
        "skyasync.envs.reward": "reward gsm8k",
        "skyasync.envs.adapters.gem": "gem",
        "skyasync.envs.adapters.gymnasium": "gymnasium",
        "skyasync.envs.adapters.nemo_gym": "nemo_gym",
        "skyasync.envs.adapters.openenv": "openenv",
        "skyasync.envs.adapters.textarena": "textarena",
        **other_frameworks().environments,
    },
    capabilities={"extra": ""},  # the optional dependency of skyasync that installs its packages
)
#: Environments that are named with the address of their server: ``openenv:http://...``.
SERVED = ("nemo_gym", "openenv")
EnvFactory = Callable[..., BaseTextEnv]
Foreign = Any  # objects of the user's classes


@dataclass(frozen=True)
class EnvSpec:
    """A registered class, and further arguments besides the settings of the run and the row."""

    entry_point: Foreign
    kwargs: Mapping[str, object]


def register(
    name: str = "",
    factory: EnvFactory | str | None = None,
    *,
    id: str = "",
    entry_point: EnvFactory | str | None = None,
    kwargs: Mapping[str, object] | None = None,
) -> None:
    """Make ``environment.env_class=name`` mean this class (or ``module:Class``).

    Args:
        name: the value of the setting, and of the rows' column ``env_class``.
        factory: the class, or ``module:Class``.
        id: ``name``, as SkyRL calls it.
        entry_point: ``factory``, as SkyRL calls it.
        kwargs: further arguments of the class.
    """
    name = name or id
    target = factory or entry_point
    if not name or target is None:
        raise UserError(
            "register takes a name and a class (or module:Class): id= and entry_point= say the same"
        )
    ENVS[name] = EnvSpec(target, kwargs) if kwargs else target


def make(name: str, env_config: EnvConfig | None = None, extras: Row | None = None) -> BaseTextEnv:
    """One environment, to be played by hand with ``init(conversation)`` and ``step(action)``.

    Raises:
        UserError: if there is none of this name, listing the nearest.
    """
    return env_factory(name)(env_config=env_config or {}, extras=extras or {})


def env_factory(name: str, kwargs: Mapping[str, object] | None = None) -> type[BaseTextEnv]:
    """The class behind a name.

    Args:
        kwargs: further arguments of the class.

    Raises:
        UserError: if there is none, listing the nearest names.
    """
    kind, colon, url = name.partition(":")
    target: Any
    if kind in SERVED:
        target = ENVS[kind].at(url)
    elif colon:
        target = name
    else:
        target = ENVS[name]
    class_kwargs = dict(kwargs or {})
    if isinstance(target, EnvSpec):  # the caller's arguments count more than the registered ones
        class_kwargs = {**target.kwargs, **class_kwargs}
        target = target.entry_point
    if isinstance(target, str):
        target = resolve_reference(target, kind="environment")
    if isinstance(target, type) and issubclass(target, BaseTextEnv):
        return target.as_environment(name, class_kwargs)
    if isinstance(target, type) and not hasattr(target, "init") and hasattr(target, "reset"):
        from skyasync.envs.adapters.gem import played_by_gem

        return played_by_gem(target, class_kwargs)

    class Made(BaseTextEnv):
        """Made by a function: ``__new__`` returns an environment of another class."""

        def __new__(cls, *arguments: object, **settings: object) -> BaseTextEnv:  # type: ignore[misc]
            env: BaseTextEnv = target(*arguments, **settings, **class_kwargs)
            return env

    return Made


__all__ = [
    "ENVS",
    "BaseTextEnv",
    "BaseTextEnvStepOutput",
    "ToolError",
    "env_factory",
    "make",
    "register",
    "tool",
]
