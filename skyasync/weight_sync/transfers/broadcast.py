"""Weights by broadcast: from policy ranks to all workers of engines (NCCL on GPUs, gloo on CPUs).

Invariant: both ends cut the same ``specs`` into the same chunks and deal them over the senders in
turn, so they make the same broadcasts in the same order. All ranks gather all tensors; a sender
packs and sends its own chunks. See ``groups`` for the way of a chunk. The groups have the engines
that are alive when the update is published; others, or other policy ranks, form new ones.

| who waits                           | for what                       | woken by                                     |
|-------------------------------------|--------------------------------|----------------------------------------------|
| ``TensorGroup.join``, every member  | the other members              | the last one; ``interrupt``; ``timeout_s``   |
| ``TensorGroup.finish``: a sender    | each other, chunk by chunk     | gloo: a closed connection, or ``timeout_s``; |
| and its receivers; a node's         |                                | NCCL: ``give_up``, which ends the ranks      |
| gathers of all ranks                | each sender's previous chunk   | its ``finish``; one that failed gathers on   |
| ``TensorGroup.close``, by gloo      | what other senders are sending | their next chunk or failure; ``timeout_s``   |
| ``changing`` (an optimizer step)    | a late engine's weights        | ``release``                                  |
| ``release``                         | the end of what it was sent    | the ranks; ``SETTLE_S``, then ``give_up``    |

After a failure inside gloo every member closes its connections, and by that the next member's. An
engine has changed nothing then (``TransferInterruptedError``), and the weights are sent again to
those that are left. Inside NCCL nothing ends the others' wait: engines and ranks are lost, as
``recovers`` says.

A late engine meets rank 0 alone as its sender, while the weights are those that were sent last:
optimizer steps wait for that, and after one the engine waits for the next sync.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor
from torch.distributed import TCPStore

from skyasync.weight_sync.tensors import (
    TensorSpecs,
    bytes_of,
    chunks_of,
    from_message,
    pack,
    refuse,
    sum_of,
    to_message,
    unpack,
)
from skyasync.weight_sync.transfers import TRANSFERS
from skyasync.weight_sync.transfers.base import PolicyRanks, WeightTransfer
from skyasync.weight_sync.transfers.groups import TensorGroup, interrupt_soon, meet
from skyasync.weight_sync.update import (
    PART_BYTES,
    TransferInterruptedError,
    WeightsMovedError,
    WeightUpdate,
)

if TYPE_CHECKING:
    from skyasync.config.schema import Config
    from skyasync.weight_sync.full_tensors import FullTensors

BACKEND = "nccl"  # the setting's name of this way
# For a late engine's weights to arrive after it has loaded or failed; then the ranks are ended.
SETTLE_S = 60.0


class BroadcastSender:
    """The end on each policy rank: all ranks iterate, and some of them send.

    Rank 0's store listens as long as its process lives, so that a member that comes after its
    groups have ended gets an error at once.
    """

    def __init__(self, weights: Callable[[], FullTensors], rank: int, device: torch.device) -> None:
        self._weights = weights
        self._rank = rank
        self._device = device
        self._group: TensorGroup | None = None
        self._groups = count()
        self._store: TCPStore | None = None

    def open(
        self, host: str, receivers: int, timeout_s: float, senders: Sequence[int] = (0,)
    ) -> dict[str, Any]:
        """Leave the former groups and listen for the members of new ones, on rank 0.

        Returns:
            The rendezvous: how members find the groups.
        """
        self.close()
        if self._store is None:
            timeout = timedelta(seconds=timeout_s)
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        rendezvous = {
            "host": host,
            "port": self._store.port,
            "name": f"group-{next(self._groups)}",
            "device": self._device.type,
            "senders": list(senders),
            "receivers": receivers,
            "timeout_s": timeout_s,
            # So many chunks are in flight (``TensorGroup.most_in_flight``): PART_BYTES in all.
            "chunk_bytes": PART_BYTES // max(2, len(senders)),
        }
        self._group = TensorGroup(self._store, rendezvous, self._device, sender=0)
        return rendezvous

    def specs(self) -> dict[str, Any]:
        """The specs of the tensors that ``send`` sends. No communication."""
        return to_message(self._weights().specs)

    def send(self, rendezvous: Mapping[str, Any]) -> str:
        """Send this rank's chunks to all members; all ranks call it.

        Returns:
            Why it was interrupted, or "".
        """
        weights = self._weights()
        if self._rank not in rendezvous["senders"]:
            weights.only_gather()
            return ""
        remaining = iter(weights)
        try:
            self._group = meet(
                self._group, rendezvous, self._device, rendezvous["senders"].index(self._rank)
            )
            reason = self.send_tensors(remaining, weights.specs)
        except TransferInterruptedError as error:
            reason = str(error)
        except BaseException:
            # In a gather: the receivers would wait for the next chunk.
            self.close()
            raise
        for _ in remaining:  # the other ranks gather all
            pass
        return reason

    def send_tensors(
        self, tensors: Iterable[tuple[str, Tensor]], specs: TensorSpecs, *, sums: bool = True
    ) -> str:
        """Send this sender's chunks of all tensors to all members.

        A chunk is on its way while the tensors after it are gathered.

        Args:
            sums: the members check by sums, not by digests.

        Returns:
            Why it was interrupted, or "".
        """
        assert self._group is not None
        group = self._group
        remaining = iter(tensors)
        checksums = list[Tensor]()
        position = group.rendezvous["senders"].index(self._rank)
        chunks = chunks_of(specs, group.rendezvous["chunk_bytes"])
        try:
            group.join()
            for number, names in enumerate(chunks):
                if number % group.senders != position:
                    for _ in names:
                        next(remaining)
                    continue
                if number >= group.most_in_flight:
                    group.finish(position)
                buffer = self._packed(remaining, names, specs)
                if sums:
                    checksums += map(sum_of, unpack(buffer, names, specs).values())
                group.start(position, buffer)
                del buffer  # the group has it: its memory is free when the broadcast has ended
            # The chunks that no later chunk of this sender has waited for.
            in_flight = min(len(chunks), group.most_in_flight)
            for _ in range(position, in_flight, group.senders):
                group.finish(position)
            if checksums:
                group.start(position, torch.stack(checksums))
                group.finish(position)
        except TransferInterruptedError as error:
            return str(error)
        return ""

    def _packed(
        self, tensors: Iterator[tuple[str, Tensor]], names: Sequence[str], specs: TensorSpecs
    ) -> Tensor:
        size = sum(bytes_of(specs[name]) for name in names)
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        end = 0
        for name in names:
            sent, tensor = next(tensors)
            assert sent == name, f"{sent} is sent, and {name} was announced"
            pack(tensor, specs[name], buffer[end:])
            end += bytes_of(specs[name])
        return buffer

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class BroadcastReader:
    """The end in each process that has a model.

    If the senders are on CPUs, the weights arrive in host memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: TensorGroup | None = None

    def read(self, info: Mapping[str, Any]) -> dict[str, Tensor]:
        """All weights, in memory that is the caller's.

        Raises:
            TransferInterruptedError: if not all of them arrived.
            WeightSyncError: if they are not what was sent.
        """
        weights = dict[str, Tensor]()
        for chunk in self.chunks(info):
            weights |= chunk
        return weights

    def chunks(self, info: Mapping[str, Any]) -> Iterator[dict[str, Tensor]]:
        """All weights in chunks as they arrive; the check follows the last one."""
        specs = from_message(info["specs"])
        rendezvous = info["rendezvous"]
        if rendezvous["device"] == "cpu":
            device = torch.device("cpu")
        else:
            device = self._device
        group = meet(self._group, rendezvous, device)
        self._group = group
        group.join()
        chunks = chunks_of(specs, rendezvous["chunk_bytes"])
        sums = [dict[str, Tensor]() for _ in range(group.senders)]

        def start(number: int) -> None:
            if number < len(chunks):
                size = sum(bytes_of(specs[name]) for name in chunks[number])
                buffer = torch.empty(size, dtype=torch.uint8, device=device)
                group.start(number % group.senders, buffer)

        for number in range(group.most_in_flight):
            start(number)
        for number, names in enumerate(chunks):
            sender = number % group.senders
            chunk = unpack(group.finish(sender), names, specs)
            if "digests" not in info:
                for name, tensor in chunk.items():
                    sums[sender][name] = sum_of(tensor)
            yield chunk
            # After the caller has loaded the chunk: no more than ``most_in_flight`` are in memory.
            start(number + group.most_in_flight)
        differing: list[str] = []
        for sender, received in enumerate(sums):
            if received:
                group.start(sender, torch.empty(len(received), dtype=torch.int64, device=device))
                checksums = torch.stack(list(received.values())).tolist()
                sent = group.finish(sender).tolist()
                for name, checksum, sent_checksum in zip(received, checksums, sent, strict=True):
                    if checksum != sent_checksum:
                        differing.append(name)
        refuse(differing, "the engine received")

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class Ranks(PolicyRanks, Protocol):
    """The policy's processes, which are ended if they wait in vain."""

    def give_up(self, reason: str, cause: BaseException | None = None) -> None: ...


@TRANSFERS.register("nccl")
class BroadcastTransfer(WeightTransfer):
    """Sends from all ranks' shards to all engines.

    Args:
        workers: of an engine, each with a shard of the model.
        engines: the indices of the engines that take part in the next sync.
        senders: the number of ranks that send to them.
        timeout_s: for a member to join, and by gloo for a chunk.
        recovers: a member that fails inside leaves the others (gloo).
    """

    sender = "broadcast"

    def __init__(
        self,
        policy: Ranks,
        workers: int,
        engines: Callable[[], Sequence[int]],
        *,
        senders: int = 1,
        timeout_s: float = 60.0,
        recovers: bool = False,
    ) -> None:
        super().__init__(policy)
        self._ranks_to_end = policy
        self._workers = workers
        self._engines = engines
        self._senders = senders
        self._timeout_s = timeout_s
        self._recovers = recovers
        # Engines of the current group; None: there is no group, or a late engine's.
        self._members: list[int] | None = None
        self._nodes: list[tuple[str, str]] = []  # of the ranks, with their addresses
        self._rendezvous: dict[str, Any] = {}
        self._weights_moved = False  # the weights are not those of the latest sync
        self._weights_lock = asyncio.Lock()  # while nothing may change the weights
        self._late_sending: asyncio.Task[str] | None = None  # to a late engine

    @classmethod
    def of_run(
        cls, policy: Ranks, cfg: Config, engines: Callable[[], Sequence[int]], *, gpus: bool
    ) -> Self:
        generator = cfg.generator
        return cls(
            policy,
            generator.devices_per_engine,
            engines,
            senders=generator.weight_sync_senders,
            timeout_s=generator.heartbeat_timeout_s,
            recovers=not gpus,
        )

    async def publish(self, version: int) -> WeightUpdate:
        """Form a group with the engines that are alive. Nothing is sent yet."""
        members = list(self._engines())
        if members != self._members:
            await self._open(len(members), self._senders)
            self._members = members
        self._weights_moved = False
        return await self._update(version, members)

    async def publish_whole(self, update: WeightUpdate) -> WeightUpdate:
        """Publish once more for the engines that are left, in a new group."""
        self._members = None
        return await self.publish(update.version)

    async def send(self, update: WeightUpdate) -> None:
        """Send to all engines, until they have the weights.

        Raises:
            TransferInterruptedError: if a member failed, unless the group recovers: then the
                engines raise it.
        """
        if not self._members:
            return
        reason = await self._sent()
        if reason:
            self._members = None
            if not self._recovers:
                raise TransferInterruptedError(reason)

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        async with self._weights_lock:
            self._weights_moved = True
            yield

    async def for_late_engine(self, version: int) -> WeightUpdate:
        """Begin to send to one engine; the weights do not change until ``release``."""
        await self._weights_lock.acquire()
        try:
            if self._weights_moved:
                raise WeightsMovedError(
                    "the weights are not those that the other engines have any more"
                )
            self._members = None
            await self._open(1, senders=1)
            update = await self._update(version, None)
        except BaseException:
            self._weights_lock.release()
            raise
        self._late_sending = asyncio.ensure_future(self._sent())
        return update

    async def release(self, update: WeightUpdate) -> None:
        """End ``for_late_engine``, and the ranks if they may still wait for the engine."""
        sending = self._late_sending
        self._late_sending = None
        if sending is None:
            return
        try:
            await asyncio.wait({sending}, timeout=SETTLE_S)
            if not sending.done():
                self._give_up("an engine that came late has not met them in its weight sync")
                return
            error = sending.exception()
            if error is not None:
                self._give_up("the weights could not be sent to an engine that came late", error)
                return
            reason = sending.result()
            if reason and not self._recovers:
                self._give_up(
                    f"the weights could not be sent to an engine that came late: {reason}"
                )
        finally:
            sending.cancel()
            self._weights_lock.release()

    def engine_failed(self, cause: BaseException) -> bool:
        if not self._recovers:
            self._give_up(
                "an engine has failed in a weight sync by NCCL, in which they wait for it", cause
            )
        return not self._recovers

    def _give_up(self, reason: str, cause: BaseException | None = None) -> None:
        self._members = None
        self._ranks_to_end.give_up(reason, cause)

    async def _open(self, engines: int, senders: int) -> None:
        if not self._nodes:
            self._nodes = await self._policy.call("node")
        ranks = spread([node for node, _ in self._nodes], senders)
        host = self._nodes[0][1]
        receivers = engines * self._workers
        self._rendezvous = await self._rank_0("open", host, receivers, self._timeout_s, ranks)

    async def _sent(self) -> str:
        """Let all ranks send; returns why one was interrupted, or ""."""
        reasons = await self._ranks("send", self._rendezvous)
        return next(filter(None, reasons), "")

    async def _update(self, version: int, members: list[int] | None) -> WeightUpdate:
        info = {"rendezvous": self._rendezvous, "specs": await self._rank_0("specs")}
        if not self._recovers:
            # An engine that fails inside NCCL takes these with it.
            info["members"] = members
        return WeightUpdate(version, BACKEND, info, remote=_InterruptingUpdate())


class _InterruptingUpdate:
    """An engine that fails before it joins does not keep the others waiting."""

    @asynccontextmanager
    async def on(self, update: WeightUpdate, node: str) -> AsyncIterator[WeightUpdate]:
        try:
            yield update
        except BaseException:
            await interrupt_soon(update.info["rendezvous"])
            raise


def spread(nodes: Sequence[str], count: int) -> list[int]:
    """Choose ranks on as many nodes as possible, one of each node before any second one.

    Args:
        nodes: of the ranks.
    """
    ranks_of_node = Counter[str]()
    positions = list[int]()  # of the ranks among those of their nodes
    for node in nodes:
        positions.append(ranks_of_node[node])
        ranks_of_node[node] += 1
    return sorted(range(len(nodes)), key=positions.__getitem__)[:count]
