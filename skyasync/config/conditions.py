"""When a key is read: ``a.b or c.d`` (one of them is set), ``a.type=mean|variance``, ``not a.b``, ``a.b takes c`` (the
part that is chosen by name has the input ``c``).

Invariant: a condition names keys that exist (a test holds it), and stands beside the field that it is about.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from skyasync.config.keys import Keys
from skyasync.config.schema import Config
from skyasync.config.values import written
from skyasync.registry import Registry, resolve_reference


class _Alternative(NamedTuple):
    """``values`` that the key at ``path`` may have (none: any that is true), ``negated``: it must not; or the input
    that the part which it chooses ``takes``."""

    path: str
    values: frozenset[str] = frozenset()
    negated: bool = False
    takes: str = ""

    @classmethod
    def read(cls, text: str) -> _Alternative:
        path, taking, takes = text.partition(" takes ")
        if taking:
            return cls(path, takes=takes)
        path, _, values = text.removeprefix("not ").partition("=")
        return cls(path, frozenset(values.split("|")) - {""}, text.startswith("not "))

    def true(self, cfg: Config) -> bool:
        value = attrgetter(self.path)(cfg)
        if self.takes:
            return self.takes in _registry(type(cfg), self.path).about(value).inputs
        return (written(value) in self.values if self.values else bool(value)) is not self.negated


def holds(condition: str, cfg: Config) -> bool:
    """Whether any of its alternatives is true."""
    return any(alternative.true(cfg) for alternative in _alternatives(condition))


def found(condition: str, cfg: Config) -> str:
    """What its keys are, as one would write them."""
    return " and ".join(f"{path}={written(attrgetter(path)(cfg))}" for path in dict.fromkeys(paths(condition)))


def said(condition: str, schema: type = Config) -> str:
    """The condition as one would write it: a choice of ours in the place of what it takes."""
    chosen = {f"{path} takes {takes}": choices for path, takes, choices in _takers(condition, schema)}
    return " or ".join(chosen.get(text, text) for text in condition.split(" or "))


def takers(condition: str, schema: type = Config) -> list[str]:
    """Choices of ours, as one would write them, with which an alternative about an input is true."""
    return [choices for _, _, choices in _takers(condition, schema)]


def _takers(condition: str, schema: type) -> Iterator[tuple[str, str, str]]:
    for path, _, _, takes in _alternatives(condition):
        if takes:
            builtins = _registry(schema, path).builtins()
            yield path, takes, f"{path}={'|'.join(name for name, about in builtins.items() if takes in about.inputs)}"


def paths(condition: str) -> list[str]:
    return [alternative.path for alternative in _alternatives(condition)]


def _registry(schema: type, path: str) -> Registry:
    """Where the parts are that a key chooses from."""
    registry: Registry = resolve_reference(Keys.of(schema)[path].registry, kind="registry")
    return registry


def _alternatives(condition: str) -> Iterator[_Alternative]:
    return map(_Alternative.read, condition.split(" or "))
