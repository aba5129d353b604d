"""A folder with orders for a run's controller, and with their results.

Invariant: an order is carried out before its deadline. An order that is carried out at one moment is carried out once.
The time at which each order first takes effect is recorded.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "SKYASYNC_CHAOS"  # environment variable of the run's processes: the folder
USED = ", which the engines took"  # the result if the sync did not notice the damage
MISSED_S = 20.0  # seconds in which an order that is carried out at one moment must find its moment


@dataclass(frozen=True)
class Order:
    """``until``: seconds since 1970."""

    number: int
    kind: str
    until: float
    lasts: float = 0.0
    pick: float = 0.0


class Orders:
    """Both ends of the folder: the driver calls ``give`` and ``taken``, the controller calls ``now``."""

    def __init__(self, folder: Path) -> None:
        self._given, self._taken = folder / "orders.jsonl", folder / "taken.jsonl"

    def give(self, order: Order) -> None:
        _append(self._given, asdict(order))

    def taken(self) -> dict[int, str]:
        """The part that each order hit, by the order's number."""
        return {int(row["number"]): str(row["what"]) for row in _read(self._taken)}

    def tell(self, order: Order, what: str) -> None:
        """Record the part that an order hit; the last record counts."""
        _append(self._taken, {"number": order.number, "what": what})

    def now(self, kind: str, what: str, *, once: bool = False) -> Order | None:
        """The current order of this kind, if there is one; the part that it hits is recorded."""
        orders = [Order(**row) for row in _read(self._given) if row["kind"] == kind]
        current = [order for order in orders if order.until > time.time()]
        if not current:
            return None
        before = self.taken()
        fresh = [order for order in current if order.number not in before]
        if fresh:
            self.tell(fresh[0], what)
            return fresh[0]
        return None if once else current[0]


def _append(file: Path, row: dict[str, object]) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")


def _read(file: Path) -> list[dict[str, Any]]:
    """The complete lines of a file."""
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]]
    return []
