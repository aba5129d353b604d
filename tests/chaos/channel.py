"""What happens inside of a run's controller by order from outside: a folder with orders, and with what came of them.

Invariant: an order is carried out within its time, once where it is done at once; each first time is written down.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "SKYASYNC_CHAOS"  # in the environment of the run's processes: the folder
USED = ", which the engines took"  # what was damaged has not been noticed in its sync
MISSED_S = 20.0  # what is done at once has so long to find its moment


@dataclass(frozen=True)
class Order:
    """``until``: seconds since 1970."""

    number: int
    kind: str
    until: float
    lasts: float = 0.0
    pick: float = 0.0


class Orders:
    """Both ends of the folder: ``give`` and ``taken`` are called outside, ``now`` inside."""

    def __init__(self, folder: Path) -> None:
        self._given, self._taken = folder / "orders.jsonl", folder / "taken.jsonl"

    def give(self, order: Order) -> None:
        _append(self._given, asdict(order))

    def taken(self) -> dict[int, str]:
        """By the order's number: what it met."""
        return {int(row["number"]): str(row["what"]) for row in _read(self._taken)}

    def tell(self, order: Order, what: str) -> None:
        """What it met; what is told last holds."""
        _append(self._taken, {"number": order.number, "what": what})

    def now(self, kind: str, what: str, *, once: bool = False) -> Order | None:
        """The order of this kind that holds now, if there is one; ``what`` it meets is written down."""
        orders = [Order(**row) for row in _read(self._given) if row["kind"] == kind]
        due = [order for order in orders if order.until > time.time()]
        if not due:
            return None
        before = self.taken()
        fresh = [order for order in due if order.number not in before]
        if fresh:
            self.tell(fresh[0], what)
            return fresh[0]
        return None if once else due[0]


def _append(file: Path, row: dict[str, object]) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")


def _read(file: Path) -> list[dict[str, Any]]:
    """Whole lines."""
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]]
    return []
