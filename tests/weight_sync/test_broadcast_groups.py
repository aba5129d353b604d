"""Broadcast groups when engines or ranks fail: real messages, senders, readers, client, and replacement of engines.

The groups use gloo, but the policy treats it as NCCL (``recovers=False``), in which the others wait for a failed
member.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from torch import nn

from skyasync.config.schema import Config
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import EngineFailedError, EngineStats, InferenceEngine
from skyasync.inference.supervisor import EngineSupervisor
from skyasync.weight_sync.full_tensors import FullTensors
from skyasync.weight_sync.sync import WeightSync
from skyasync.weight_sync.transfers import broadcast
from skyasync.weight_sync.transfers.broadcast import (
    BroadcastReader,
    BroadcastSender,
    BroadcastTransfer,
)
from skyasync.weight_sync.update import TransferInterruptedError, WeightUpdate
from skyasync.workers.dispatch import Dispatch
from skyasync.workers.roles import POLICY

CPU = torch.device("cpu")
STUCK_S = 2.0  # until a thread that waits for a failed member ends


class Ranks:
    """A policy of one rank, in a thread."""

    busy_s = 0.0

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        self.sender = BroadcastSender(
            lambda: FullTensors(dict(self.model.named_parameters()), torch.float32), 0, CPU
        )
        self.lost: BaseException | None = None
        self.groups: list[str] = []
        self._thread = ThreadPoolExecutor(1)

    async def call_first(self, method: str, *args: Any) -> Any:
        if self.lost is not None:
            raise RuntimeError("the workers have been stopped")
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, getattr(self, method), *args
        )

    async def call(self, method: str, *args: Any) -> list[Any]:
        return [await self.call_first(method, *args)]

    def give_up(self, reason: str, cause: BaseException | None = None) -> None:
        self.lost = RuntimeError(reason)

    def node(self) -> tuple[str, str]:
        return "here", "127.0.0.1"

    def transfer_weights(self, sender: str, method: str, *args: Any) -> Any:
        found = getattr(self.sender, method)(*args)
        if method == "open":
            self.groups.append(found["name"])
        return found

    def optimizer_step(self, *_: object) -> dict[str, float]:
        with torch.no_grad():
            self.model.weight += 1
        return {}


class Trainer(Dispatch):
    def __init__(self, client: InferenceClient, *, recovers: bool = False) -> None:
        self.ranks = Ranks()
        running = lambda: client.pool.healthy  # noqa: E731
        transfer = BroadcastTransfer(self.ranks, 1, running, timeout_s=STUCK_S, recovers=recovers)
        super().__init__(Config(), {POLICY: self.ranks}, transfer)  # type: ignore[dict-item]

    @property
    def weight(self) -> float:
        return self.ranks.model.weight.item()


class Engine(InferenceEngine):
    """Joins and receives as ``VLLMEngine`` does."""

    restartable = True

    def __init__(self, index: int) -> None:
        self.index, self.version, self.weight = index, 0, 0.0
        self.failed, self.fails_in_sync, self.starts = asyncio.Event(), False, asyncio.Event()
        self.starts.set()
        self.groups: list[str] = []
        self._reader = BroadcastReader(CPU)

    async def start(self) -> None:
        await self.starts.wait()

    async def update_weights(self, update: WeightUpdate) -> None:
        if self.fails_in_sync:
            await asyncio.sleep(0.2)
            self.failed.set()
        await self._is_running()
        async with update.on("there") as own:
            received = await asyncio.to_thread(self._receive, own.info)
        self.weight, self.version = received["weight"].item(), update.version

    def _receive(self, info: dict[str, Any]) -> dict[str, torch.Tensor]:
        before = self._reader._group
        received = self._reader.read(info)
        group = self._reader._group
        if group is not None and group is not before:
            self.groups.append(group.rendezvous["name"])
        return received

    async def _is_running(self) -> None:
        if self.failed.is_set():
            raise EngineFailedError("its process is gone")

    async def progress(self) -> Sequence[Any]:
        await self._is_running()
        return []

    async def stats(self) -> EngineStats:
        return EngineStats()

    async def pause(self, mode: str = "keep") -> None: ...

    async def resume(self) -> None: ...

    async def shutdown(self) -> None: ...

    def kill(self) -> None:
        self.failed.set()

    def successor(self) -> Engine:
        another = Engine(self.index)
        if not self.starts.is_set():
            another.starts = self.starts
        return another


class Run:
    """Two engines, a trainer, and the replacement of engines."""

    def __init__(self, engines: int = 2, *, recovers: bool = False) -> None:
        self.client = InferenceClient([Engine(index) for index in range(engines)])  # type: ignore[misc]
        self.trainer = Trainer(self.client, recovers=recovers)
        self.sync = WeightSync(self.trainer, self.client, ())
        self.sync.expects_late_engines = True
        self.supervisor = EngineSupervisor(
            self.client,
            self.sync,
            max_restarts=9,
            heartbeat_s=0.02,
            heartbeat_timeout_s=5,
            limit_s=20,
        )

    @property
    def engines(self) -> list[Engine]:
        return self.client.engines  # type: ignore[return-value]

    async def until(self, *, restarts: int = 0, failures: int = 0) -> None:
        async with asyncio.timeout(10):
            while self.supervisor.restarts < restarts or self.supervisor.failures < failures:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def check(self, version: int) -> None:
        assert [engine.version for engine in self.engines] == [version] * len(self.engines)
        assert [engine.weight for engine in self.engines] == [self.trainer.weight] * len(
            self.engines
        )


@asynccontextmanager
async def running(engines: int = 2, *, recovers: bool = False) -> AsyncIterator[Run]:
    run = Run(engines, recovers=recovers)
    run.supervisor.begin()
    try:
        async with asyncio.timeout(20):
            await run.sync.sync(1)
            run.check(1)
            yield run
    finally:
        await run.supervisor.close()


async def test_a_replacement_engine_joins_the_ranks_alone_and_the_next_sync_has_a_group_of_all() -> (
    None
):
    async with running() as run:
        run.engines[0].failed.set()
        await run.until(restarts=1)
        run.check(1)
        for version in (2, 3):
            await run.trainer.optimizer_step()
            await run.sync.sync(version)
            run.check(version)
        assert len(set(run.trainer.ranks.groups)) == 3, "all, the replacement engine alone, all"
        (alone, own), (_, other) = (engine.groups for engine in run.engines)
        assert alone != own == other


async def test_the_only_engine_is_replaced_without_a_sync() -> None:
    async with running(1) as run:
        run.engines[0].failed.set()
        await run.until(restarts=1)
        run.check(1)


async def test_during_a_sync_a_replacement_engine_waits_for_the_new_version() -> None:
    async with running() as run:
        run.engines[1].starts.clear()
        run.engines[1].failed.set()
        await run.until(failures=1)
        await run.trainer.optimizer_step()
        run.engines[1].starts.set()
        await asyncio.sleep(0.2)
        assert len(run.client.pool.healthy) == 1, (
            "the other engine's weights are not available any more"
        )
        await run.sync.sync(2)  # to the other engine alone
        await run.until(restarts=1)
        run.check(2)
        assert len(run.engines[0].groups) == 2


async def test_an_optimizer_step_waits_until_a_replacement_engine_has_the_weights() -> None:
    async with running() as run, run.sync.between_syncs() as update:
        step = asyncio.create_task(run.trainer.optimizer_step())
        await asyncio.sleep(0.1)
        assert not step.done()
        await Engine(7).update_weights(update)
    await step


async def test_a_failure_in_a_sync_fails_all_members_and_new_ranks_use_replacement_engines() -> (
    None
):
    async with running() as run:
        await run.trainer.optimizer_step()
        first = list(run.engines)
        run.engines[1].fails_in_sync = True
        with pytest.raises(
            EngineFailedError, match="engine 1 has failed in a call in which the others wait"
        ):
            await run.sync.sync(2)
        assert "in which they wait for it" in str(run.trainer.ranks.lost)
        run.trainer = Trainer(
            run.client
        )  # as the controller does; for example from the checkpoint of the first step
        run.sync.restart(run.trainer)
        await asyncio.sleep(0.2)
        assert run.client.pool.healthy == [], "replacement engines wait for weights"
        await run.sync.sync(2)
        await run.until(restarts=2)
        run.check(2)
        assert not {*first} & {*run.engines}
        await run.trainer.optimizer_step()
        await run.sync.sync(3)
        run.check(3)


async def test_ranks_that_a_replacement_engine_cannot_join_are_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broadcast, "SETTLE_S", 0.2)
    async with running() as run:
        with pytest.raises(EngineFailedError):
            async with run.sync.between_syncs():
                raise EngineFailedError("the replacement engine")
        assert "has not met them" in str(run.trainer.ranks.lost)
        with pytest.raises(RuntimeError, match="the workers have been stopped"):
            await run.trainer.optimizer_step()


async def test_with_gloo_a_failure_in_a_sync_fails_no_other_member_and_they_get_the_weights_again() -> (
    None
):
    async with running(3, recovers=True) as run:
        await run.trainer.optimizer_step()
        run.engines[1].fails_in_sync = True
        await run.sync.sync(2)
        assert run.trainer.ranks.lost is None and [
            run.engines[place].version for place in (0, 2)
        ] == [2, 2]
        await run.until(restarts=1)
        run.check(2)
        await run.trainer.optimizer_step()
        await run.sync.sync(3)
        run.check(3)


@pytest.mark.fault
async def test_by_gloo_a_member_that_never_joins_is_not_waited_for_longer_than_the_limit() -> None:
    async with running(recovers=True) as run:
        run.engines[1]._receive = lambda info: {"weight": torch.zeros(1, 1)}  # type: ignore[method-assign]
        run.trainer.transfer._members = None  # type: ignore[attr-defined]
        began = asyncio.get_running_loop().time()
        with pytest.raises(
            TransferInterruptedError, match=r"not all members of the group joined within 2 s|failed"
        ):
            await run.sync.sync(2)
        assert asyncio.get_running_loop().time() - began < 5 * STUCK_S
        assert run.engines[0].version == 1, (
            "an engine that did not receive everything keeps its old weights"
        )
