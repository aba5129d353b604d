"""A setting with its documentation and its limits, and the list of all settings of a schema.

Invariant: help, loading, hints and the written documentation all read this one list, so that what is documented is
what is accepted.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from math import isfinite
from operator import attrgetter
from typing import Any, TypeVar

from skyasync.config.values import type_name, written
from skyasync.errors import UserError, unknown
from skyasync.registry import resolve_reference

T = TypeVar("T")

MISSING = "???"  # what OmegaConf writes where a value must be given


class When:
    """When a key is read: where ``test`` of the configuration is true.

    Args:
        alternatives: the same as one would write it: ``a.b`` (it is set), ``a.b=c|d``, ``not a.b``.
        choices: what help writes in their place, if they depend on what is registered.
    """

    def __init__(
        self, test: Callable[[Any], object], *alternatives: str, choices: Callable[[], str] | None = None
    ) -> None:
        self.test, self.alternatives, self.choices = test, alternatives, choices

    def __call__(self, cfg: object) -> bool:
        return bool(self.test(cfg))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, When) and self.alternatives == other.alternatives

    def __hash__(self) -> int:
        return hash(self.alternatives)

    def __str__(self) -> str:
        return self.choices() if self.choices else " or ".join(self.alternatives)

    @property
    def paths(self) -> list[str]:
        """The keys that decide."""
        return list(dict.fromkeys(text.removeprefix("not ").partition("=")[0] for text in self.alternatives))

    def found(self, cfg: object) -> str:
        """What these keys are, as one would write them."""
        return " and ".join(f"{path}={written(attrgetter(path)(cfg))}" for path in self.paths)


@dataclass(frozen=True)
class Key:
    """One setting. ``default`` is OmegaConf's ``MISSING`` if the user must give a value."""

    path: str
    type: Any
    default: Any = MISSING
    doc: str = ""
    choices: tuple[Any, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None
    also: tuple[float, ...] = ()
    registry: str = ""
    open_ended: bool = False
    pattern: str = ""
    when: When | None = None
    infinite: bool = False

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def group(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def is_mapping(self) -> bool:
        """A free mapping: ``<path>.<anything>=value`` sets one of its entries."""
        arms = typing.get_args(self.type) if type(None) in typing.get_args(self.type) else (self.type,)
        return any((typing.get_origin(arm) or arm) is dict for arm in arms)

    def names(self) -> list[str]:
        """Names registered for a registry-backed key; empty for any other. Imports the registry alone."""
        return resolve_reference(self.registry, kind="registry").names() if self.registry else []

    def options(self) -> list[Any]:
        """The values that it may have, where they can be counted; with ``registry``, the names that are registered."""
        return [*self.choices, *self.names()]

    def bounds(self) -> str:
        """The allowed interval in words, "" if there is none."""
        limits = (
            (self.low, "at least"),
            (self.above, "greater than"),
            (self.high, "at most"),
            (self.below, "less than"),
        )
        text = " and ".join(f"{words} {_written(limit)}" for limit, words in limits if limit is not None)
        return " or ".join([*map(_written, self.also), text]) if self.also else text

    def allows(self, number: float) -> bool:
        """Whether a number lies within the bounds; NaN never does."""
        return number in self.also or (
            number == number
            and (self.low is None or number >= self.low)
            and (self.above is None or number > self.above)
            and (self.high is None or number <= self.high)
            and (self.below is None or number < self.below)
        )


def _written(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def key(
    default: T,
    doc: str,
    *,
    choices: tuple[Any, ...] = (),
    refused: tuple[tuple[str, str], ...] = (),
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    also: tuple[float, ...] = (),
    registry: str = "",
    open_ended: bool = False,
    pattern: str = "",
    when: When | None = None,
    infinite: bool = False,
) -> T:
    """A documented field. ``low``/``high`` are inclusive bounds, ``above``/``below`` exclusive ones;
    ``also`` are numbers outside of them that are allowed.

    ``refused`` has values that are known elsewhere and are no choice here, each with the reason.
    Of a list, bounds, choices and registry hold for each element. ``registry`` ("module:NAME") says
    where the allowed names are registered; with ``open_ended`` a ``module:attribute`` reference (or, for paths,
    any string) is accepted as well, and beside ``choices`` what matches the whole of ``pattern``. ``when`` says which
    other keys it takes for this one to be read: set without them it is refused. Numbers must be finite unless
    ``infinite``.
    """
    metadata = {name: value for name, value in locals().items() if name != "default"}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def inheriting(group: type[T]) -> type[T]:
    """Make a subclass of a group a dataclass in which every field that it does not define itself may be null, and is.

    What null stands for is for the reader of the group to say.
    """
    own = inspect.get_annotations(group)
    group.__annotations__ = dict(own)
    for inherited in dataclasses.fields(group.__mro__[1]):
        if inherited.name not in own:
            group.__annotations__[inherited.name] = f"{inherited.type} | None"
            setattr(group, inherited.name, field(default=None, metadata=inherited.metadata))
    return dataclass(group)


@dataclass(frozen=True)
class Keys:
    """All keys of a schema, by dotted path and in the schema's order, and the groups that hold them."""

    schema: type
    by_path: dict[str, Key] = field(default_factory=dict)
    groups: dict[str, type] = field(default_factory=dict)

    @classmethod
    def of(cls, schema: type) -> Keys:
        """Read a dataclass, its subclasses and nested dataclasses included.

        Raises:
            UserError: if a group's annotations cannot be resolved (a class defined inside a function).
        """
        return _read(schema)

    def __iter__(self) -> Iterator[Key]:
        return iter(self.by_path.values())

    def __contains__(self, path: str) -> bool:
        return path in self.by_path

    def __getitem__(self, path: str) -> Key:
        return self.by_path[path]

    def holder(self, path: str) -> Key | None:
        """The key that ``path`` sets: itself, or the free mapping that ``path`` is an entry of."""
        if path in self.by_path:
            return self.by_path[path]
        parts = path.split(".")
        if not all(parts) or "[" in path:
            return None
        for length in range(len(parts) - 1, 0, -1):
            key = self.by_path.get(".".join(parts[:length]))
            if key is not None:
                return key if key.is_mapping else None
        return None

    def within(self, group: str) -> list[Key]:
        """The keys in a group and below it; all of them for the empty name."""
        return [key for key in self if not group or key.path.startswith(f"{group}.")]


@functools.lru_cache(maxsize=8)
def _read(schema: type) -> Keys:
    keys = Keys(schema)
    for found in _walk(schema, None, "", keys.groups):
        keys.by_path[found.path] = found
    return keys


def _walk(
    group: type, instance: object, prefix: str, groups: dict[str, type], when: When | None = None
) -> Iterator[Key]:
    """``when``: the condition of the group that this one is in, which holds for all in it that name none."""
    hints = _hints(group)
    for item in dataclasses.fields(group):
        path = prefix + item.name
        value = getattr(instance, item.name) if instance is not None else _default(item)
        nested = type(value) if dataclasses.is_dataclass(value) else hints[item.name]
        if dataclasses.is_dataclass(nested) and isinstance(nested, type):
            groups[path], inherited = nested, item.metadata.get("when", when)
            yield from _walk(nested, None if value == MISSING else value, f"{path}.", groups, inherited)
        else:
            known = {f.name for f in dataclasses.fields(Key)} - {"path", "type", "default"}
            metadata = {name: entry for name, entry in item.metadata.items() if name in known}
            yield Key(path, hints[item.name], value, **{**metadata, "when": metadata.get("when") or when})


def _default(item: dataclasses.Field[Any]) -> object:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return MISSING if item.default is dataclasses.MISSING else item.default


def _hints(group: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(group)
    except NameError as error:
        raise UserError(
            f"configuration group {group.__qualname__}: {error}; define it at the top of a module"
        ) from error


def entry_problem(kind: type, name: str, value: object) -> str:
    """What is wrong with an entry of a free mapping that is read as a ``kind``, behind its path; "" if nothing is."""
    keys = Keys.of(kind)
    if name not in keys:
        return f": {unknown('entry', name, keys.by_path)}"
    entry = keys[name]
    if entry.choices and value not in entry.choices:
        return f"={value}: {unknown(name, str(value), entry.choices)}"
    expected = typing.get_origin(entry.type) or entry.type
    number = isinstance(value, int | float) and not isinstance(value, bool)
    right = number if expected is float else isinstance(value, expected) and (number or expected is not int)
    if not right:
        return f": expected {type_name(entry.type)}, found {value!r}"
    if isinstance(value, int | float) and number and not (isfinite(value) and entry.allows(value)):
        return f"={value:g} must be {entry.bounds() or 'finite'}"
    return ""
