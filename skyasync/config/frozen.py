"""The configuration after ``prepare``: it can be read and copied; a write raises an error that names the key.

Invariant: parts that were made from a value cannot disagree with the configuration. A copy (``copy.deepcopy``,
``dataclasses.replace``, what is sent to another process) can be changed.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, NoReturn

from skyasync.errors import UserError

_PATH = "_frozen_path"  # in a frozen value's ``__dict__``: its dotted path, "" for the whole configuration
_WRITES: dict[Any, str] = {
    list: "append clear extend insert pop remove reverse sort __setitem__ __delitem__ __iadd__ __imul__",
    dict: "clear pop popitem setdefault update __setitem__ __delitem__ __ior__",
}


class FrozenConfigError(UserError, AttributeError):
    """A write to a settled configuration."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} cannot be changed any more: prepare() has settled the configuration, and the run's parts are "
            f"made from it; set it as an override ({path}=VALUE), or in prepare() before super().prepare()"
        )


def freeze(group: Any, path: str = "") -> None:  # noqa: ANN401  (a configuration, a user's groups included)
    """Make a configuration and all groups, lists and mappings in it read-only. Freezing twice changes nothing."""
    for name in [item.name for item in fields(group)]:
        vars(group)[name] = _frozen(vars(group)[name], f"{path}.{name}" if path else name)
    if _PATH not in vars(group):
        vars(group)[_PATH] = path
        object.__setattr__(group, "__class__", _frozen_group(type(group)))  # type: ignore[arg-type]


def _frozen(value: Any, path: str) -> object:  # noqa: ANN401  (what a configuration holds)
    if is_dataclass(value) and hasattr(value, "__dict__"):
        freeze(value, path)
        return value
    kind = next((kind for kind in _WRITES if isinstance(value, kind)), None)
    if kind is None:
        return value
    entries = (
        {name: _frozen(entry, f"{path}.{name}") for name, entry in value.items()}
        if kind is dict
        else [_frozen(entry, path) for entry in value]
    )
    frozen = kind.__new__(_frozen_container(kind))
    kind.__init__(frozen, entries)
    vars(frozen)[_PATH] = path
    return frozen


@cache
def _frozen_container(kind: type[list[Any]] | type[dict[Any, Any]]) -> type:
    """A list or mapping type whose methods raise on writes. Its copies are plain."""

    def refuse(self: object, *_: object, **__: object) -> NoReturn:
        raise FrozenConfigError(vars(self)[_PATH])

    free = {"__new__": lambda cls, *args: kind(*args), "__reduce__": lambda self: (kind, (kind(self),))}
    return type(kind.__name__, (kind,), dict.fromkeys(_WRITES[kind].split(), refuse) | free)


@cache
def _frozen_group(kind: type) -> type:
    """A subclass of a group's class whose instances raise on writes. Their copies are of the group's class."""

    def refuse(self: object, name: str, *_: object) -> NoReturn:
        path = vars(self)[_PATH]
        raise FrozenConfigError(f"{path}.{name}" if path else name)

    def settings(self: object) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != _PATH}

    methods = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__setattr__": refuse,
        "__delattr__": refuse,
        "__new__": lambda cls, *args, **kwargs: kind(*args, **kwargs),
        "__reduce__": lambda self: (object.__new__, (kind,), settings(self)),
        "__eq__": lambda self, other: (
            isinstance(other, kind) and all(vars(self)[item.name] == vars(other)[item.name] for item in fields(self))
        ),
        "__hash__": None,
    }
    return type(kind.__name__, (kind,), methods)
