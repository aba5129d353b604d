"""What to say to someone who writes another system's key or value.

Invariant: everything said follows from the tables; systems that mean different things are all named.
"""

from __future__ import annotations

from collections.abc import Iterable

from skyasync.config.values import Value, written
from skyasync.interop.conversion import ConversionContext, N, NoCounterpartError, converted
from skyasync.interop.settings import TableRow
from skyasync.interop.system import System, systems
from skyasync.other_frameworks import UNKNOWN


def key_hint(path: str, value: object = UNKNOWN, context: ConversionContext | None = None) -> str:
    """What the tables say about ``path``, "" if no system has such a key.

    Args:
        value: what it was to be, by which the hint says the whole setting.
        context: what else was set, for units that depend on it.
    """
    found = [(system, row) for system in systems().values() if (row := system.table.find(path))] or _by_ending(path)
    answers: dict[str, list[str]] = {}
    for system, row in found:
        answers.setdefault(_answer(row, value, context or ConversionContext()), []).append(system.title)
    if len(answers) != 1:
        return "; ".join(f"{_and(titles)} {_verb(titles, 'mean')}: {answer}" for answer, titles in answers.items())
    [(answer, titles)], row = answers.items(), found[0][1]
    target = row.free[0].path if row.free else ""
    as_it_is = target if value is UNKNOWN else f"{target}={written(value)}"
    if not answer.startswith("here it is"):
        return f"that is {_and(titles)}'s; {answer}"
    if target.endswith(f".{path}") and answer.removeprefix("here it is ").partition(" (")[0] == as_it_is:
        return f"did you mean {target}?{_note(row)}"
    return f"that is how {_and(titles)} {_verb(titles, 'spell')} it; {answer}"


def _by_ending(path: str) -> list[tuple[System, TableRow]]:
    """Keys without their groups, if all that end so have one counterpart."""
    found = [(system, row) for system in systems().values() for row in system.table.ending_in(path)]
    targets = {(row.kind, *map(str, row.targets)) for _, row in found}
    if len(targets) != 1 or found[0][1].kind != "key":
        return []
    return list({system.name: (system, row) for system, row in found}.values())


def _answer(row: TableRow, value: object, context: ConversionContext) -> str:
    if row.kind == "-":
        return f"it has no counterpart here: {row.note}"
    if row.kind == "=":
        return f"it needs no setting here: {row.note}"
    names = " and ".join(map(str, row.free))
    if value is UNKNOWN:
        aliases = ", ".join(f"{theirs} is {ours}" for theirs, ours in row.aliases.items() if ours not in "~-")
        return f"here it is {names}{_note(row, aliases)}"
    try:
        settings = converted(row, value, context)  # type: ignore[arg-type]
    except NoCounterpartError as reason:
        return f"here it is {names}, without a counterpart for {written(value)}{_note(row, str(reason))}"
    if settings is None:
        return f"here it is {names}, which stays at its default for {written(value)}{_note(row)}"
    extra = f"{written(value)} over {context.number(N):g} samples per prompt" if row.function == "per_prompt" else ""
    said = " and ".join(f"{path}={written(entry)}" for path, entry in settings.items())
    return f"here it is {said}{_note(row, extra)}"


def _note(row: TableRow, more: str = "") -> str:
    notes = list(dict.fromkeys(filter(None, (row.note, more))))
    return f" ({'; '.join(notes)})" if notes else ""


def value_hint(path: str, value: Value) -> str:
    """Which systems have ``value`` for our key ``path``, and what it is here; "" if no system says so."""
    said: dict[str, list[str]] = {}
    for system in systems().values():
        for row in system.table.rows:
            if path in (target.path for target in row.free) and written(value) in row.aliases:
                said.setdefault(_meaning(path, row.aliases[written(value)]), []).append(system.title)
    unique = {meaning: list(dict.fromkeys(titles)) for meaning, titles in said.items()}
    return ", ".join(f"{_and(titles)}'s {written(value)} {meaning}" for meaning, titles in unique.items())


def _meaning(path: str, ours: str) -> str:
    if ours == "-":
        return "has no counterpart here"
    return f"is {path} left at its default" if ours == "~" else f"is {ours} here"


def _and(titles: Iterable[str]) -> str:
    *first, last = titles
    return f"{', '.join(first)} and {last}" if first else last


def _verb(titles: list[str], verb: str) -> str:
    return verb if len(titles) > 1 else f"{verb}s"
