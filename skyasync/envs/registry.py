"""Environments by name: a registered id, or ``module:Class`` for one in a file of the user's own.

A class that is no ``BaseTextEnv`` is played by what ``adapted`` makes of it: one with ``reset(seed)`` and a ``step`` of
five values (gem, gymnasium) by ``skyasync.envs.adapters.gem``, one with ``as_environment`` by what that returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from skyasync.envs.base import BaseTextEnv
from skyasync.errors import UserError
from skyasync.other_frameworks import other_frameworks
from skyasync.registry import Registry, resolve_reference

ENVS = Registry(
    "environment",
    {
        "skyasync.envs.gsm8k": "gsm8k",
        "skyasync.envs.reward": "reward",
        **{f"skyasync.envs.adapters.{name}": name for name in ("gem", "gymnasium", "textarena")},
        **other_frameworks().environments,
    },
    capabilities={"extra": ""},  # of this library, that installs what it needs
)
EnvFactory = Callable[..., BaseTextEnv]
Foreign = Any  # what belongs to the user's classes


@dataclass(frozen=True)
class EnvSpec:
    """A registered class, and what it is made with besides the settings of the run and the row."""

    id: str
    entry_point: Foreign
    kwargs: Mapping[str, object] = field(default_factory=dict)


def register(
    name: str = "", factory: EnvFactory | str | None = None, *, id: str = "",
    entry_point: EnvFactory | str | None = None, kwargs: Mapping[str, object] | None = None,
) -> None:  # fmt: skip
    """Make ``environment.env_class=name`` mean this class (or ``module:Class``).

    Args:
        name: what the key says.
        factory: the class, or where it is.
        id: ``name``, as SkyRL calls it.
        entry_point: ``factory``, as SkyRL calls it.
        kwargs: the class is made with these as well.
    """
    name, found = name or id, factory or entry_point
    if not name or found is None:
        raise UserError("register takes a name and a class (or module:Class): id= and entry_point= say the same")
    ENVS[name] = EnvSpec(name, found, kwargs) if kwargs else found


def make(name: str, env_config: dict[str, Any] | None = None, extras: dict[str, Any] | None = None) -> BaseTextEnv:
    """One environment, to be played by hand: ``init`` it with a conversation, then ``step`` through it.

    Raises:
        UserError: if there is none of this name, listing the nearest.
    """
    return env_factory(name)(env_config=env_config or {}, extras=extras or {})


def env_factory(name: str, kwargs: Mapping[str, object] | None = None) -> EnvFactory:
    """The class behind a name.

    Args:
        kwargs: it is made with these as well.

    Raises:
        UserError: if there is none, listing the nearest names.
    """
    found: Any = name if ":" in name else ENVS[name]
    more = dict(kwargs or {})
    if isinstance(found, EnvSpec):
        found, more = found.entry_point, {**found.kwargs, **more}
    return adapted(name, resolve_reference(found, kind="environment") if isinstance(found, str) else found, more)


def adapted(name: str, found: Foreign, kwargs: Mapping[str, object]) -> EnvFactory:
    """What plays episodes of the class behind a name."""
    if hasattr(found, "as_environment"):
        own: EnvFactory = found.as_environment(name, kwargs)
        return own
    if isinstance(found, type) and not hasattr(found, "init") and hasattr(found, "reset"):
        from skyasync.envs.adapters.gem import played_by_gem

        return played_by_gem(found, kwargs)
    return partial(found, **kwargs) if kwargs else found
