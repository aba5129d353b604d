"""A value of another system as ours.

Invariant: what is returned can be set as it is; what cannot be carried over raises ``NoCounterpartError``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

from skyasync.config.values import Value, value_of, written
from skyasync.interop.settings import TableRow, Target
from skyasync.interop.system import systems

N = "generator.n_samples_per_prompt"
BATCH = "trainer.train_batch_size"


class NoCounterpartError(Exception):
    """This value of a known key cannot be carried over; the message may say what to do."""


@dataclass
class ConversionContext:
    """What else is set: ``ours`` by our keys, ``theirs`` by the system's. ``defaults`` are our keys' defaults."""

    ours: Mapping[str, Value] = field(default_factory=dict)
    theirs: Mapping[str, Value] = field(default_factory=dict)
    defaults: Mapping[str, Value] = field(default_factory=dict)

    def number(self, path: str) -> float:
        """The number that our key has, or will have: set by our name, by any system's, or by default."""
        given = [self.ours.get(path), *(self.theirs.get(name) for name in _spellings(path)), self.defaults.get(path)]
        value = next((value for value in given if value is not None), None)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise NoCounterpartError(f"it depends on {path}")
        return value


Conversion = Callable[[Value, ConversionContext], list[Value]]
"""What ``@name`` in a table does: from their value, and what else is set, to a value for each free target."""


def _spellings(path: str) -> list[str]:
    """Every system's plain names for our key."""
    rows = (row for system in systems().values() for row in system.table.rows)
    return [name for row in rows if row.free == [Target(path)] and not row.function for name in row.names]


def converted(row: TableRow, value: Value, context: ConversionContext) -> dict[str, Value] | None:
    """What the row's targets become (``key[0]`` for an entry of a list), None where they stay at their defaults.

    Raises:
        NoCounterpartError: if the value has none.
    """
    text = "" if isinstance(value, list | dict) else written(value)
    alias = None if isinstance(value, list | dict) else row.aliases.get(text, row.aliases.get("*"))
    if alias == "~":
        return None
    if alias == "-" or row.kind != "key":
        raise NoCounterpartError(row.note)
    if alias is None and value is None:
        return None
    if alias is not None:
        values: list[Value] = [value_of(alias)] * len(row.free)
    elif row.function:
        values = conversions()[row.function](value, context)
    else:
        values = [value] * len(row.free)
    result = dict(zip(map(str, row.free), values, strict=False))
    return result | {target.path: value_of(target.fixed or "") for target in row.fixed}


def _none(value: Value, context: ConversionContext) -> list[Value]:
    raise NoCounterpartError("")


def is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _per_prompt(value: Value, context: ConversionContext) -> list[Value]:
    """Responses there, prompts here."""
    samples = context.number(N)
    if not is_number(value) or value % samples:  # type: ignore[operator]
        raise NoCounterpartError(f"{written(value)} responses are no whole number of groups of {samples:g}")
    return [int(value // samples)]  # type: ignore[operator]


def _each(value: Value, context: ConversionContext) -> list[Value]:
    return value if isinstance(value, list) else [value_of(part) for part in str(value).replace(",", " ").split()]


def _list(value: Value, context: ConversionContext) -> list[Value]:
    return [as_list(value)]


def as_list(value: Value) -> list[Value]:
    """``a,b`` as a list of texts, anything else that is none as a list of one."""
    if isinstance(value, list):
        return value
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else [value]


def _int(value: Value, context: ConversionContext) -> list[Value]:
    if isinstance(value, float | int) and value == int(value):
        return [int(value)]
    raise NoCounterpartError("a whole number here")


def _bound(value: Value, context: ConversionContext) -> list[Value]:
    low, high = _each(value, context) if value is not None else [0, 0]
    if low != -high:  # type: ignore[operator]
        raise NoCounterpartError("the range is symmetric here")
    return [high]


def _min_lr(value: Value, context: ConversionContext) -> list[Value]:
    """The share of its rate that a schedule ends at, where the chosen schedule ends at one."""
    keys = [key for key in context.theirs if key.endswith(("lr_scheduler", "lr_scheduler_type"))]
    schedules = [str(context.theirs[key]) for key in keys]
    if schedules and not any(name.endswith("min_lr") or name == "cosine" for name in schedules):
        raise NoCounterpartError(f"the schedule {schedules[0]} ends at no such rate")
    return [{"min_lr_rate": value}]


def _exports(value: Value, context: ConversionContext) -> list[Value]:
    """A switch there, the steps between checkpoints here."""
    interval = context.number("trainer.ckpt_interval")
    if interval <= 0:
        raise NoCounterpartError("")
    return [int(interval)]


_SHARED: dict[str, Conversion] = {
    "-": _none,
    "per_prompt": _per_prompt,
    "each": _each,
    "list": _list,
    "not": lambda value, context: [not value],
    "int": _int,
    "bound": _bound,
    "min_lr": _min_lr,
    "exports": _exports,
}


@cache
def conversions() -> dict[str, Conversion]:
    """By the names that tables have for them: those that several systems share, and each system's own."""
    own = [system.translation.CONVERSIONS for system in systems().values()]
    return {name: function for functions in (_SHARED, *own) for name, function in functions.items()}
