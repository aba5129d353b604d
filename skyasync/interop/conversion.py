"""A value of another system as ours, and the message for a user who writes another system's key or
value.

Invariant: the result can be set as it is; a value without a counterpart raises
``NoCounterpartError``. Every message follows from the tables; systems that mean different things
are all named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

from skyasync.config.values import Value, value_of, written
from skyasync.interop.system import TableRow, Target, systems
from skyasync.other_frameworks import UNKNOWN

N = "generator.n_samples_per_prompt"
BATCH = "trainer.train_batch_size"


class NoCounterpartError(Exception):
    """This value of a known key cannot be carried over; the message may say what to do."""


@dataclass
class ConversionContext:
    """What else is set: ``ours`` by our keys, ``theirs`` by the system's. ``defaults`` are our
    keys' defaults."""

    ours: Mapping[str, Value] = field(default_factory=dict)
    theirs: Mapping[str, Value] = field(default_factory=dict)
    defaults: Mapping[str, Value] = field(default_factory=dict)

    def number(self, path: str) -> float:
        """The number that our key has, or will have: set by our name, by any system's plain name,
        or by default."""
        rows = (row for system in systems().values() for row in system.table.rows)
        names = [
            name
            for row in rows
            if row.free == [Target(path)] and not row.function
            for name in row.names
        ]
        given = [
            self.ours.get(path),
            *(self.theirs.get(name) for name in names),
            self.defaults.get(path),
        ]
        value = next((value for value in given if value is not None), None)
        if not is_number(value):
            raise NoCounterpartError(f"it depends on {path}")
        return value  # type: ignore[return-value]


Conversion = Callable[[Value, ConversionContext], list[Value]]
"""What ``@name`` in a table does: from their value, and what else is set, to a value for each free
target."""


def converted(row: TableRow, value: Value, context: ConversionContext) -> dict[str, Value] | None:
    """What the row's targets become (``key[0]`` for an entry of a list), None where they stay at
    their defaults.

    Raises:
        NoCounterpartError: if the value has none.
    """
    whole = isinstance(value, list | dict) and value  # which no alias spells
    if whole:
        alias = None
    else:
        alias = row.aliases.get(written(value), row.aliases.get("*"))
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
    elif isinstance(value, list):
        entries = [_entry(row, entry) for entry in value]
        values = [entries] * len(row.free)
    else:
        values = [value] * len(row.free)
    settings = dict(zip(map(str, row.free), values, strict=False))
    return settings | {
        target.path: value_of(target.fixed) for target in row.targets if target.fixed is not None
    }


def _entry(row: TableRow, entry: Value) -> Value:
    """An entry of a list, where it is spelled differently; one without a counterpart stays."""
    if isinstance(entry, str):
        alias = row.aliases.get(written(entry), "-")
    else:
        alias = "-"
    if alias in "~-":
        return entry
    return value_of(alias)


def is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_list(value: Value) -> list[Value]:
    """``a,b`` as a list of texts, anything else that is not a list as a list of one."""
    if isinstance(value, list):
        return value
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return [value]


def _no_counterpart(value: Value, context: ConversionContext) -> list[Value]:
    raise NoCounterpartError("")


def _per_prompt(value: Value, context: ConversionContext) -> list[Value]:
    """Responses there, prompts here."""
    samples = context.number(N)
    if not is_number(value) or value % samples:  # type: ignore[operator]
        raise NoCounterpartError(
            f"{written(value)} responses are not a multiple of the group size {samples:g}"
        )
    return [int(value // samples)]  # type: ignore[operator]


def _each(value: Value, context: ConversionContext) -> list[Value]:
    if isinstance(value, list):
        return value
    return [value_of(part) for part in str(value).replace(",", " ").split()]


def _int(value: Value, context: ConversionContext) -> list[Value]:
    if isinstance(value, float | int) and value % 1 == 0:  # neither infinite nor NaN
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


# ---------------------------------------------------------------- hints


def key_hint(path: str, value: object = UNKNOWN, context: ConversionContext | None = None) -> str:
    """What the tables say about ``path``, "" if no system has such a key.

    Args:
        value: the value to set, so that the hint says the whole setting.
        context: what else was set, for units that depend on it.
    """
    every = systems().values()
    matches = [(system, row) for system in every if (row := system.table.find(path))]
    if not matches:  # a key without its groups counts if all keys that end so have one counterpart
        ending = [
            (s, row)
            for s in every
            for name, row in s.table.exact.items()
            if name.endswith(f".{path}")
        ]
        if (
            len({(row.kind, *map(str, row.targets)) for _, row in ending}) == 1
            and ending[0][1].kind == "key"
        ):
            matches = list({system.name: (system, row) for system, row in ending}.values())
    answers: dict[str, list[str]] = {}
    for system, row in matches:
        answers.setdefault(_answer(row, value, context or ConversionContext()), []).append(
            system.title
        )
    if len(answers) != 1:
        lines = [
            f"{_and(titles)} {'mean' if titles[1:] else 'means'}: {answer}"
            for answer, titles in answers.items()
        ]
        return "; ".join(lines)
    [(answer, titles)], row = answers.items(), matches[0][1]
    if not answer.startswith("here it is"):
        return f"that is {_and(titles)}'s; {answer}"
    target = row.free[0].path if row.free else ""
    if value is UNKNOWN:
        unchanged = target
    else:
        unchanged = f"{target}={written(value)}"
    if (
        target.endswith(f".{path}")
        and answer.removeprefix("here it is ").partition(" (")[0] == unchanged
    ):
        return f"did you mean {target}?{_note(row)}"
    return f"that is how {_and(titles)} {'spell' if titles[1:] else 'spells'} it; {answer}"


def _answer(row: TableRow, value: object, context: ConversionContext) -> str:
    if row.kind == "-":
        return f"it has no counterpart here: {row.note}"
    if row.kind == "=":
        return f"it needs no setting here: {row.note}"
    names = " and ".join(map(str, row.free))
    if value is UNKNOWN:
        aliases = ", ".join(
            f"{theirs} is {ours}" for theirs, ours in row.aliases.items() if ours not in "~-"
        )
        return f"here it is {names}{_note(row, aliases)}"
    try:
        settings = converted(row, value, context)  # type: ignore[arg-type]
    except NoCounterpartError as reason:
        return f"here it is {names}, without a counterpart for {written(value)}{_note(row, str(reason))}"
    if settings is None:
        return f"here it is {names}, which stays at its default for {written(value)}{_note(row)}"
    if row.function == "per_prompt":
        extra = f"{written(value)} over {context.number(N):g} samples per prompt"
    else:
        extra = ""
    setting = " and ".join(f"{path}={written(entry)}" for path, entry in settings.items())
    return f"here it is {setting}{_note(row, extra)}"


def _note(row: TableRow, more: str = "") -> str:
    notes = list(dict.fromkeys(filter(None, (row.note, more))))
    if notes:
        return f" ({'; '.join(notes)})"
    return ""


def value_hint(path: str, value: Value) -> str:
    """Which systems have ``value`` for our key ``path``, and what it is here; "" if none has."""
    meanings: dict[str, list[str]] = {}
    for system in systems().values():
        for row in system.table.rows:
            if (
                path not in (target.path for target in row.free)
                or written(value) not in row.aliases
            ):
                continue
            ours = row.aliases[written(value)]
            if ours == "-":
                meaning = "has no counterpart here"
            else:
                if ours == "~":
                    meaning = f"is {path} left at its default"
                else:
                    meaning = f"is {ours} here"
            titles = meanings.setdefault(meaning, [])
            if system.title not in titles:
                titles.append(system.title)
    return ", ".join(
        f"{_and(titles)}'s {written(value)} {meaning}" for meaning, titles in meanings.items()
    )


def _and(titles: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(titles[:-1]), titles[-1])))
