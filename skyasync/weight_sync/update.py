"""The words in which engines learn of new weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

WakePart = Literal["weights", "cache"]


class WeightSyncError(RuntimeError):
    """An engine does not hold, or does not compute, what the trainer does."""


@dataclass(frozen=True)
class WeightUpdate:
    """New weights, ready to be fetched: ``info`` is what the backend needs (a path, a rendezvous, names)."""

    version: int
    backend: str
    info: dict[str, Any]
