"""A field of the schema together with its documentation and its limits.

Invariant: what is allowed stands beside the field, in its metadata, and nowhere else.
"""

from __future__ import annotations

import inspect
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

T = TypeVar("T")


def key(
    default: T,
    doc: str,
    *,
    choices: tuple[Any, ...] = (),
    refused: tuple[tuple[str, str], ...] = (),
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    also: tuple[float, ...] = (),
    registry: str = "",
    open_ended: bool = False,
    pattern: str = "",
    when: str = "",
    infinite: bool = False,
) -> T:
    """A documented field. ``low``/``high`` are inclusive bounds, ``above``/``below`` exclusive ones;
    ``also`` are numbers outside of them that are allowed.

    ``refused`` has values that are known elsewhere and are no choice here, each with the reason.
    Of a list, bounds, choices and registry hold for each element. ``registry`` ("module:NAME") says
    where the allowed names are registered; with ``open_ended`` a ``module:attribute`` reference (or, for paths,
    any string) is accepted as well, and beside ``choices`` what matches the whole of ``pattern``. ``when`` (see
    ``conditions``) says which other keys it takes for this one to be read: set without them it is refused. Numbers
    must be finite unless ``infinite``.
    """
    metadata = {
        "doc": doc,
        "choices": choices,
        "refused": refused,
        "low": low,
        "above": above,
        "high": high,
        "below": below,
        "also": also,
        "registry": registry,
        "open_ended": open_ended,
        "pattern": pattern,
        "when": when,
        "infinite": infinite,
    }
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def inheriting(group: type[T]) -> type[T]:
    """Make a subclass of a group a dataclass in which every field that it does not define itself may be null, and is.

    What null stands for is for the reader of the group to say.
    """
    own = inspect.get_annotations(group)
    group.__annotations__ = dict(own)
    for inherited in fields(group.__mro__[1]):
        if inherited.name not in own:
            group.__annotations__[inherited.name] = f"{inherited.type} | None"
            setattr(group, inherited.name, field(default=None, metadata=inherited.metadata))
    return dataclass(group)
