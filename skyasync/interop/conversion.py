"""A value of another system as ours.

Invariant: the result can be set as it is; a value without a counterpart raises ``NoCounterpartError``.
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
        """The number that our key has, or will have: set by our name, by any system's plain name, or by default."""
        rows = (row for system in systems().values() for row in system.table.rows)
        names = [name for row in rows if row.free == [Target(path)] and not row.function for name in row.names]
        given = [self.ours.get(path), *(self.theirs.get(name) for name in names), self.defaults.get(path)]
        value = next((value for value in given if value is not None), None)
        if not is_number(value):
            raise NoCounterpartError(f"it depends on {path}")
        return value  # type: ignore[return-value]


Conversion = Callable[[Value, ConversionContext], list[Value]]
"""What ``@name`` in a table does: from their value, and what else is set, to a value for each free target."""


def converted(row: TableRow, value: Value, context: ConversionContext) -> dict[str, Value] | None:
    """What the row's targets become (``key[0]`` for an entry of a list), None where they stay at their defaults.

    Raises:
        NoCounterpartError: if the value has none.
    """
    alias = None if isinstance(value, list | dict) else row.aliases.get(written(value), row.aliases.get("*"))
    if alias == "~":
        return None
    if alias == "-" or row.kind != "key":
        raise NoCounterpartError(row.note)
    if alias is not None:
        values: list[Value] = [value_of(alias)] * len(row.free)
    elif value is None:
        return None
    elif row.function:
        values = conversions()[row.function](value, context)
    else:
        values = [value] * len(row.free)
    settings = dict(zip(map(str, row.free), values, strict=False))
    return settings | {target.path: value_of(target.fixed) for target in row.targets if target.fixed is not None}


def is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_list(value: Value) -> list[Value]:
    """``a,b`` as a list of texts, anything else that is not a list as a list of one."""
    if isinstance(value, list):
        return value
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else [value]


def _no_counterpart(value: Value, context: ConversionContext) -> list[Value]:
    raise NoCounterpartError("")


def _per_prompt(value: Value, context: ConversionContext) -> list[Value]:
    """Responses there, prompts here."""
    samples = context.number(N)
    if not is_number(value) or value % samples:  # type: ignore[operator]
        raise NoCounterpartError(f"{written(value)} responses are no whole number of groups of {samples:g}")
    return [int(value // samples)]  # type: ignore[operator]


def _each(value: Value, context: ConversionContext) -> list[Value]:
    return value if isinstance(value, list) else [value_of(part) for part in str(value).replace(",", " ").split()]


def _int(value: Value, context: ConversionContext) -> list[Value]:
    if isinstance(value, float | int) and value == int(value):
        return [int(value)]
    raise NoCounterpartError("a whole number here")


def _bound(value: Value, context: ConversionContext) -> list[Value]:
    bounds = _each(value, context)
    if len(bounds) != 2 or bounds[0] != -bounds[1]:  # type: ignore[operator]
        raise NoCounterpartError("the range is symmetric here")
    return bounds[1:]


def _min_lr(value: Value, context: ConversionContext) -> list[Value]:
    """The final learning rate as a share of the first, if the chosen schedule has one."""
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
    "-": _no_counterpart,
    "per_prompt": _per_prompt,
    "each": _each,
    "list": lambda value, context: [as_list(value)],
    "not": lambda value, context: [not value],
    "int": _int,
    "bound": _bound,
    "min_lr": _min_lr,
    "exports": _exports,
}


@cache
def conversions() -> dict[str, Conversion]:
    """By their names in tables: those that several systems share, and each system's own."""
    own = [system.translation.CONVERSIONS for system in systems().values()]
    return {name: function for functions in (_SHARED, *own) for name, function in functions.items()}
