"""Engines on other nodes than the policy's rank 0, if the weights are in its machine's memory.

Invariant: what engines of rank 0's node read, rank 0 broadcasts to the workers of the others, from
where it is. So the other policy ranks take no part, and an engine that fails, joins late or is
silent keeps none of them waiting.

| who waits                    | for what                      | woken by                                         |
|------------------------------|-------------------------------|--------------------------------------------------|
| ``send``, the remote engines | each other                    | see ``TensorGroup``: a failure, or ``timeout_s`` |
| ``on``, for a late engine    | the end of what is sent to it | the same                                         |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from skyasync.weight_sync.delta import WeightsHeader
from skyasync.weight_sync.tensors import bytes_of, from_message, specs_of, to_message
from skyasync.weight_sync.transfers.base import PolicyRanks
from skyasync.weight_sync.transfers.broadcast import BroadcastSender
from skyasync.weight_sync.transfers.file import read_file
from skyasync.weight_sync.transfers.groups import interrupt_soon
from skyasync.weight_sync.transfers.shared_memory import BufferReader
from skyasync.weight_sync.update import TransferInterruptedError, WeightUpdate


class RemoteEngines:
    """The controller's side: gives remote engines what rank 0's node reads from memory.

    Args:
        nodes: of the engines that are alive, Ray's names by the engines' indices.
        workers: of an engine, each of which receives all weights.
        timeout_s: for an engine to join, and for a chunk.
    """

    def __init__(
        self,
        policy: PolicyRanks,
        nodes: Callable[[], Mapping[int, str]],
        *,
        workers: int = 1,
        timeout_s: float = 60.0,
    ) -> None:
        self._policy = policy
        self._nodes = nodes
        self._workers = workers
        self._timeout_s = timeout_s
        self.home = ""  # rank 0's node
        self._host = ""  # and its address
        self._members: list[int] = []  # of the group
        self._rendezvous: dict[str, Any] = {}
        self._sends = False  # the current update has remote engines
        self._reported_nodes: set[str] = set()  # nodes that a line of output has been printed for

    async def announce(self, update: WeightUpdate, *, late: bool = False) -> WeightUpdate:
        """Add a router for remote engines to an update.

        Args:
            late: it is for one late engine, which meets rank 0 alone; else for all engines that are
                alive.
        """
        if not self.home:
            self.home, self._host = await self._policy.call_first("node")
        if late:
            return replace(update, remote=_RemoteUpdate(self, None))
        engines = []
        nodes = set()
        for engine, node in self._nodes().items():
            if node not in ("", self.home):
                engines.append(engine)
                nodes.add(node)
        self._sends = bool(engines)
        if not engines:
            return replace(update, remote=_RemoteUpdate(self, None))
        engines.sort()
        if engines != self._members:
            await self.open(len(engines))
            self._members = engines
        if not nodes <= self._reported_nodes:
            self._reported_nodes |= nodes
            plural = "s" if len(nodes) > 1 else ""
            print(f"weights go to engines on {len(nodes)} other node{plural} by broadcast")
        message = await self.message(update)
        size = sum(map(bytes_of, from_message(message["specs"]).values()))
        metrics = update.metrics | {"sync/bytes_to_nodes": float(size * len(engines))}
        return replace(update, metrics=metrics, remote=_RemoteUpdate(self, message))

    async def announce_again(self, update: WeightUpdate) -> WeightUpdate:
        """Announce after a failure, in a new group of the engines that are left."""
        self._members = []
        return await self.announce(update)

    async def send(self, update: WeightUpdate) -> None:
        """Send to remote engines while they load."""
        if self._sends:
            start = time.monotonic()
            # The reason of an interruption is left to the engines, which raise it.
            await self.send_copy(update)
            update.metrics["sync/to_nodes_s"] = time.monotonic() - start

    async def open(self, engines: int) -> None:
        """Leave the former group, and open one that so many engines will join."""
        self._members = []
        receivers = engines * self._workers
        self._rendezvous = await self._rank_0("open", self._host, receivers, self._timeout_s)

    async def message(self, update: WeightUpdate) -> dict[str, Any]:
        """The ``info`` of an update for remote engines."""
        message = await self._rank_0("describe", update.info)
        return {**message, "rendezvous": self._rendezvous}

    async def _rank_0(self, method: str, *args: object) -> Any:  # noqa: ANN401  (what the method returns)
        return await self._policy.call_first("transfer_weights", "remote", method, *args)

    async def send_copy(self, update: WeightUpdate) -> str:
        """Returns why it was interrupted, or ""."""
        reason: str = await self._rank_0("send_copy", update.info)
        if reason:
            # A group that was interrupted is closed: the next update opens one.
            self._members = []
        return reason


@dataclass(frozen=True)
class _RemoteUpdate:
    """The router of an update.

    Args:
        message: for the remote engines that are alive; None: each engine that comes is late.
    """

    engines: RemoteEngines
    message: dict[str, Any] | None

    @asynccontextmanager
    async def on(self, update: WeightUpdate, node: str) -> AsyncIterator[WeightUpdate]:
        if node == self.engines.home:
            yield update
            return
        message = self.message
        sending = None
        if message is None:
            await self.engines.open(1)
            message = await self.engines.message(update)
            sending = asyncio.ensure_future(self.engines.send_copy(update))
        try:
            yield replace(update, info=message)
            if sending is not None:
                reason = await sending
                if reason:
                    raise TransferInterruptedError(reason)
        except BaseException:
            # Otherwise rank 0 and the other engines would wait for this one to join.
            await interrupt_soon(message["rendezvous"])
            raise
        finally:
            if sending is not None:
                await asyncio.wait({sending})


class RemoteSender(BroadcastSender):
    """Sends what rank 0's machine has in memory, a shared-memory buffer or a file."""

    def describe(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """Specs, digests and header for the members."""
        weights, digests, header = _read(info)
        return {
            "specs": to_message(specs_of(weights)),
            "digests": dict(digests),
            "about": header.message(),
        }

    def send_copy(self, info: Mapping[str, Any]) -> str:
        """Send to all members; returns why it was interrupted, or ""."""
        weights, _, _ = _read(info)
        return self.send_tensors(weights.items(), specs_of(weights), sums=False)


def _read(info: Mapping[str, Any]) -> tuple[dict[str, Tensor], Mapping[str, str], WeightsHeader]:
    if "specs" in info:
        return BufferReader().read(info), info["digests"], WeightsHeader()
    return read_file(info["path"])
