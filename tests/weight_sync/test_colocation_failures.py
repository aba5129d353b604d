"""Colocated engines fail while they sleep, are awake, and in a sync (in simulation)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import GenerationRequest, SamplingParams
from skyasync.inference.supervisor import EngineSupervisor
from skyasync.weight_sync.colocation import Colocation
from skyasync.weight_sync.sync import WeightSync
from skyasync.weight_sync.transfers.base import WeightTransfer
from skyasync.weight_sync.update import WakePart, WeightUpdate
from tests.chaos.simulated_processes import SYNC_S, Engine
from tests.virtual_time import virtual_time

SILENCE_S = 20.0
policy_is_on_the_devices = False


class Sharing(Engine):
    """Uses memory from its start, except while it sleeps."""

    weights = cache = False

    def successor(self) -> Sharing:
        return Sharing()

    def kill(self) -> None:
        super().kill()
        self.weights = self.cache = False

    def check(self) -> None:
        assert not (policy_is_on_the_devices and (self.weights or self.cache)), (
            "two models are on the device"
        )

    async def start(self) -> None:
        self.weights = self.cache = True
        self.check()
        await super().start()
        self.check()

    async def sleep(self) -> None:
        await self._receive(0.5)
        self.weights = self.cache = False

    async def wake(self, part: WakePart) -> None:
        await self._receive(0.5)
        setattr(self, part, True)
        self.check()

    async def update_weights(self, update: WeightUpdate) -> None:
        assert self.weights
        await super().update_weights(update)


class Policy(WeightTransfer):
    proves_content = True

    @property
    def transfer(self) -> WeightTransfer:
        return self

    def __init__(self, engines: InferenceClient) -> None:
        self.engines, self.trained = engines, 0

    async def start(self, total_steps: int = 0) -> None:
        await self.onload()

    async def onload(self) -> None:
        global policy_is_on_the_devices
        await asyncio.sleep(1.0)
        policy_is_on_the_devices = True
        for engine in self.engines.engines:
            if not engine.process.killed.is_set():  # type: ignore[attr-defined]
                engine.check()  # type: ignore[attr-defined]

    async def offload(self) -> None:
        global policy_is_on_the_devices
        policy_is_on_the_devices = False

    async def publish(self, version: int) -> WeightUpdate:
        assert policy_is_on_the_devices
        return WeightUpdate(version, "shared_memory", {"sound": True, "weights": ""})

    async def release(self, update: WeightUpdate) -> None: ...

    async def for_late_engine(self, version: int) -> WeightUpdate:
        return WeightUpdate(version, "shared_memory", {"sound": True, "weights": ""})

    async def score(self, sequences: Any) -> list[list[float]]:
        return [[-0.5] * (len(each) - 1) for each in sequences]


class Run:
    def __init__(self, engines: int) -> None:
        self.client = InferenceClient([Sharing() for _ in range(engines)])
        policy: Any = Policy(self.client)
        self.turns = Colocation(policy, self.client)
        self.sync = WeightSync(self.turns.source, self.turns.destination, ())
        self.sync.expects_late_engines = True
        self.supervisor = EngineSupervisor(
            self.client, self.sync, max_restarts=9, heartbeat_s=1.0, heartbeat_timeout_s=SILENCE_S, limit_s=600,
            colocation=self.turns,
        )  # fmt: skip
        self.steps = self.asked = 0

    async def begin(self) -> None:
        await self.turns.start()
        await self.sync.sync(0)
        self.supervisor.begin()

    async def generate(self) -> set[int]:
        """Eight answers; the versions of their tokens."""
        sampling = SamplingParams(max_tokens=6)
        requests = [GenerationRequest(f"{self.asked + i}", [7 + 8 * i], sampling) for i in range(8)]
        self.asked += 8
        answers = await asyncio.gather(*map(self.client.generate, requests))
        assert all(len(answer.token_ids) for answer in answers)
        return {int(version) for answer in answers for version in answer.versions}

    async def train(self) -> None:
        await self.turns.give_devices_to_policy()
        await asyncio.sleep(5.0)

    async def hand_over(self) -> None:
        self.steps += 1
        await self.sync.sync(self.steps)

    async def step(self) -> None:
        assert await self.generate() == {self.steps}
        await self.train()
        await self.hand_over()


def fail(engine: Any, how: str) -> None:
    engine.process.kill() if how == "kill" else engine.process.runs.clear()


@pytest.fixture(autouse=True)
def free_devices() -> Iterator[None]:
    global policy_is_on_the_devices
    policy_is_on_the_devices = False
    yield


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("moment", ["awake", "falling asleep", "asleep", "waking", "sync"])
def test_a_failed_engine_is_replaced_while_the_engines_have_the_devices(
    moment: str, how: str, engines: int
) -> None:
    after_s = {
        "awake": 0.7,
        "falling asleep": 0.2,
        "asleep": 2.0,
        "waking": 0.2,
        "sync": 1.0 + SYNC_S / 2,
    }[moment]

    @virtual_time
    async def scenario() -> None:
        run = Run(engines)
        await run.begin()
        await run.step()
        loop, victim = asyncio.get_running_loop(), run.client.engines[-1]
        parts = {"awake": run.generate, "falling asleep": run.train, "asleep": run.train}
        for part in (run.generate, run.train, run.hand_over):
            if part == parts.get(moment, run.hand_over):
                loop.call_later(after_s, fail, victim, how)
            await part()
        for _ in range(3):
            await run.step()
        assert run.client.engines[-1] is not victim
        assert (run.supervisor.failures, run.supervisor.restarts) == (1, 1)
        assert run.client.pool.healthy == list(range(engines))
        assert [engine.version for engine in run.client.engines] == [run.steps] * engines  # type: ignore[attr-defined]
        assert loop.time() < 400
        await run.supervisor.close()
        await run.client.shutdown()

    scenario()


@pytest.mark.parametrize("engine_too", [False, True])
@pytest.mark.parametrize("moment", ["training", "publishing", "generating"])
def test_other_workers_load_the_policy_while_the_engines_sleep(
    moment: str, engine_too: bool
) -> None:
    """The failure of the policy's processes is detected at this moment; an engine fails while others start."""

    @virtual_time
    async def scenario() -> None:
        global policy_is_on_the_devices
        run = Run(engines=2)
        await run.begin()
        await run.step()
        await run.generate()
        if moment != "generating":
            await run.turns.give_devices_to_policy()
        if moment == "publishing":
            await run.turns.source.transfer.publish(2)
        assert run.turns.engines_are_awake == (moment == "generating")

        policy_is_on_the_devices = False  # its memory has been freed
        successor: Any = Policy(run.client)
        await run.turns.policy_is_lost()
        if engine_too:
            fail(run.client.engines[0], "kill")
        await successor.start()
        run.turns.restart(successor)
        run.sync.restart(run.turns.source)
        await run.sync.sync(1)
        for _ in range(3):
            await run.step()
        assert run.client.pool.healthy == [0, 1]
        assert [engine.version for engine in run.client.engines] == [run.steps] * 2  # type: ignore[attr-defined]
        await run.supervisor.close()
        await run.client.shutdown()

    scenario()
