"""What to say to someone who writes another system's key or value.

Invariant: everything said follows from the tables; systems that mean different things are all named.
"""

from __future__ import annotations

from collections.abc import Iterable

from skyasync.config.peers.convert import Around, N, NoCounterpartError, converted
from skyasync.config.peers.table import Row, Table, tables
from skyasync.config.values import Value, written

#: Stands for a value that is not known: ``--flag`` alone, or a key without ``=``.
UNSAID = object()


def key_hint(path: str, value: object = UNSAID, around: Around | None = None) -> str:
    """What the tables say about ``path``, "" if no system has such a key.

    Args:
        value: what it was to be, by which the hint says the whole setting.
        around: what else was set, for units that depend on it.
    """
    found = [(table, row) for table in tables().values() if (row := table.find(path))] or _by_ending(path)
    answers: dict[str, list[str]] = {}
    for table, row in found:
        answers.setdefault(_answer(row, value, around or Around()), []).append(table.title)
    if len(answers) == 1:
        [(answer, titles)] = answers.items()
        target = found[0][1].free[0].path if found[0][1].free else ""
        as_it_is = target if value is UNSAID else f"{target}={written(value)}"
        if target.endswith(f".{path}") and answer.removeprefix("here it is ").partition(" (")[0] == as_it_is:
            return f"did you mean {target}?{_note(found[0][1])}"
        return _sentence(titles, answer)
    return "; ".join(f"{_and(titles)} {_verb(titles, 'mean')}: {answer}" for answer, titles in answers.items())


def _sentence(titles: list[str], answer: str) -> str:
    if answer.startswith("here it is"):
        return f"that is how {_and(titles)} {_verb(titles, 'spell')} it; {answer}"
    return f"that is {_and(titles)}'s; {answer}"


def _by_ending(path: str) -> list[tuple[Table, Row]]:
    """Keys without their groups, if all that end so have one counterpart."""
    found = [(table, row) for table in tables().values() for row in table.ending_in(path)]
    targets = {(row.kind, *map(str, row.targets)) for _, row in found}
    if len(targets) != 1 or found[0][1].kind != "key":
        return []
    return list({table.name: (table, row) for table, row in found}.values())


def _answer(row: Row, value: object, around: Around) -> str:
    if row.kind == "-":
        return f"it has no counterpart here: {row.note}"
    if row.kind == "=":
        return f"it needs no setting here: {row.note}"
    names = " and ".join(map(str, row.free))
    if value is UNSAID:
        aliases = ", ".join(f"{theirs} is {ours}" for theirs, ours in row.aliases.items() if ours not in "~-")
        return f"here it is {names}{_note(row, aliases)}"
    try:
        settings = converted(row, value, around)  # type: ignore[arg-type]
    except NoCounterpartError as reason:
        return f"here it is {names}, without a counterpart for {written(value)}{_note(row, str(reason))}"
    if settings is None:
        return f"here it is {names}, which stays at its default for {written(value)}{_note(row)}"
    extra = f"{written(value)} over {around.number(N):g} samples per prompt" if row.function == "per_prompt" else ""
    said = " and ".join(f"{path}={written(entry)}" for path, entry in settings.items())
    return f"here it is {said}{_note(row, extra)}"


def _note(row: Row, more: str = "") -> str:
    notes = list(dict.fromkeys(filter(None, (row.note, more))))
    return f" ({'; '.join(notes)})" if notes else ""


def value_hint(path: str, value: Value) -> str:
    """Whose word ``value`` is for a value of our key ``path``, and what it is here; "" if no system says so."""
    said: dict[str, list[str]] = {}
    for table in tables().values():
        for row in table.rows:
            if path in (target.path for target in row.free) and written(value) in row.aliases:
                said.setdefault(_meaning(path, row, row.aliases[written(value)]), []).append(table.title)
    unique = {meaning: list(dict.fromkeys(titles)) for meaning, titles in said.items()}
    return ", ".join(f"{_and(titles)}'s {written(value)} {meaning}" for meaning, titles in unique.items())


def _meaning(path: str, row: Row, ours: str) -> str:
    if ours == "-":
        return "has no counterpart here"
    return f"is {path} left at its default" if ours == "~" else f"is {ours} here"


def _and(titles: Iterable[str]) -> str:
    *first, last = titles
    return f"{', '.join(first)} and {last}" if first else last


def _verb(titles: list[str], verb: str) -> str:
    return verb if len(titles) > 1 else f"{verb}s"
