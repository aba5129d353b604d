"""Another framework: its name, its table of settings, and what adapts its recipes and classes.

Each folder here is one, and declares ``SYSTEM``. It has a table of its settings, and
``translate.py``: ``CONVERSIONS`` are functions for the table, and ``finish(draft)`` decides about
keys that depend on each other, after each was carried over alone.

A table, ``settings.tsv``, is taken from the framework's own definitions of its arguments (2026). It
has five columns, separated by tabs:

``theirs``   names of one key, separated by spaces; ``{a,b}`` stands for both, ``*`` for anything
``default``  its value there where nothing is set; empty where that has no bearing on ours
``ours``     our keys; ``key=value`` is set along with the first; ``key[0]`` is an entry of a list;
             ``-``: no counterpart, ``=``: needs no setting here
``values``   ``theirs=ours`` where values are spelled differently: ``~`` leaves ours at its default, ``-`` is a value
             without a counterpart, ``*=`` is any other; ``@name`` is a function of
             ``conversion.py``
``note``     why there is no counterpart, or what differs

Invariant: the name that says most about a key decides: itself, then the longest pattern.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cache, cached_property
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

_FOLDER = Path(__file__).parent
SETTINGS = "settings.tsv"
_BRACES = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class Target:
    """A key of ours; ``index`` is the entry of a list, ``fixed`` the value where it does not depend
    on theirs."""

    path: str
    index: int | None = None
    fixed: str | None = None

    @classmethod
    def read(cls, text: str) -> Target:
        path, equals, fixed = text.partition("=")
        match = re.fullmatch(r"(.+)\[(\d)\]", path)
        if match:
            return cls(match[1], int(match[2]))
        return cls(path, None, fixed if equals else None)

    def __str__(self) -> str:
        if self.index is None:
            return self.path
        return f"{self.path}[{self.index}]"


@dataclass(frozen=True)
class TableRow:
    """One line of a table; ``kind`` is "key", "-" (no counterpart) or "=" (needs no setting).

    ``spelled`` are the names as the table has them, braces and all.
    """

    names: tuple[str, ...]
    spelled: tuple[str, ...]
    default: str
    kind: str
    targets: tuple[Target, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict, hash=False)
    function: str = ""
    note: str = ""

    @classmethod
    def read(cls, line: str) -> TableRow:
        theirs, default, ours, values, note = line.split("\t")
        spelled = tuple(theirs.split())
        names = tuple(name for pattern in spelled for name in expand(pattern))
        words = values.split()
        aliases = dict(word.split("=", 1) for word in words if not word.startswith("@"))
        function = next((word[1:] for word in words if word.startswith("@")), "")
        kind = ours if ours in ("-", "=") else "key"
        if kind == "key":
            targets = tuple(Target.read(word) for word in ours.split())
        else:
            targets = ()
        return cls(names, spelled, default, kind, targets, aliases, function, note)

    @property
    def free(self) -> list[Target]:
        """The targets that take their value from theirs."""
        return [target for target in self.targets if target.fixed is None]


@dataclass(frozen=True)
class Table:
    """One system's rows, by name and by pattern, the longest pattern first."""

    rows: tuple[TableRow, ...]
    exact: dict[str, TableRow] = field(repr=False)
    patterns: tuple[tuple[re.Pattern[str], TableRow], ...] = field(repr=False)

    @classmethod
    def read(cls, file: Path) -> Table:
        lines = file.read_text(encoding="utf-8").splitlines()
        rows = tuple(TableRow.read(line) for line in lines[1:] if line.strip())
        named = [(name, row) for row in rows for name in row.names]
        patterns = sorted(
            (n for n in named if "*" in n[0]), key=lambda entry: -len(entry[0].replace("*", ""))
        )
        exact = {name: row for name, row in named if "*" not in name}
        return cls(rows, exact, tuple((re.compile(translate(name)), row) for name, row in patterns))

    def find(self, path: str) -> TableRow | None:
        """The row that answers for ``path``."""
        matching = (row for pattern, row in self.patterns if pattern.fullmatch(path))
        return self.exact.get(path) or next(matching, None)

    @property
    def variables(self) -> dict[str, TableRow]:
        """The rows of environment variables, which the system reads as it does its keys."""
        return {name: row for name, row in self.exact.items() if name.isupper()}


def expand(pattern: str) -> list[str]:
    """``a.{b,c}`` as ``a.b`` and ``a.c``."""
    match = _BRACES.search(pattern)
    if not match:
        return [pattern]
    before = pattern[: match.start()]
    after = pattern[match.end() :]
    return [name for option in match[1].split(",") for name in expand(f"{before}{option}{after}")]


@dataclass(frozen=True)
class System:
    """A framework whose recipes, files and classes are understood.

    Args:
        name: of its folder, and of ``--from``.
        order: its place in help and documentation.
        adapters: what it brings, as ``module:attribute`` of its folder (imported when it is
            needed):

            - ``environment``: a module that registers an environment
            - ``reward_signature``: a ``skyasync.rewards.signature.Signature``
            - ``remote_reward``, ``user_modules``, ``agent_file``, ``agent_class``: what
              ``OtherFrameworks`` asks for
            - ``program``: reads a recipe that is a Python program
        command: the word of a command line after which the recipe's name and flags follow.
        agent_program: the reference of the program that plays its agent files that have a loop of
            their own.
        has_our_keys: it spells most keys as we do; those that its table lacks are ours.
    """

    name: str
    title: str
    order: int
    adapters: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    agent_program: str = ""
    has_our_keys: bool = False

    def adapter(self, name: str) -> Any:  # noqa: ANN401  (one of many kinds)
        module, colon, attribute = self.adapters[name].partition(":")
        path = f"{__package__}.{self.name}.{module}"
        if colon:
            return attrgetter(attribute)(import_module(path))
        return path

    @cached_property
    def translation(self) -> ModuleType:
        """Its ``translate.py``: ``CONVERSIONS`` of its table, and ``finish(draft)``."""
        return import_module(f"{__package__}.{self.name}.translate")

    @cached_property
    def table(self) -> Table:
        return Table.read(_FOLDER / self.name / SETTINGS)


@cache
def systems() -> dict[str, System]:
    """All of them by name, in their order: the folders that have a table of settings."""
    packages = [module.name for module in pkgutil.iter_modules([str(_FOLDER)]) if module.ispkg]
    folders = [name for name in packages if (_FOLDER / name / SETTINGS).is_file()]
    declared = [import_module(f"{__package__}.{folder}").SYSTEM for folder in folders]
    return {system.name: system for system in sorted(declared, key=lambda system: system.order)}
