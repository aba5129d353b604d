"""The configuration once it is settled: it can be read, and copied, and not written to.

Invariant: parts that were made from a value cannot disagree with the configuration, since a write after ``freeze``
raises one line that names the key and the places where it is set. A copy (``copy.deepcopy``, ``dataclasses.replace``,
what is sent to another process) is free again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import NoReturn, TypeVar

from skyasync.errors import UserError

_PATH = "_frozen_path"
"""Entry in a frozen group's ``__dict__``: its dotted path, "" for the whole configuration."""

F = TypeVar("F", bound=Callable[..., object])


class FrozenConfigError(UserError, AttributeError):
    """A write to a settled configuration."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} cannot be changed any more: prepare() has settled the configuration, and the run's parts are "
            f"made from it; set it as an override ({path}=VALUE), or in prepare() before super().prepare()"
        )


class Settings:
    """A group of settings, which ``freeze`` can make read-only."""

    def __setattr__(self, name: str, value: object) -> None:
        _refuse_if_frozen(self, name)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        _refuse_if_frozen(self, name)
        object.__delattr__(self, name)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != _PATH}


def freeze(group: object, path: str = "") -> None:
    """Make a configuration and all groups, lists and mappings in it read-only. Freezing twice changes nothing."""
    if not is_dataclass(group) or not hasattr(group, "__dict__"):
        return
    kind = type(group)
    if not issubclass(kind, Settings) and kind.__setattr__ is object.__setattr__:  # a plain dataclass of the user's
        for method in ("__setattr__", "__delattr__", "__getstate__"):
            setattr(kind, method, getattr(Settings, method))
    for name in (item.name for item in fields(group)):
        vars(group)[name] = _frozen(vars(group).get(name), f"{path}.{name}" if path else name)
    vars(group)[_PATH] = path


def _refuse_if_frozen(group: object, name: str) -> None:
    path = vars(group).get(_PATH)
    if path is not None:
        raise FrozenConfigError(f"{path}.{name}" if path else name)


def _frozen(value: object, path: str) -> object:
    if isinstance(value, dict):
        return _Mapping({name: _frozen(entry, f"{path}.{name}") for name, entry in value.items()}, path)
    if isinstance(value, list):
        return _List((_frozen(entry, path) for entry in value), path)
    freeze(value, path)
    return value


def _refused(function: F) -> F:
    def refuse(self: _List | _Mapping, *args: object, **kwargs: object) -> NoReturn:
        raise FrozenConfigError(self.path)

    refuse.__doc__ = function.__doc__
    return refuse  # type: ignore[return-value]


class _List(list[object]):
    """A list of the settled configuration."""

    def __init__(self, values: Iterable[object] = (), path: str = "") -> None:
        super().__init__(values)
        self.path = path

    def __reduce__(self) -> tuple[type, tuple[list[object]]]:
        return list, (list(self),)

    append = _refused(list.append)
    extend = _refused(list.extend)
    insert = _refused(list.insert)
    remove = _refused(list.remove)
    pop = _refused(list.pop)
    clear = _refused(list.clear)
    sort = _refused(list.sort)
    reverse = _refused(list.reverse)
    __setitem__ = _refused(list.__setitem__)
    __delitem__ = _refused(list.__delitem__)
    __iadd__ = _refused(list.__iadd__)
    __imul__ = _refused(list.__imul__)


class _Mapping(dict[object, object]):
    """A free mapping of the settled configuration."""

    def __init__(self, values: Iterable[tuple[object, object]] | dict[object, object] = (), path: str = "") -> None:
        super().__init__(values)
        self.path = path

    def __reduce__(self) -> tuple[type, tuple[dict[object, object]]]:
        return dict, (dict(self),)

    update = _refused(dict.update)
    pop = _refused(dict.pop)
    popitem = _refused(dict.popitem)
    clear = _refused(dict.clear)
    setdefault = _refused(dict.setdefault)
    __setitem__ = _refused(dict.__setitem__)
    __delitem__ = _refused(dict.__delitem__)
    __ior__ = _refused(dict.__ior__)
