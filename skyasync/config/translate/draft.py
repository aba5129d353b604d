"""A translation in the making: what each of their keys became.

Invariant: every key that was given is in ``left``, ``silent``, ``unknown`` or ``carried``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from skyasync.config.keys import Keys
from skyasync.config.peers import Around, NoCounterpartError, Row, Table, converted
from skyasync.config.peers.table import Target
from skyasync.config.schema import Config
from skyasync.config.translate.recipe import Recipe
from skyasync.config.values import Value, value_of, written


@dataclass
class Setting:
    """A value for a key of ours, whose keys it came from, and whether they were given or are defaults there."""

    value: Value
    theirs: tuple[str, ...] = ()
    given: bool = True


@dataclass
class Draft:
    """What became of every key so far.

    ``left``: key -> why it has no counterpart; ``silent``: key -> why it needs no setting; ``unknown``: in no table;
    ``carried``: key -> the first of ours that it set, whatever decided in the end.
    """

    table: Table
    recipe: Recipe
    keys: Keys = field(default_factory=lambda: Keys.of(Config))
    ours: dict[str, Setting] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    carried: dict[str, str] = field(default_factory=dict)

    @property
    def given(self) -> dict[str, Value]:
        return self.recipe.keys

    def value(self, path: str) -> Value:
        """What our key is, or will be."""
        return self.ours[path].value if path in self.ours else self.keys[path].default

    def number(self, path: str) -> float:
        """``value`` of a key that is a number; its default where a shell fills the value in."""
        value = self.value(path)
        value = value if isinstance(value, int | float) else self.keys[path].default
        assert isinstance(value, int | float), path
        return value

    def said(self, *names: str) -> Value:
        """What they say: the first of the names that is given, else the default there."""
        for name in names:
            if name in self.given:
                return self.given[name]
        row = next((row for name in names if (row := self.table.exact.get(name))), None)
        return value_of(row.default) if row and row.default else None

    def put(self, path: str, value: Value, *theirs: str) -> None:
        """Set our key; it counts as given if any of theirs is."""
        self.ours[path] = Setting(value, theirs, any(name in self.given for name in theirs))

    def drop(self, path: str, why: str = "") -> None:
        """Leave our key at its default; their keys that were given go to ``left`` with ``why``."""
        setting = self.ours.pop(path, None)
        for name in setting.theirs if setting else ():
            if name in self.given and not any(name in other.theirs for other in self.ours.values()):
                self.left[name] = why or "it has no effect here beside the other settings"

    def around(self) -> Around:
        """What conversions may depend on."""
        ours = {path: setting.value for path, setting in self.ours.items()}
        return Around(ours, self.given, {key.path: key.default for key in self.keys})


def begin(table: Table, recipe: Recipe) -> Draft:
    """Every key by its row, and the defaults that differ from ours. Units that depend on other keys come last."""
    draft = Draft(table, recipe)
    given = list(_rows(draft))
    set_rows = {id(row) for _, row in given}
    order = {id(row): at for at, row in enumerate(table.rows)}
    rows = sorted(given, key=lambda entry: order.get(id(entry[1]), len(order)))  # keys that are ours come last
    for later in (False, True):
        for name, row in rows:
            if bool(row.function) == later:
                _carry(draft, name, row, draft.given[name], given=True)
        for row in table.rows:
            if row.default and row.kind == "key" and bool(row.function) == later and id(row) not in set_rows:
                _carry(draft, row.names[0], row, value_of(row.default), given=False)
    return draft


def _rows(draft: Draft) -> Iterator[tuple[str, Row]]:
    for name in draft.given:
        row = draft.table.find(name)
        if row:
            yield name, row
        elif name in draft.keys and draft.table.name == "skyrl":
            yield name, Row((name,), (name,), "", "key", (Target(name),))
        else:
            draft.unknown.append(name)


def _carry(draft: Draft, name: str, row: Row, value: Value, *, given: bool) -> None:
    """One key of theirs into the draft."""
    if row.kind == "=":
        draft.silent[name] = row.note
        return
    try:
        settings = converted(row, value, draft.around())
    except NoCounterpartError as reason:
        if given:
            draft.left[name] = str(reason) or row.note or f"there is no {written(value)} here"
        return
    if settings is None:
        if given:
            draft.silent[name] = row.note or "our default"
        return
    for path, entry in settings.items():
        if given and _unfilled(draft, path, entry):
            draft.left[name] = "a shell fills it in: write it by hand"
        else:
            _set(draft, path, entry, name, given)


def _unfilled(draft: Draft, path: str, value: Value) -> bool:
    """Whether what should be a number, a switch or one of our names is a variable of a shell."""
    key = draft.keys.holder(path)
    if key is None or "$" not in str(value):
        return False
    return bool(key.options()) or key.type in (int, float, bool)


def _set(draft: Draft, path: str, value: Value, name: str, given: bool) -> None:
    target = Target.read(path)
    before = draft.ours.get(target.path)
    draft.carried.setdefault(name, target.path)
    if not given and before and (before.given or target.index is None):
        return
    if target.index is None:
        draft.ours[path] = Setting(value, (name,), given)
        return
    held = draft.value(target.path)
    assert isinstance(held, list)
    entries = list(held)
    entries[target.index] = value
    theirs = (*(before.theirs if before else ()), name)
    draft.ours[target.path] = Setting(entries, theirs, given or bool(before and before.given))
