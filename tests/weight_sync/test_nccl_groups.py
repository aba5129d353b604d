"""The groups of the NCCL sync when engines or ranks die: real messages, sender, client and replacement of engines.

In the place of vLLM's communicators stands a store on this machine's loopback: who joins waits for all the others, as
in NCCL, and what is sent arrives at all of them.
"""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore

from skyasync.config.schema import Config
from skyasync.engines.client import InferenceClient
from skyasync.engines.protocol import EngineDiedError, EngineStats
from skyasync.engines.revival import Revival
from skyasync.weight_sync.sync import WeightSync
from skyasync.weight_sync.transfers import broadcast
from skyasync.weight_sync.transfers.broadcast import Broadcast, NCCLSender, Rendezvous, worker_info
from skyasync.weight_sync.update import WeightUpdate
from skyasync.workers.dispatch import Dispatch
from skyasync.workers.roles import POLICY

STUCK_S = 2.0  # until a thread that waits for the dead goes away


class Meeting:
    """In the place of a communicator."""

    def __init__(self, master_address: str, master_port: int, rank: int, world_size: int) -> None:
        self.store = TCPStore(
            master_address, master_port, world_size, rank == 0, timedelta(seconds=STUCK_S), wait_for_workers=True
        )
        self.sent, self.world_size = 0, world_size

    def broadcast(self, tensors: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        self.sent += 1
        if tensors is not None:
            torch.save(tensors, file := io.BytesIO())
            self.store.set(str(self.sent), file.getvalue())
        received = torch.load(io.BytesIO(self.store.get(str(self.sent))))
        if self.store.add(f"{self.sent} there", 1) == self.world_size:
            self.store.set(f"{self.sent} all", "")
        self.store.wait([f"{self.sent} all"])
        return received


class Sender(NCCLSender):
    def _join(self) -> Any:
        address, port, workers = self._rendezvous
        sender, meeting = self, Meeting(address, port, 0, 1 + workers)

        class Joined:
            def send_weights(self) -> None:
                meeting.broadcast({name: tensor.clone() for name, tensor in sender})

            def shutdown(self) -> None: ...

        return Joined()


class Ranks:
    """A policy of one rank, in a thread."""

    busy_s = 0.0

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        self.sender: Sender | None = None
        self.lost: BaseException | None = None
        self.ports: list[int] = []
        self._thread = ThreadPoolExecutor(1)

    async def call_first(self, method: str, *args: Any) -> Any:
        if self.lost is not None:
            raise RuntimeError("the workers have been stopped")
        return await asyncio.get_running_loop().run_in_executor(self._thread, getattr(self, method), *args)

    async def call(self, method: str, *args: Any) -> list[Any]:
        return [await self.call_first(method, *args)]

    def give_up(self, reason: str, cause: BaseException | None = None) -> None:
        self.lost = RuntimeError(reason)

    def free_address(self) -> tuple[str, int]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.ports.append(listener.getsockname()[1])
        return "127.0.0.1", self.ports[-1]

    def open_broadcast(self, rendezvous: Rendezvous) -> None:
        self.sender = Sender(self.model, rendezvous, rank=0)

    def announce(self, version: int) -> WeightUpdate:
        assert self.sender is not None
        return self.sender.update(version)

    def broadcast(self) -> None:
        assert self.sender is not None
        self.sender.send()

    def optimizer_step(self, *_: object) -> dict[str, float]:
        with torch.no_grad():
            self.model.weight += 1
        return {}


class Trainer(Dispatch):
    def __init__(self, client: InferenceClient) -> None:
        self.ranks = Ranks()
        super().__init__(Config(), {POLICY: self.ranks})  # type: ignore[dict-item]
        self._broadcast = Broadcast(self.ranks, 1, lambda: client.roster.routes.living)
        self._changing = self._broadcast.changing

    @property
    def weight(self) -> float:
        return self.ranks.model.weight.item()


class Engine:
    """Joins and receives as ``VLLMEngine`` does."""

    def __init__(self, index: int) -> None:
        self.index, self.version, self.weight = index, 0, 0.0
        self.dead, self.dies_in_sync, self.starts = asyncio.Event(), False, asyncio.Event()
        self.starts.set()
        self.groups: list[int] = []
        self._group: dict[str, Any] = {}
        self._meeting: Meeting

    async def start(self) -> None:
        await self.starts.wait()

    async def update_weights(self, update: WeightUpdate) -> None:
        if self.dies_in_sync:
            await asyncio.sleep(0.2)
            self.dead.set()
        await self._lives()
        received = await asyncio.to_thread(self._receive, update.info)
        self.weight, self.version = received["weight"].item(), update.version

    def _receive(self, info: dict[str, Any]) -> dict[str, torch.Tensor]:
        if info["rendezvous"] != self._group:
            own = worker_info(info, self.index, 1)
            self._meeting = Meeting(own["master_address"], own["master_port"], own["rank_offset"], own["world_size"])
            self._group = info["rendezvous"]
            self.groups.append(own["rank_offset"])
        return self._meeting.broadcast()

    async def _lives(self) -> None:
        if self.dead.is_set():
            raise EngineDiedError("its process is gone")

    async def progress(self) -> Sequence[Any]:
        await self._lives()
        return []

    async def stats(self) -> EngineStats:
        return EngineStats()

    async def pause(self, mode: str = "keep") -> None: ...

    async def resume(self) -> None: ...

    async def shutdown(self) -> None: ...

    def kill(self) -> None:
        self.dead.set()

    def successor(self) -> Engine:
        another = Engine(self.index)
        if not self.starts.is_set():
            another.starts = self.starts
        return another


class Run:
    """Two engines, a trainer, and what replaces engines."""

    def __init__(self, engines: int = 2) -> None:
        self.client = InferenceClient([Engine(index) for index in range(engines)])  # type: ignore[misc]
        self.trainer = Trainer(self.client)
        self.sync = WeightSync(self.trainer, self.client, ())
        self.sync.expects_late_engines = True
        self.revival = Revival(
            self.client, self.sync, max_restarts=9, heartbeat_s=0.02, heartbeat_timeout_s=5, limit_s=20
        )

    @property
    def engines(self) -> list[Engine]:
        return self.client.engines  # type: ignore[return-value]

    async def until(self, *, restarts: int = 0, deaths: int = 0) -> None:
        async with asyncio.timeout(10):
            while self.revival.restarts < restarts or self.revival.deaths < deaths:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def check(self, version: int) -> None:
        assert [engine.version for engine in self.engines] == [version] * len(self.engines)
        assert [engine.weight for engine in self.engines] == [self.trainer.weight] * len(self.engines)


@asynccontextmanager
async def running(engines: int = 2) -> AsyncIterator[Run]:
    run = Run(engines)
    run.revival.begin()
    try:
        async with asyncio.timeout(20):
            await run.sync.sync(1)
            run.check(1)
            yield run
    finally:
        await run.revival.close()


async def test_a_newcomer_meets_the_ranks_alone_and_the_next_sync_is_of_a_group_of_all() -> None:
    async with running() as run:
        run.engines[0].dead.set()
        await run.until(restarts=1)
        run.check(1)
        for version in (2, 3):
            await run.trainer.optimizer_step()
            await run.sync.sync(version)
            run.check(version)
        assert len(set(run.trainer.ranks.ports)) == 3, "all, the newcomer alone, all"
        assert [engine.groups for engine in run.engines] == [[1, 1], [2, 2]]


async def test_the_only_engine_is_replaced_without_a_sync() -> None:
    async with running(1) as run:
        run.engines[0].dead.set()
        await run.until(restarts=1)
        run.check(1)


async def test_while_the_weights_are_on_their_way_to_the_next_version_a_newcomer_waits_for_it() -> None:
    async with running() as run:
        run.engines[1].starts.clear()
        run.engines[1].dead.set()
        await run.until(deaths=1)
        await run.trainer.optimizer_step()
        run.engines[1].starts.set()
        await asyncio.sleep(0.2)
        assert len(run.client.roster.routes.living) == 1, "what the other has is nowhere any more"
        await run.sync.sync(2)  # to the other alone
        await run.until(restarts=1)
        run.check(2)
        assert run.engines[0].groups == [1, 1]


async def test_an_optimizer_step_waits_until_a_newcomer_has_the_weights() -> None:
    async with running() as run, run.sync.between_syncs() as update:
        step = asyncio.create_task(run.trainer.optimizer_step())
        await asyncio.sleep(0.1)
        assert not step.done()
        await Engine(7).update_weights(update)
    await step


async def test_a_death_inside_of_a_sync_takes_all_that_wait_there_and_the_next_ranks_find_newcomers() -> None:
    async with running() as run:
        await run.trainer.optimizer_step()
        first = list(run.engines)
        run.engines[1].dies_in_sync = True
        with pytest.raises(EngineDiedError, match="engine 1 has died in a call in which the others wait for it"):
            await run.sync.sync(2)
        assert "in which they wait for it" in str(run.trainer.ranks.lost)
        run.trainer = Trainer(run.client)  # as the controller does; from the checkpoint of the first step, say
        run.sync.restart(run.trainer)
        await asyncio.sleep(0.2)
        assert run.client.roster.routes.living == [], "newcomers wait for weights"
        await run.sync.sync(2)
        await run.until(restarts=2)
        run.check(2)
        assert not {*first} & {*run.engines}
        await run.trainer.optimizer_step()
        await run.sync.sync(3)
        run.check(3)


async def test_ranks_that_a_newcomer_does_not_meet_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "SETTLE_S", 0.2)
    async with running() as run:
        with pytest.raises(EngineDiedError):
            async with run.sync.between_syncs():
                raise EngineDiedError("the newcomer")
        assert "has not met them" in str(run.trainer.ranks.lost)
        with pytest.raises(RuntimeError, match="the workers have been stopped"):
            await run.trainer.optimizer_step()
