"""Conversion of a value of another framework, and hints for users who write its keys or values.

Invariant: the result can be set as it is; a value without a counterpart raises
``NoCounterpartError``. All hints follow from the tables. If a key means different things in
different frameworks, the hint names all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

from skyasync.config.values import Value, value_of, written
from skyasync.interop.system import System, TableRow, Target, systems
from skyasync.other_frameworks import UNKNOWN

N = "generator.n_samples_per_prompt"
BATCH = "trainer.train_batch_size"


class NoCounterpartError(Exception):
    """This value of a known key cannot be carried over; the message may say what to do."""


@dataclass
class ConversionContext:
    """The other settings of a recipe, on which units may depend.

    Args:
        settings: our settings.
        source_keys: keys of the framework.
        defaults: the defaults of our settings.
    """

    settings: Mapping[str, Value] = field(default_factory=dict)
    source_keys: Mapping[str, Value] = field(default_factory=dict)
    defaults: Mapping[str, Value] = field(default_factory=dict)

    def number(self, path: str) -> float:
        """The number that our setting has: by our name, by a framework's name, or by default."""
        values = [self.settings.get(path)]
        for system in systems().values():
            for row in system.table.rows:
                # Only rows that copy the value: a function may change its unit.
                if row.free == [Target(path)] and not row.function:
                    values += [self.source_keys.get(name) for name in row.names]
        values.append(self.defaults.get(path))
        value = next((value for value in values if value is not None), None)
        if not is_number(value):
            raise NoCounterpartError(f"it depends on {path}")
        return value  # type: ignore[return-value]


#: A function that a table names as ``@name``: from the framework's value and the other settings
#: to one value for each free target.
Conversion = Callable[[Value, ConversionContext], list[Value]]


def converted(row: TableRow, value: Value, context: ConversionContext) -> dict[str, Value] | None:
    """The values of the row's targets by path (``key[0]`` for an entry of a list).

    None if the targets stay at their defaults.

    Raises:
        NoCounterpartError: if the value has none.
    """
    # A list or a mapping has no alias as a whole: its entries may have one.
    if isinstance(value, list | dict) and value:
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
    settings = {}
    for target, target_value in zip(row.free, values, strict=False):
        settings[str(target)] = target_value
    for target in row.targets:
        if target.fixed is not None:
            settings[target.path] = value_of(target.fixed)
    return settings


def _entry(row: TableRow, entry: Value) -> Value:
    """Our value for an entry of a list; an entry without a counterpart stays as it is."""
    if not isinstance(entry, str):
        return entry
    alias = row.aliases.get(written(entry), "-")
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
    """Reject each value, for a row whose aliases are all that can be translated."""
    raise NoCounterpartError("")


def _per_prompt(value: Value, context: ConversionContext) -> list[Value]:
    """Prompts, from a number of responses."""
    samples = context.number(N)
    if not is_number(value) or value % samples:  # type: ignore[operator]
        raise NoCounterpartError(
            f"{written(value)} responses are not a multiple of the group size {samples:g}"
        )
    return [int(value // samples)]  # type: ignore[operator]


def _list_entries(value: Value, context: ConversionContext) -> list[Value]:
    """The entries of a list, each for one target."""
    if isinstance(value, list):
        return value
    words = str(value).replace(",", " ").split()
    return [value_of(word) for word in words]


def _int(value: Value, context: ConversionContext) -> list[Value]:
    """A whole number, also if it is written as a float such as ``1e3``."""
    if isinstance(value, float | int) and value % 1 == 0:  # False for infinity and NaN
        return [int(value)]
    raise NoCounterpartError("a whole number here")


def _bound(value: Value, context: ConversionContext) -> list[Value]:
    """The upper bound of a symmetric range."""
    bounds = _list_entries(value, context)
    if len(bounds) != 2 or bounds[0] != -bounds[1]:  # type: ignore[operator]
        raise NoCounterpartError("the range is symmetric here")
    return bounds[1:]


def _min_lr(value: Value, context: ConversionContext) -> list[Value]:
    """The final learning rate as a fraction of the peak, if the schedule ends at such a rate."""
    schedules = []
    for key, schedule in context.source_keys.items():
        if key.endswith(("lr_scheduler", "lr_scheduler_type")):
            schedules.append(str(schedule))
    # transformers' names of the schedules that end at this rate.
    has_minimum = any(name == "cosine" or name.endswith("min_lr") for name in schedules)
    if schedules and not has_minimum:
        raise NoCounterpartError(f"the schedule {schedules[0]} ends at no such rate")
    return [{"min_lr_rate": value}]


def _exports(value: Value, context: ConversionContext) -> list[Value]:
    """The steps between exports, from a switch: an export is made with each checkpoint."""
    interval = context.number("trainer.ckpt_interval")
    if interval <= 0:
        raise NoCounterpartError("")
    return [int(interval)]


_SHARED: dict[str, Conversion] = {
    "-": _no_counterpart,
    "per_prompt": _per_prompt,
    "each": _list_entries,
    "list": lambda value, context: [as_list(value)],
    "not": lambda value, context: [not value],
    "int": _int,
    "bound": _bound,
    "min_lr": _min_lr,
    "exports": _exports,
}


@cache
def conversions() -> dict[str, Conversion]:
    """The functions by their names in tables: the shared ones, then those of each framework."""
    functions = dict(_SHARED)
    for system in systems().values():
        functions |= system.translation.CONVERSIONS
    return functions


# ---------------------------------------------------------------- hints


def key_hint(path: str, value: object = UNKNOWN, context: ConversionContext | None = None) -> str:
    """The hint for a key of another framework, "" if no framework has it.

    Args:
        value: the value to set, so that the hint is the full setting.
        context: the other settings, for units that depend on them.
    """
    matches = _matching_rows(path)
    titles_by_answer: dict[str, list[str]] = {}
    for system, row in matches:
        answer = _answer(row, value, context or ConversionContext())
        titles_by_answer.setdefault(answer, []).append(system.title)
    if len(titles_by_answer) != 1:
        answers = []
        for answer, titles in titles_by_answer.items():
            verb = "mean" if len(titles) > 1 else "means"
            answers.append(f"{_and(titles)} {verb}: {answer}")
        return "; ".join(answers)
    [(answer, titles)] = titles_by_answer.items()
    if not answer.startswith("here it is"):
        return f"that is {_and(titles)}'s; {answer}"
    _, row = matches[0]
    target = row.free[0].path if row.free else ""
    unchanged = target if value is UNKNOWN else f"{target}={written(value)}"
    setting, _, _ = answer.removeprefix("here it is ").partition(" (")
    # The user left out our group: the value means the same with the full path.
    if target.endswith(f".{path}") and setting == unchanged:
        return f"did you mean {target}?{_note(row)}"
    verb = "spell" if len(titles) > 1 else "spells"
    return f"that is how {_and(titles)} {verb} it; {answer}"


def _matching_rows(path: str) -> list[tuple[System, TableRow]]:
    """The row of each framework that has this key, or else keys that end in ``.path``.

    The latter count only if all of them have the same counterpart.
    """
    matches = []
    for system in systems().values():
        row = system.table.find(path)
        if row:
            matches.append((system, row))
    if matches:
        return matches
    suffix_matches: dict[str, tuple[System, TableRow]] = {}
    counterparts = set()
    for system in systems().values():
        for name, row in system.table.exact.items():
            if name.endswith(f".{path}"):
                suffix_matches[system.name] = (system, row)
                counterparts.add((row.kind, *map(str, row.targets)))
    if len(counterparts) == 1 and counterparts.pop()[0] == "key":
        return list(suffix_matches.values())
    return []


def _answer(row: TableRow, value: object, context: ConversionContext) -> str:
    """The part of a hint that says what the row's key is here."""
    if row.kind == "-":
        return f"it has no counterpart here: {row.note}"
    if row.kind == "=":
        return f"it needs no setting here: {row.note}"
    names = " and ".join(map(str, row.free))
    if value is UNKNOWN:
        aliases = []
        for source_value, our_value in row.aliases.items():
            if our_value not in "~-":
                aliases.append(f"{source_value} is {our_value}")
        return f"here it is {names}{_note(row, ', '.join(aliases))}"
    try:
        settings = converted(row, value, context)  # type: ignore[arg-type]
    except NoCounterpartError as reason:
        note = _note(row, str(reason))
        return f"here it is {names}, without a counterpart for {written(value)}{note}"
    if settings is None:
        return f"here it is {names}, which stays at its default for {written(value)}{_note(row)}"
    arithmetic = ""
    if row.function == "per_prompt":
        arithmetic = f"{written(value)} over {context.number(N):g} samples per prompt"
    assignments = [f"{path}={written(entry)}" for path, entry in settings.items()]
    return f"here it is {' and '.join(assignments)}{_note(row, arithmetic)}"


def _note(row: TableRow, addition: str = "") -> str:
    """The row's note and an addition in parentheses, once if they are equal."""
    notes = [note for note in dict.fromkeys((row.note, addition)) if note]
    if notes:
        return f" ({'; '.join(notes)})"
    return ""


def value_hint(path: str, value: Value) -> str:
    """The frameworks that have ``value`` for our setting ``path``, and its meaning; "" if none."""
    text = written(value)
    meanings: dict[str, list[str]] = {}
    for system in systems().values():
        for row in system.table.rows:
            paths = [target.path for target in row.free]
            if path not in paths or text not in row.aliases:
                continue
            our_value = row.aliases[text]
            if our_value == "-":
                meaning = "has no counterpart here"
            elif our_value == "~":
                meaning = f"is {path} left at its default"
            else:
                meaning = f"is {our_value} here"
            titles = meanings.setdefault(meaning, [])
            if system.title not in titles:
                titles.append(system.title)
    hints = []
    for meaning, titles in meanings.items():
        hints.append(f"{_and(titles)}'s {text} {meaning}")
    return ", ".join(hints)


def _and(titles: list[str]) -> str:
    """Titles as words: ``A, B and C``."""
    if len(titles) == 1:
        return titles[0]
    listed = ", ".join(titles[:-1])
    return f"{listed} and {titles[-1]}"
