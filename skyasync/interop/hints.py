"""Messages for a user who writes another system's key or value.

Invariant: every message follows from the tables; systems that mean different things are all named.
"""

from __future__ import annotations

from skyasync.config.values import Value, written
from skyasync.interop.conversion import ConversionContext, N, NoCounterpartError, converted
from skyasync.interop.settings import TableRow
from skyasync.interop.system import systems
from skyasync.other_frameworks import UNKNOWN


def key_hint(path: str, value: object = UNKNOWN, context: ConversionContext | None = None) -> str:
    """What the tables say about ``path``, "" if no system has such a key.

    Args:
        value: the value to set, so that the hint says the whole setting.
        context: what else was set, for units that depend on it.
    """
    every = systems().values()
    matches = [(system, row) for system in every if (row := system.table.find(path))]
    if not matches:  # a key without its groups counts if all keys that end so have one counterpart
        ending = [(s, row) for s in every for name, row in s.table.exact.items() if name.endswith(f".{path}")]
        if len({(row.kind, *map(str, row.targets)) for _, row in ending}) == 1 and ending[0][1].kind == "key":
            matches = list({system.name: (system, row) for system, row in ending}.values())
    answers: dict[str, list[str]] = {}
    for system, row in matches:
        answers.setdefault(_answer(row, value, context or ConversionContext()), []).append(system.title)
    if len(answers) != 1:
        lines = [f"{_and(titles)} {'mean' if titles[1:] else 'means'}: {answer}" for answer, titles in answers.items()]
        return "; ".join(lines)
    [(answer, titles)], row = answers.items(), matches[0][1]
    if not answer.startswith("here it is"):
        return f"that is {_and(titles)}'s; {answer}"
    target = row.free[0].path if row.free else ""
    unchanged = target if value is UNKNOWN else f"{target}={written(value)}"
    if target.endswith(f".{path}") and answer.removeprefix("here it is ").partition(" (")[0] == unchanged:
        return f"did you mean {target}?{_note(row)}"
    return f"that is how {_and(titles)} {'spell' if titles[1:] else 'spells'} it; {answer}"


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
    setting = " and ".join(f"{path}={written(entry)}" for path, entry in settings.items())
    return f"here it is {setting}{_note(row, extra)}"


def _note(row: TableRow, more: str = "") -> str:
    notes = list(dict.fromkeys(filter(None, (row.note, more))))
    return f" ({'; '.join(notes)})" if notes else ""


def value_hint(path: str, value: Value) -> str:
    """Which systems have ``value`` for our key ``path``, and what it is here; "" if none has."""
    meanings: dict[str, list[str]] = {}
    for system in systems().values():
        for row in system.table.rows:
            if path not in (target.path for target in row.free) or written(value) not in row.aliases:
                continue
            ours = row.aliases[written(value)]
            if ours == "-":
                meaning = "has no counterpart here"
            else:
                meaning = f"is {path} left at its default" if ours == "~" else f"is {ours} here"
            titles = meanings.setdefault(meaning, [])
            if system.title not in titles:
                titles.append(system.title)
    return ", ".join(f"{_and(titles)}'s {written(value)} {meaning}" for meaning, titles in meanings.items())


def _and(titles: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(titles[:-1]), titles[-1])))
