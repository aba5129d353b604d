"""When a key is read: ``a.b or c.d`` (one of them is set), ``a.type=mean|variance``, ``not a.b``.

Invariant: a condition names keys that exist (a test holds it), and stands beside the field that it is about.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from skyasync.config.schema import Config
from skyasync.config.values import written


def holds(condition: str, cfg: Config) -> bool:
    """Whether any of its alternatives is true."""
    return any(_true(cfg, *alternative) for alternative in _alternatives(condition))


def found(condition: str, cfg: Config) -> str:
    """What its keys are, as one would write them."""
    paths = dict.fromkeys(path for path, _, _ in _alternatives(condition))
    return " and ".join(f"{path}={written(attrgetter(path)(cfg))}" for path in paths)


def paths(condition: str) -> list[str]:
    return [path for path, _, _ in _alternatives(condition)]


def _alternatives(condition: str) -> Iterator[tuple[str, frozenset[str], bool]]:
    """Path, the values it may have (none: any that is true), and whether that is turned round."""
    for alternative in condition.split(" or "):
        path, _, values = alternative.removeprefix("not ").partition("=")
        yield path, frozenset(values.split("|")) - {""}, alternative.startswith("not ")


def _true(cfg: Config, path: str, values: frozenset[str], negated: bool) -> bool:
    value = attrgetter(path)(cfg)
    return (written(value) in values if values else bool(value)) is not negated
