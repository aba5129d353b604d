"""Weights by broadcast: rank 0 of the policy to every worker of every engine, by NCCL on GPUs and by gloo on CPUs.

Invariant: both ends cut the same ``specs`` into the same chunks, so they make the same broadcasts in the same order. A
group has the engines that are alive when the update is published; others, or other policy ranks, form a new one.

| who waits                          | for what                    | woken by                                     |
|------------------------------------|-----------------------------|----------------------------------------------|
| ``TensorGroup.join``, every member | the other members           | the last one; ``interrupt``; ``timeout_s``   |
| ``send``, the engines              | each other, chunk by chunk  | gloo: a closed connection, or ``timeout_s``; |
|                                    |                             | NCCL: ``give_up``, which ends the ranks      |
| ``changing`` (an optimizer step)   | a late engine's weights     | ``release``                                  |
| ``release``                        | the end of what it was sent | the ranks; ``SETTLE_S``, then ``give_up``    |

After a failure inside gloo every member closes its connections, and by that the next member's. An engine has changed
nothing then (``TransferInterruptedError``), and the weights are sent again to those that are left. Inside NCCL nothing
ends the others' wait: engines and ranks are lost, as ``recovers`` says.

A late engine meets the ranks alone, while the weights are those that were sent last: optimizer steps wait for that, and
after one the engine waits for the next sync.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore

from skyasync.errors import headline
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
from skyasync.weight_sync.update import PART_BYTES, TransferInterruptedError, WeightsMovedError, WeightUpdate

if TYPE_CHECKING:
    from skyasync.config.schema import Config
    from skyasync.weight_sync.full_tensors import FullTensors

BACKEND = "nccl"  # the setting's name of this way
SETTLE_S = 60.0
POLL_S = 0.005


class TensorGroup:
    """Rank 0 sends, the others receive. Any error of the group closes it and is a ``TransferInterruptedError``.

    Args:
        store: the sender's; what is written to it for this group is under the group's ``name``.
        rendezvous: how the other members find the sender, as it travels in a message.
    """

    def __init__(self, store: TCPStore, rendezvous: Mapping[str, Any], device: torch.device) -> None:
        self._store, self.rendezvous, self._device = PrefixStore(rendezvous["name"], store), dict(rendezvous), device
        self._number = int(self._store.add("joined", 1)) - 1  # the sender comes first
        self._group: Any = None

    def join(self) -> None:
        """Wait for all members, once."""
        if self._group is not None:
            return
        size, timeout_s = self.rendezvous["size"], self.rendezvous["timeout_s"]
        try:
            until = time.monotonic() + timeout_s
            while int(self._store.add("joined", 0)) < size:
                if self._store.check(["interrupted"]):
                    raise RuntimeError("another member has failed")
                if time.monotonic() > until:
                    raise TimeoutError(f"not all members of the group joined within {timeout_s:g} s")
                time.sleep(POLL_S)
            store, timeout = PrefixStore("weights", self._store), timedelta(seconds=timeout_s)
            if self._device.type == "cuda":
                from torch.distributed import ProcessGroupNCCL

                torch.cuda.set_device(self._device)
                options: Any = ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._group = ProcessGroupNCCL(store, self._number, size, options)
                return
            from torch.distributed import ProcessGroupGloo

            gloo: Any = ProcessGroupGloo  # its stub lacks the options
            options = gloo._Options()
            options._timeout = timeout
            if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
                options._devices = [gloo.create_device(interface=interface)]
            else:
                own_address = self.rendezvous["host"]
                if self._number:  # this machine's address, as the sender's machine sees it
                    with socket.create_connection((own_address, self.rendezvous["port"]), timeout=10) as connection:
                        own_address = connection.getsockname()[0]
                options._devices = [gloo.create_device(hostname=str(own_address))]
            self._group = gloo(store, self._number, size, options)
            return
        except Exception as error:
            reason = headline(error)
        self._fail(reason)

    def broadcast(self, tensor: Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        try:
            self._group.broadcast([tensor], options).wait()
            return
        except Exception as error:  # whose traceback would keep the group, and by that the connections
            reason = headline(error)
        self._fail(reason)

    def _fail(self, reason: str) -> None:
        self.close()
        raise TransferInterruptedError(f"the broadcast of weights was interrupted: {reason}")

    def close(self) -> None:
        """Close the connections, by which the others know; those that still join are told. Safe to call twice."""
        if self._number == 0:
            self._store.set("interrupted", "")
        group, self._group = self._group, None
        if group is not None and self._device.type == "cuda":
            group.abort()


def _connect(rendezvous: Mapping[str, Any], timeout_s: float) -> TCPStore:
    """Raises OSError at once if the sender's process has ended: ``TCPStore`` would try again until its limit."""
    host, port = rendezvous["host"], rendezvous["port"]
    socket.create_connection((host, port), timeout=timeout_s).close()
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def interrupt(rendezvous: Mapping[str, Any]) -> None:
    """Let members that wait for others to join stop waiting. For any process."""
    PrefixStore(rendezvous["name"], _connect(rendezvous, 10.0)).set("interrupted", "")


class BroadcastSender:
    """On each policy rank; all ranks iterate, and rank 0 sends.

    Its store listens as long as its process lives, so that a member that comes after its group has ended is told so.
    """

    def __init__(self, weights: Callable[[], FullTensors], rank: int, device: torch.device) -> None:
        self._weights, self._rank, self._device = weights, rank, device
        self._group: TensorGroup | None = None
        self._groups = count()
        self._store: TCPStore | None = None

    def open(self, host: str, members: int, timeout_s: float) -> dict[str, Any]:
        """Leave the former group and listen for the members of a new one; how they find it. Of rank 0."""
        self.close()
        if self._store is None:
            timeout = timedelta(seconds=timeout_s)
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        rendezvous = {
            "host": host,
            "port": self._store.port,
            "name": f"group-{next(self._groups)}",
            "size": 1 + members,
            "timeout_s": timeout_s,
            "chunk_bytes": PART_BYTES,
        }
        self._group = TensorGroup(self._store, rendezvous, self._device)
        return rendezvous

    def specs(self) -> dict[str, Any]:
        """Of what ``send`` sends. No communication."""
        return to_message(self._weights().specs)

    def send(self) -> str:
        """Ends when every member has all weights; all ranks call it. Why it was interrupted, or ""."""
        weights = self._weights()
        if self._rank != 0:
            weights.only_gather()
            return ""
        remaining = iter(weights)
        reason = self.send_tensors(remaining, weights.specs)
        for _ in remaining:  # the other ranks gather all
            pass
        return reason

    def send_tensors(self, tensors: Iterable[tuple[str, Tensor]], specs: TensorSpecs, *, sums: bool = True) -> str:
        """Send the tensors to all members, in chunks; why it was interrupted, or "".

        Args:
            sums: the members check what they received by sums, not by digests.
        """
        assert self._group is not None
        group, remaining = self._group, iter(tensors)
        try:
            group.join()
            checksums: list[Tensor] = []
            for names in chunks_of(specs, group.rendezvous["chunk_bytes"]):
                size = sum(bytes_of(specs[name]) for name in names)
                buffer, end = torch.empty(size, dtype=torch.uint8, device=self._device), 0
                for name in names:
                    sent, tensor = next(remaining)
                    assert sent == name, f"{sent} is sent, and {name} was announced"
                    pack(tensor, specs[name], buffer[end:])
                    end += bytes_of(specs[name])
                if sums:
                    checksums += [sum_of(tensor) for tensor in unpack(buffer, names, specs).values()]
                group.broadcast(buffer)
            if checksums:
                group.broadcast(torch.stack(checksums))
        except TransferInterruptedError as error:
            return str(error)
        return ""

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class BroadcastReader:
    """In each process that has a model."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: TensorGroup | None = None

    def read(self, info: Mapping[str, Any]) -> dict[str, Tensor]:
        """All weights, in memory that is the caller's.

        Raises:
            TransferInterruptedError: if not all of them arrived.
            WeightSyncError: if they are not what was sent.
        """
        return {name: tensor for chunk in self.chunks(info) for name, tensor in chunk.items()}

    def chunks(self, info: Mapping[str, Any]) -> Iterator[dict[str, Tensor]]:
        """The same, in chunks as they arrive; the check follows the last one."""
        specs, rendezvous = from_message(info["specs"]), info["rendezvous"]
        if self._group is None or self._group.rendezvous != rendezvous:
            self.close()
            try:
                store = _connect(rendezvous, rendezvous["timeout_s"])
                self._group = TensorGroup(store, rendezvous, self._device)
            except Exception as error:  # the sender has left it
                raise TransferInterruptedError(f"the sender of weights is not there: {headline(error)}") from None
        group = self._group
        group.join()
        sums: list[Tensor] = []
        for names in chunks_of(specs, rendezvous["chunk_bytes"]):
            size = sum(bytes_of(specs[name]) for name in names)
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            group.broadcast(buffer)
            chunk = unpack(buffer, names, specs)
            if "digests" not in info:
                sums += [sum_of(tensor) for tensor in chunk.values()]
            yield chunk
        if sums:
            group.broadcast(sent := torch.empty(len(sums), dtype=torch.int64, device=self._device))
            right = (torch.stack(sums) == sent).tolist()
            refuse([name for name, same in zip(specs, right, strict=True) if not same], "the engine received")

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class Ranks(PolicyRanks, Protocol):
    def give_up(self, reason: str, cause: BaseException | None = None) -> None: ...


@TRANSFERS.register("nccl")
class BroadcastTransfer(WeightTransfer):
    """Sends from all ranks' shards to all engines.

    Args:
        workers: of an engine, each with a part of the model.
        engines: those that take part in the next sync, by their indices.
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
        timeout_s: float = 60.0,
        recovers: bool = False,
    ) -> None:
        super().__init__(policy)
        self._ranks_to_end, self._workers, self._engines = policy, workers, engines
        self._timeout_s, self._recovers = timeout_s, recovers
        self._members: list[int] | None = None  # of the current group; None: there is no group, or a late engine's
        self._rendezvous: dict[str, Any] = {}
        self._moved = False  # the weights are not those that were sent last
        self._resting = asyncio.Lock()  # while nothing may change them
        self._alone: asyncio.Task[Any] | None = None  # sends to a late engine

    @classmethod
    def of_run(cls, policy: Ranks, cfg: Config, engines: Callable[[], Sequence[int]], *, gpus: bool) -> Self:
        generator = cfg.generator
        timeout_s = generator.heartbeat_timeout_s
        return cls(policy, generator.devices_per_engine, engines, timeout_s=timeout_s, recovers=not gpus)

    async def publish(self, version: int) -> WeightUpdate:
        """Nothing is sent yet."""
        members = list(self._engines())
        if members != self._members:
            await self._open(len(members))
            self._members = members
        self._moved = False
        return await self._update(version, members)

    async def publish_whole(self, update: WeightUpdate) -> WeightUpdate:
        """For the engines that are left, in a new group."""
        self._members = None
        return await self.publish(update.version)

    async def send(self, update: WeightUpdate) -> None:
        """Ends when every engine has the weights, or a member of a group that recovers has failed."""
        if self._members and (reason := (await self._ranks("send"))[0]):
            self._members = None
            if not self._recovers:
                raise TransferInterruptedError(reason)

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        async with self._resting:
            self._moved = True
            yield

    async def for_late_engine(self, version: int) -> WeightUpdate:
        """From here on the weights are sent, until ``release``."""
        await self._resting.acquire()
        try:
            if self._moved:
                raise WeightsMovedError("the weights are not those that the other engines have any more")
            self._members = None
            await self._open(1)
            update = await self._update(version, None)
        except BaseException:
            self._resting.release()
            raise
        self._alone = asyncio.ensure_future(self._ranks("send"))
        return update

    async def release(self, update: WeightUpdate) -> None:
        """After ``for_late_engine``: the engine has the weights, or the ranks may be waiting for it and are ended."""
        sending, self._alone = self._alone, None
        if sending is None:
            return
        try:
            await asyncio.wait({sending}, timeout=SETTLE_S)
            if not sending.done():
                self._give_up("an engine that came late has not met them in its weight sync")
            elif error := sending.exception():
                self._give_up("the weights could not be sent to an engine that came late", error)
            elif (reason := sending.result()[0]) and not self._recovers:
                self._give_up(f"the weights could not be sent to an engine that came late: {reason}")
        finally:
            sending.cancel()
            self._resting.release()

    def engine_failed(self, cause: BaseException) -> bool:
        if not self._recovers:
            self._give_up("an engine has failed in a weight sync by NCCL, in which they wait for it", cause)
        return not self._recovers

    def _give_up(self, reason: str, cause: BaseException | None = None) -> None:
        self._members = None
        self._ranks_to_end.give_up(reason, cause)

    async def _open(self, engines: int) -> None:
        _, host = cast(tuple[str, str], await self._policy.call_first("node"))
        self._rendezvous = await self._rank_0("open", host, engines * self._workers, self._timeout_s)

    async def _update(self, version: int, members: list[int] | None) -> WeightUpdate:
        info = {"rendezvous": self._rendezvous, "specs": await self._rank_0("specs")}
        if not self._recovers:
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


async def interrupt_soon(rendezvous: Mapping[str, Any]) -> None:
    try:
        await asyncio.to_thread(interrupt, rendezvous)
    except Exception:  # the sender's process has ended
        return
