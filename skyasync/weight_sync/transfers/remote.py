"""Engines on other nodes of a Ray cluster than the policy's rank 0, if the weights are in memory of
its machine.

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
    """Args:
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
        self.home = self._host = ""  # rank 0's node and address
        self._members: list[int] = []  # of the group
        self._rendezvous: dict[str, Any] = {}
        self._update: WeightUpdate | None = None  # to be sent
        self._reported: set[str] = set()  # nodes that a line of output has been printed for

    async def announce(self, update: WeightUpdate, *, late: bool = False) -> WeightUpdate:
        """The update with what remote engines need.

        Args:
            late: it is for one late engine, which meets rank 0 alone; else for all engines that are
                alive.
        """
        if not self.home:
            self.home, self._host = await self._policy.call_first("node")
        if late:
            return replace(update, remote=_RemoteUpdate(self, None))
        nodes = {
            index: node for index, node in self._nodes().items() if node not in ("", self.home)
        }
        self._update = update if nodes else None
        if not nodes:
            return replace(update, remote=_RemoteUpdate(self, None))
        if sorted(nodes) != self._members:
            await self.open(len(nodes))
            self._members = sorted(nodes)
        if not self._reported.issuperset(nodes.values()):
            self._reported.update(nodes.values())
            count = len(set(nodes.values()))
            print(
                f"weights go to engines on {count} other node{'s' if count > 1 else ''} by broadcast"
            )
        message = await self.message(update)
        size = sum(map(bytes_of, from_message(message["specs"]).values()))
        metrics = update.metrics | {"sync/bytes_to_nodes": float(size * len(nodes))}
        return replace(update, metrics=metrics, remote=_RemoteUpdate(self, message))

    async def announce_again(self, update: WeightUpdate) -> WeightUpdate:
        """After a failure: for the engines that are left, in a new group."""
        self._members = []
        return await self.announce(update)

    async def send(self, update: WeightUpdate) -> None:
        """While the engines load. A failure is the engines' to raise: those that are left did not
        get the weights."""
        if self._update is not None:
            start = time.monotonic()
            await self.send_copy(update)
            update.metrics["sync/to_nodes_s"] = time.monotonic() - start

    async def open(self, engines: int) -> None:
        """Leave the former group; so many engines will join the new one."""
        self._members = []
        arguments = (self._host, engines * self._workers, self._timeout_s)
        self._rendezvous = await self._policy.call_first(
            "transfer_weights", "remote", "open", *arguments
        )

    async def message(self, update: WeightUpdate) -> dict[str, Any]:
        message = await self._policy.call_first(
            "transfer_weights", "remote", "describe", update.info
        )
        return {**message, "rendezvous": self._rendezvous}

    async def send_copy(self, update: WeightUpdate) -> str:
        """Returns why it was interrupted, or ""."""
        reason: str = await self._policy.call_first(
            "transfer_weights", "remote", "send_copy", update.info
        )
        if reason:
            self._members = []
        return reason


@dataclass(frozen=True)
class _RemoteUpdate:
    """Args: message: for the remote engines that are alive; None: each engine that comes is a late
    one."""

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
            if sending is not None and (reason := await sending):
                raise TransferInterruptedError(reason)
        except BaseException:
            await interrupt_soon(message["rendezvous"])
            raise
        finally:
            if sending is not None:
                await asyncio.wait({sending})


class RemoteSender(BroadcastSender):
    """On rank 0: sends what is in memory of its machine, a shared-memory buffer or a file."""

    def describe(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """What the members need to know of it besides the rendezvous."""
        weights, digests, about = _read(info)
        shown = {name: value for name, value in about._asdict().items() if value}
        return {"specs": to_message(specs_of(weights)), "digests": dict(digests), "about": shown}

    def send_copy(self, info: Mapping[str, Any]) -> str:
        """Ends when every member has it; why it was interrupted, or ""."""
        weights, _, _ = _read(info)
        return self.send_tensors(weights.items(), specs_of(weights), sums=False)


def _read(info: Mapping[str, Any]) -> tuple[dict[str, Tensor], Mapping[str, str], WeightsHeader]:
    if "specs" in info:
        return BufferReader().read(info), info["digests"], WeightsHeader()
    return read_file(info["path"])
