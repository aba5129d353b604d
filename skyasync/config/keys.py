"""A setting with its documentation and its limits, and the list of all settings of a schema.

Invariant: help, loading, hints and the written documentation all read this one list, so that what
is documented is what is accepted.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from itertools import pairwise
from math import isinf
from operator import attrgetter
from typing import Any, TypeVar

from skyasync.config.values import type_name, written
from skyasync.errors import UserError, unknown
from skyasync.registry import resolve_reference

T = TypeVar("T")

MISSING = "???"  # what OmegaConf writes where a value must be given


class When:
    """The condition under which a key is read.

    Args:
        alternatives: as they are written, one of which must hold: ``a.b`` (it is set), ``a.b=c|d``,
            ``not a.b``.
        test: decides instead of the alternatives, which then only name the keys that it reads.
        choices: what help shows instead of the alternatives, if it depends on what is registered.
    """

    def __init__(
        self,
        *alternatives: str,
        test: Callable[[Any], bool] | None = None,
        choices: Callable[[], str] | None = None,
    ) -> None:
        self.alternatives = alternatives
        self.test = test
        self.choices = choices
        #: The keys that decide.
        self.paths = list(
            dict.fromkeys(text.removeprefix("not ").partition("=")[0] for text in alternatives)
        )

    def __call__(self, cfg: object) -> bool:
        if self.test:
            return self.test(cfg)
        for text in self.alternatives:
            path, _, values = text.removeprefix("not ").partition("=")
            value = attrgetter(path)(cfg)
            if (
                written(value) in values.split("|") if values else bool(value)
            ) is not text.startswith("not "):
                return True
        return False

    def __str__(self) -> str:
        if self.choices:
            return self.choices()
        return " or ".join(self.alternatives)


@dataclass(frozen=True)
class Key:
    """One setting: what its field says (see ``key``), and where it stands.

    Args:
        default: OmegaConf's ``MISSING`` if the user must give a value.
        own_doc: its sentence; by default the docstring under the field of its ``owner``, the
            dataclass.
    """

    path: str = ""
    type: Any = None
    default: Any = MISSING
    own_doc: str = ""
    owner: type | None = None
    choices: tuple[Any, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None
    also: tuple[float, ...] = ()
    registry: str = ""
    open_ended: bool = False
    pattern: str = ""
    when: When | None = None
    infinite: bool = False

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def group(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def doc(self) -> str:
        """Its meaning in sentences, for help and documentation."""
        if self.owner and not self.own_doc:
            owners = self.owner.__mro__
        else:
            owners = ()
        docs = (
            _field_docs(owner.__module__).get((owner.__name__, self.name), "") for owner in owners
        )
        return next(filter(None, docs), self.own_doc)

    @property
    def is_mapping(self) -> bool:
        """Whether it is a free mapping: ``<path>.<anything>=value`` sets one of its entries."""
        if type(None) in typing.get_args(self.type):
            arms = typing.get_args(self.type)
        else:
            arms = (self.type,)
        return any((typing.get_origin(arm) or arm) is dict for arm in arms)

    def names(self) -> list[str]:
        """Names registered for a registry-backed key; empty for any other. Imports the registry
        alone."""
        if self.registry:
            return resolve_reference(self.registry, kind="registry").names()
        return []

    def options(self) -> list[Any]:
        """The values that it may have, where they can be counted; with ``registry``, the names that
        are registered."""
        return [*self.choices, *self.names()]

    def bounds(self) -> str:
        """The allowed interval in words, "" if there is none."""

        def shown(limit: float) -> str:
            if isinstance(limit, int):
                return str(limit)
            return f"{limit:g}"

        limits = {
            "at least": self.low,
            "greater than": self.above,
            "at most": self.high,
            "less than": self.below,
        }
        text = " and ".join(
            f"{words} {shown(limit)}" for words, limit in limits.items() if limit is not None
        )
        if self.also:
            return " or ".join([*map(shown, self.also), text])
        return text

    def allows(self, number: float) -> bool:
        """Whether a number lies within the bounds; NaN never does."""
        return number in self.also or (
            number == number
            and (self.low is None or number >= self.low)
            and (self.above is None or number > self.above)
            and (self.high is None or number <= self.high)
            and (self.below is None or number < self.below)
        )

    def problem(self, value: object) -> str:
        """The problem of a value of the right type (for a list: of an element); "" if there is
        none."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not self.allows(value):
                return f"must be {self.bounds() or 'a number'}"
            if isinf(value) and not self.infinite:
                return "must be finite"
        text = written(value)
        if not (self.choices or self.registry) or (
            self.open_ended and isinstance(value, str) and ":" in value
        ):
            return ""
        if self.pattern and isinstance(value, str) and re.fullmatch(self.pattern, value):
            return ""
        try:
            options = self.options()
        except UserError as error:
            return str(error)
        if value in options:
            return ""
        names = [written(option) for option in options]
        why = dict(self.refused).get(text)
        if why:
            problem = f"{why} (allowed: {', '.join(names)})"
        else:
            problem = unknown(self.name, text, names)
        if self.registry and self.open_ended:
            problem += "; one of your own is file.py:name or module:name"
        elif self.registry and ":" in text:
            registry = self.registry.rpartition(":")[2]
            problem += (
                f"; one of your own gets its name in the program that you run: @{registry}.register"
            )
        return problem


@functools.cache
def _field_docs(module: str) -> dict[tuple[str, str], str]:
    """The docstrings under the fields of a module's classes, by class and field; none if its source
    is not known."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return {}
    docs = {}
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for item, text in pairwise(owner.body):
            match item, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str(doc))
                ):
                    docs[owner.name, name] = " ".join(doc.split())
    return docs


def key(default: T, doc: str = "", **limits: Any) -> T:  # noqa: ANN401  (the fields of Key)
    """A field of a settings dataclass, which ``doc`` or a docstring under the field documents.

    The limits are:

    - ``choices``: the allowed values. Of a list, choices, registry and bounds hold for each
      element.
    - ``refused``: values of other libraries that are not supported, each with the reason.
    - ``low``, ``high``: inclusive bounds; ``above``, ``below``: exclusive ones; ``also``: allowed
      numbers outside them.
    - ``infinite``: the number need not be finite.
    - ``registry``: "module:NAME", where the allowed names are registered.
    - ``open_ended``: a ``module:attribute`` reference (or, for paths, any string) is accepted as
      well.
    - ``pattern``: a value that matches it as a whole is accepted in addition to ``choices``.
    - ``when``: a ``When``, or the text of its one alternative: the condition under which the key is
      read. Setting a key that is not read is an error.
    """
    if isinstance(limits.get("when"), str):
        limits["when"] = When(limits["when"])
    metadata = {"key": Key(default=default, own_doc=doc, **limits)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


_READ: dict[type, Keys] = {}  # not functools.cache, for whose types a dataclass is not hashable


@dataclass(frozen=True)
class Keys:
    """All keys of a schema, by dotted path and in the schema's order, and the groups that hold
    them."""

    by_path: dict[str, Key] = field(default_factory=dict)
    groups: dict[str, type] = field(default_factory=dict)

    @classmethod
    def of(cls, schema: type) -> Keys:
        """Read a dataclass, its subclasses and nested dataclasses included.

        Raises:
            UserError: if a group's annotations cannot be resolved (a class defined inside a
                function).
        """
        if schema not in _READ:
            keys = cls()
            keys._add(schema, None, "", None)
            _READ[schema] = keys
        return _READ[schema]

    def _add(self, group: type, instance: object, prefix: str, when: When | None) -> None:
        """``when``: the condition of the group that this one is in, which holds for all in it that
        name none."""
        try:
            hints = typing.get_type_hints(group)
        except NameError as error:
            raise UserError(
                f"configuration group {group.__qualname__}: {error}; define it at the top of a module"
            ) from error
        for item in dataclasses.fields(group):
            path = prefix + item.name
            if item.default is dataclasses.MISSING:
                value = MISSING
            else:
                value = item.default
            if instance is not None:
                value = vars(instance)[item.name]
            elif item.default_factory is not dataclasses.MISSING:
                value = item.default_factory()
            if dataclasses.is_dataclass(value):
                nested = type(value)
            else:
                nested = hints[item.name]
            if isinstance(nested, type) and dataclasses.is_dataclass(nested):
                self.groups[path] = nested
                inner = None if value == MISSING else value
                self._add(nested, inner, f"{path}.", item.metadata.get("when", when))
            else:
                key = item.metadata.get("key") or Key()
                self.by_path[path] = dataclasses.replace(
                    key,
                    path=path,
                    type=hints[item.name],
                    default=value,
                    owner=group,
                    when=key.when or when,
                )

    def __iter__(self) -> Iterator[Key]:
        return iter(self.by_path.values())

    def __contains__(self, path: str) -> bool:
        return path in self.by_path

    def __getitem__(self, path: str) -> Key:
        return self.by_path[path]

    def holder(self, path: str) -> Key | None:
        """The key that ``path`` sets: itself, or the free mapping that ``path`` is an entry of."""
        segments = path.split(".")
        if path not in self.by_path and (not all(segments) or "[" in path):
            return None
        prefixes = (".".join(segments[:length]) for length in range(len(segments), 0, -1))
        key = next((self.by_path[prefix] for prefix in prefixes if prefix in self.by_path), None)
        if key and (key.path == path or key.is_mapping):
            return key
        return None


def entry_problem(kind: type, name: str, value: object) -> str:
    """The problem of a mapping's entry that is read as a field of ``kind``, to follow its path; ""
    if there is none."""
    keys = Keys.of(kind)
    if name not in keys:
        return f": {unknown('entry', name, keys.by_path)}"
    entry = keys[name]
    expected = typing.get_origin(entry.type) or entry.type
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (
        number
        if expected is float
        else isinstance(value, expected) and (number or expected is not int)
    ):
        return f": expected {type_name(entry.type)}, found {value!r}"
    problem = entry.problem(value)
    if problem:
        return f"={written(value)}: {problem}"
    return ""
