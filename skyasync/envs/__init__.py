"""Environments by name: a registered id, ``module:Class`` for one in the user's own file, or
``openenv:URL``.

Every name gives a subclass of ``BaseTextEnv``. A class with ``reset(seed)`` and a ``step`` of five
values (gem, gymnasium) is played by ``skyasync.envs.adapters.gem``; a function that makes
environments becomes a class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from skyasync.envs.base import BaseTextEnv, BaseTextEnvStepOutput
from skyasync.envs.tools import ToolError, tool
from skyasync.errors import UserError
from skyasync.other_frameworks import other_frameworks
from skyasync.registry import Registry, resolve_reference

ENVS = Registry(
    "environment",
    {
        "skyasync.envs.reward": "reward gsm8k",
        **{
            f"skyasync.envs.adapters.{name}": name
            for name in ("gem", "gymnasium", "nemo_gym", "openenv", "textarena")
        },
        **other_frameworks().environments,
    },
    capabilities={"extra": ""},  # the extra of this library that installs what it needs
)
SERVED = (
    "nemo_gym",
    "openenv",
)  # environments by the address of their server: ``openenv:http://...``
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
        name: what the key says.
        factory: the class, or where it is.
        id: ``name``, as SkyRL calls it.
        entry_point: ``factory``, as SkyRL calls it.
        kwargs: the class is made with these as well.
    """
    name = name or id
    target = factory or entry_point
    if not name or target is None:
        raise UserError(
            "register takes a name and a class (or module:Class): id= and entry_point= say the same"
        )
    ENVS[name] = EnvSpec(target, kwargs) if kwargs else target


def make(
    name: str, env_config: dict[str, Any] | None = None, extras: dict[str, Any] | None = None
) -> BaseTextEnv:
    """One environment, to be played by hand: ``init`` it with a conversation, then ``step`` through
    it.

    Raises:
        UserError: if there is none of this name, listing the nearest.
    """
    return env_factory(name)(env_config=env_config or {}, extras=extras or {})


def env_factory(name: str, kwargs: Mapping[str, object] | None = None) -> type[BaseTextEnv]:
    """The class behind a name.

    Args:
        kwargs: it is made with these as well.

    Raises:
        UserError: if there is none, listing the nearest names.
    """
    kind, colon, url = name.partition(":")
    target: Any = ENVS[kind].at(url) if kind in SERVED else name if colon else ENVS[name]
    more = dict(kwargs or {})
    if isinstance(target, EnvSpec):
        target, more = target.entry_point, {**target.kwargs, **more}
    if isinstance(target, str):
        target = resolve_reference(target, kind="environment")
    if isinstance(target, type) and issubclass(target, BaseTextEnv):
        return target.as_environment(name, more)
    if isinstance(target, type) and not hasattr(target, "init") and hasattr(target, "reset"):
        from skyasync.envs.adapters.gem import played_by_gem

        return played_by_gem(target, more)

    class Made(BaseTextEnv):
        """Made by a function: ``__new__`` returns an environment of another class."""

        def __new__(cls, *arguments: object, **settings: object) -> BaseTextEnv:  # type: ignore[misc]
            made: BaseTextEnv = target(*arguments, **settings, **more)
            return made

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
