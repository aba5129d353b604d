"""A kind of device, or the host, with what it holds when it holds most.

Invariant: pure; lines of nothing are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from skyasync.planning.training_memory import Lines


@dataclass(frozen=True)
class Place:
    """``count`` devices alike, or the host: ``lines`` are the bytes of one at its fullest, in the phase ``when``."""

    name: str
    count: int
    room: int
    when: str
    lines: Lines

    @property
    def total(self) -> int:
        return sum(self.lines.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.room


def fullest(name: str, count: int, room: int, phases: Mapping[str, Lines]) -> Place:
    when = max(phases, key=lambda phase: sum(phases[phase].values()))
    return Place(name, count, room, when, {what: size for what, size in phases[when].items() if size})
