"""Another framework: its name, its table of settings, and the adapters of its recipes and classes.

Each folder here is a framework, and declares ``SYSTEM``. Its ``translate.py`` has two entry points.
``CONVERSIONS`` are functions for its table of settings. ``finish(draft)`` decides about keys that
depend on each other, after each key was translated alone.

A table, ``settings.tsv``, is taken from the framework's own definitions of its arguments (2026). It
has five columns, separated by tabs:

``theirs``   names of one source key, separated by spaces; ``{a,b}`` stands for both, ``*`` for any
             text
``default``  its default value there; empty if it has no effect on our settings
``ours``     our settings; ``key=value`` is set along with the first; ``key[0]`` is an entry of a
             list; ``-``: no counterpart, ``=``: needs no setting here
``values``   ``theirs=ours`` for values with another spelling here. As ours, ``~`` leaves our setting
             at its default, and ``-`` has no counterpart. ``*=`` is any other value. ``@name`` is a
             function of ``conversion.py`` or of the framework's ``CONVERSIONS``.
``note``     why there is no counterpart, or what differs

Invariant: of several rows for a key, the exact name decides, then the longest pattern.
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
    """A setting of ours that a row sets.

    Args:
        index: the entry of a list, if the row sets one entry.
        fixed: the value, if it does not depend on the framework's.
    """

    path: str
    index: int | None = None
    fixed: str | None = None

    @classmethod
    def read(cls, text: str) -> Target:
        """A target as a table spells it: ``key``, ``key[0]`` or ``key=value``."""
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
        """A row from a line with the five columns."""
        patterns, default, ours, values, note = line.split("\t")
        spelled = tuple(patterns.split())
        names: list[str] = []
        for pattern in spelled:
            names += expand(pattern)
        aliases = {}
        function = ""
        for word in values.split():
            if word.startswith("@"):
                function = word[1:]
            else:
                source_value, _, our_value = word.partition("=")
                aliases[source_value] = our_value
        kind = ours if ours in ("-", "=") else "key"
        targets = [Target.read(word) for word in ours.split()] if kind == "key" else []
        return cls(tuple(names), spelled, default, kind, tuple(targets), aliases, function, note)

    @property
    def free(self) -> list[Target]:
        """The targets whose value is the framework's."""
        return [target for target in self.targets if target.fixed is None]


@dataclass(frozen=True)
class Table:
    """One system's rows, by name and by pattern, the longest pattern first."""

    rows: tuple[TableRow, ...]
    exact: dict[str, TableRow] = field(repr=False)
    patterns: tuple[tuple[re.Pattern[str], TableRow], ...] = field(repr=False)

    @classmethod
    def read(cls, file: Path) -> Table:
        """The table of a file; its first line has the names of the columns."""
        rows = []
        exact = {}
        patterns = {}
        for line in file.read_text(encoding="utf-8").splitlines()[1:]:
            if not line.strip():
                continue
            row = TableRow.read(line)
            rows.append(row)
            for name in row.names:
                if "*" in name:
                    patterns[name] = row
                else:
                    exact[name] = row
        # The longest pattern first: find() takes the first match.
        ordered = sorted(patterns, key=_letters, reverse=True)
        compiled = []
        for name in ordered:
            pattern = re.compile(translate(name))
            compiled.append((pattern, patterns[name]))
        return cls(tuple(rows), exact, tuple(compiled))

    def find(self, path: str) -> TableRow | None:
        """The row that answers for ``path``."""
        if path in self.exact:
            return self.exact[path]  # more exact than each pattern
        for pattern, row in self.patterns:
            if pattern.fullmatch(path):
                return row
        return None

    @property
    def variables(self) -> dict[str, TableRow]:
        """The rows of environment variables, which the framework reads as it does its keys."""
        return {name: row for name, row in self.exact.items() if name.isupper()}


def _letters(pattern: str) -> int:
    """The number of letters that a pattern requires."""
    return len(pattern.replace("*", ""))


def expand(pattern: str) -> list[str]:
    """``a.{b,c}`` as ``a.b`` and ``a.c``."""
    match = _BRACES.search(pattern)
    if not match:
        return [pattern]
    prefix = pattern[: match.start()]
    suffix = pattern[match.end() :]
    names = []
    for option in match[1].split(","):
        names += expand(f"{prefix}{option}{suffix}")
    return names


@dataclass(frozen=True)
class System:
    """A framework whose recipes, files and classes are understood.

    Args:
        name: the name of its folder, and the value of ``--from``.
        order: its position in help and documentation.
        adapters: its adapters, as ``module:attribute`` of its folder (imported on first use):

            - ``environment``: a module that registers an environment
            - ``reward_signature``: a ``skyasync.rewards.signature.Signature``
            - ``remote_reward``, ``user_modules``, ``agent_file``, ``agent_class``: functions for
              the methods of ``OtherFrameworks``
            - ``program``: reads a recipe that is a Python program
        command: the word of a command line that precedes the recipe's name and flags.
        agent_program: the reference of the program that plays agent files with a loop of their
            own.
        has_our_keys: it spells most keys as we do; keys that its table lacks are ours.
    """

    name: str
    title: str
    order: int
    adapters: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    agent_program: str = ""
    has_our_keys: bool = False

    def adapter(self, name: str) -> Any:  # noqa: ANN401  (one of many kinds)
        # A name without an attribute is the module's: its receiver imports it.
        module, colon, attribute = self.adapters[name].partition(":")
        path = f"{__package__}.{self.name}.{module}"
        if colon:
            return attrgetter(attribute)(import_module(path))
        return path

    @cached_property
    def translation(self) -> ModuleType:
        """The module ``translate.py``: ``CONVERSIONS`` of the table, and ``finish(draft)``."""
        # Imported on first use: hints need the table alone.
        return import_module(f"{__package__}.{self.name}.translate")

    @cached_property
    def table(self) -> Table:
        return Table.read(_FOLDER / self.name / SETTINGS)


@cache
def systems() -> dict[str, System]:
    """All frameworks by name, in their order: the folders that have a table of settings."""
    declared = []
    for module in pkgutil.iter_modules([str(_FOLDER)]):
        if module.ispkg and (_FOLDER / module.name / SETTINGS).is_file():
            declared.append(import_module(f"{__package__}.{module.name}").SYSTEM)
    declared.sort(key=lambda system: system.order)
    return {system.name: system for system in declared}
