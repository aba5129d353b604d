"""The words in which engines learn of new weights."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

WakePart = Literal["weights", "cache"]

CUDA_IPC = "cuda_ipc"
"""The backend whose updates come in parts; see ``skyasync.weight_sync.cuda_ipc``."""

PART_BYTES = 1 << 28
"""Of such a part at most, but for a larger parameter: beside it a message's milliseconds are little, and so is its
memory beside a model's."""

BROKEN_OFF: dict[str, Any] = {"broken_off": True}
"""Instead of a part's ``info``: no more comes of those that have come."""


class TakerDiedError(RuntimeError):
    """Whoever was to take weights is no more."""


class WeightSyncError(RuntimeError):
    """An engine does not hold, or does not compute, what the trainer does."""


class WeightMismatchError(WeightSyncError):
    """An engine was sent changes of weights that it does not hold; it is as it was."""


class WeightsMovedError(WeightSyncError):
    """What an engine that comes late is to be given is not there any more: the next sync has to come first."""


class Places(Protocol):
    """Where the nodes of a Ray cluster have the weights of one update."""

    async def info(self, update: WeightUpdate, node: str) -> dict[str, Any]: ...


@dataclass(frozen=True)
class WeightUpdate:
    """New weights, ready to be fetched: ``info`` is what the backend needs (a path, a rendezvous, names).

    Args:
        content: of the weights, a mark that other weights do not have; empty where nobody asks.
        base: only what has changed since these weights (their ``content``) was sent; empty: all was.
        metrics: of the publishing.
        places: where else they lie than ``info`` says; None: nowhere, or all that read them see one place.
    """

    version: int
    backend: str
    info: dict[str, Any]
    content: str = ""
    base: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    places: Places | None = field(default=None, compare=False, repr=False)

    async def on(self, node: str) -> WeightUpdate:
        """As engines of this Ray node are told of it."""
        if self.places is None:
            return self
        return replace(self, info=await self.places.info(self, node), places=None)


def is_whole(update: WeightUpdate) -> bool:
    """Whether an engine that has taken it has all weights: it does not go in parts, or is the last of them."""
    return bool(update.info.get("last", "broken_off" not in update.info))


class Held:
    """Which weights an engine holds, by their content."""

    def __init__(self) -> None:
        self.content = ""

    def receive(self, update: WeightUpdate) -> None:
        """Before an update: until ``settle`` nobody knows what the engine holds.

        Raises:
            WeightMismatchError: for changes of other weights; nothing has been done then.
        """
        if update.base and update.base != self.content:
            raise WeightMismatchError(
                f"version {update.version} was sent as changes of weights ({update.base}) that the engine does not "
                f"hold ({self.content or 'it has been given none'})"
            )
        self.content = ""

    def settle(self, update: WeightUpdate) -> None:
        """After it."""
        self.content = update.content
