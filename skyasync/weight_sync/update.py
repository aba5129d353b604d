"""A weight update as engines get it, and what can go wrong."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

WakePart = Literal["weights", "cache"]

CUDA_IPC = "cuda_ipc"
"""The backend whose updates come in parts; see ``skyasync.weight_sync.transfers.cuda_ipc``."""

ADAPTER_ID = 1
"""The id of the one adapter that a vLLM engine has."""

PART_BYTES = 1 << 30
"""Most bytes of a part or a chunk, unless one tensor is larger: it takes long compared to sending a
message, and its memory is little compared to a model's, whose embeddings alone are as large from
about 8B parameters on."""

BROKEN_OFF: dict[str, Any] = {"broken_off": True}
"""Replaces a part's ``info``: the other parts will not come."""


class WeightReceiverFailedError(RuntimeError):
    """An engine that was to load weights has failed."""


class WeightSyncError(RuntimeError):
    """An engine does not have, or does not compute with, the trainer's weights."""


class WeightMismatchError(WeightSyncError):
    """An engine was sent the delta of weights that it does not have; the engine is unchanged."""


class TransferInterruptedError(WeightSyncError):
    """Weights did not arrive, since another member of the group failed; the engine is unchanged."""


class WeightsMovedError(WeightSyncError):
    """The weights of a late engine are not available any more: it waits for the next sync."""


class UpdateRouter(Protocol):
    """Gets an update to engines on other Ray nodes than the policy's rank 0."""

    def on(self, update: WeightUpdate, node: str) -> AbstractAsyncContextManager[WeightUpdate]: ...


@dataclass(frozen=True)
class WeightUpdate:
    """New weights that engines can load.

    Args:
        info: for the reader of ``backend``: a path, a rendezvous, names.
        content: identifies the weights; empty if it is not needed.
        base: the ``content`` of the weights that a delta is of; empty: all weights are sent.
        metrics: of publishing.
        remote: for engines on other nodes than rank 0's; None: all engines use ``info``.
    """

    version: int
    backend: str
    info: dict[str, Any]
    content: str = ""
    base: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    remote: UpdateRouter | None = field(default=None, compare=False, repr=False)

    def on(self, node: str) -> AbstractAsyncContextManager[WeightUpdate]:
        """The update for an engine of this Ray node, which loads the weights inside the context."""
        plain = replace(self, remote=None)
        if self.remote is None or not node:
            return nullcontext(plain)
        return self.remote.on(plain, node)


def is_whole(update: WeightUpdate) -> bool:
    """Whether an engine that has loaded it has all weights: it has no parts, or is the last."""
    return bool(update.info.get("last", "broken_off" not in update.info))


class CurrentContent:
    """The content of the weights that an engine has."""

    def __init__(self) -> None:
        self.content = ""

    def begin(self, update: WeightUpdate) -> None:
        """Begin an update: until ``complete`` the content is unknown.

        Raises:
            WeightMismatchError: for the delta of other weights; nothing has been changed then.
        """
        if update.base and update.base != self.content:
            raise WeightMismatchError(
                f"version {update.version} was sent as a delta of weights ({update.base}) that the engine does not "
                f"have ({self.content or 'it has received none'})"
            )
        self.content = ""

    def complete(self, update: WeightUpdate) -> None:
        self.content = update.content
