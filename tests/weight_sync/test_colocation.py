"""Which side uses the shared devices at which time: fake policy and fake engines, every call in its order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyasync.weight_sync.colocation import Colocation
from skyasync.weight_sync.sync import WeightSync
from skyasync.weight_sync.transfers.base import WeightTransfer
from skyasync.weight_sync.update import WeightUpdate

PROBE = [[1, 2, 3], [4, 5]]


class Device:
    """Policy and engines with their memory; raises an error if both are there when only one may be."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.policy = self.engine_weights = self.cache = False
        self.trained = self.loaded = 0
        self.released: list[int] = []

    def _note(self, call: str) -> None:
        self.calls.append(call)
        assert not (self.policy and self.cache), f"{call}: the policy and a cache fill the device"
        assert not (self.policy and self.engine_weights), f"{call}: two models are on the device"


class Policy(Device, WeightTransfer):
    proves_content = True

    @property
    def transfer(self) -> WeightTransfer:
        return self

    async def start(self, total_steps: int = 0) -> None:
        self.policy = True
        self._note(f"load policy ({total_steps} steps)")

    async def offload(self) -> None:
        self.policy = False
        self._note("offload")

    async def onload(self) -> None:
        assert not self.policy
        self.policy = True
        self._note("onload")

    async def publish(self, version: int) -> WeightUpdate:
        assert self.policy, "sharded weights are gathered on the devices"
        self._note("publish")
        return WeightUpdate(version, "shared_memory", {"trained": self.trained})

    async def send(self, update: WeightUpdate) -> None:
        self._note("send")

    async def release(self, update: WeightUpdate) -> None:
        self.released.append(update.version)

    async def for_late_engine(self, version: int) -> WeightUpdate:
        raise NotImplementedError

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        assert self.policy
        self._note("score")
        return [[-1.0 - self.trained] * (len(s) - 1) for s in sequences]


class Engines:
    proves_weights = True

    def __init__(self, device: Policy) -> None:
        self.device = device

    async def start(self) -> None:
        self.device.engine_weights = self.device.cache = True
        self.device._note("load engines")

    async def sleep(self) -> None:
        self.device.engine_weights = self.device.cache = False
        self.device._note("sleep")

    async def wake(self, part: str) -> None:
        setattr(self.device, {"weights": "engine_weights", "cache": "cache"}[part], True)
        self.device._note(f"wake {part}")

    async def update_weights(self, update: WeightUpdate) -> None:
        assert self.device.engine_weights
        assert not self.device.cache
        self.device.loaded = update.info["trained"]
        self.device._note("update")

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        assert self.device.cache
        return [[[-1.0 - self.device.loaded] * (len(s) - 1) for s in sequences]]


def made() -> tuple[Policy, Colocation, WeightSync]:
    device = Policy()
    turns = Colocation(device, Engines(device), PROBE)  # type: ignore[arg-type]
    return device, turns, WeightSync(turns.source, turns.destination, PROBE, 1e-6)


async def test_loading_and_a_step_take_the_devices_in_turn() -> None:
    device, turns, sync = made()
    await turns.start(7)
    assert device.calls == ["load policy (7 steps)", "score", "offload", "load engines"]
    assert turns.engines_are_awake
    device.calls.clear()
    await turns.give_devices_to_policy()
    assert not turns.engines_are_awake
    device.trained += 1
    await sync.sync(1)
    await sync.verify(1)
    away = ["publish", "score", "offload"]
    assert [c for c in device.calls if c != "send"] == [
        "sleep", "onload", *away, "wake weights", "update", "wake cache",
    ]  # fmt: skip
    assert turns.engines_are_awake
    assert device.released == [1]


async def test_a_verification_finds_engines_that_have_other_weights() -> None:
    device, turns, sync = made()
    await turns.start()
    await turns.give_devices_to_policy()
    device.trained += 1
    await sync.sync(1)
    device.loaded -= 1
    with pytest.raises(RuntimeError, match="differ by 1 in log-probability"):
        await sync.verify(1)


async def test_what_is_no_probe_is_scored_by_a_policy_that_is_there() -> None:
    device, turns, _ = made()
    await turns.start()
    device.calls.clear()
    device.engine_weights = device.cache = False  # there is enough memory
    assert await turns.source.score([[7, 8]]) == [[-1.0]]
    assert device.calls == ["onload", "score", "offload"]
    await turns.give_devices_to_policy()
    device.calls.clear()
    assert await turns.source.score([[7, 8]]) == [[-1.0]]
    assert device.calls == ["score"]


@given(steps=st.lists(st.sampled_from(["train", "sync", "verify", "way"]), max_size=12))
def test_no_order_of_calls_puts_both_on_the_devices(steps: list[str]) -> None:
    """The fakes raise if two models, or a model and a cache, share the devices; engines verify their weights."""
    import asyncio

    async def run() -> None:
        device, turns, sync = made()
        await turns.start()
        version = 0
        for step in steps:
            if step == "train":
                await turns.give_devices_to_policy()
                device.trained += 1
            elif step == "way":
                await turns.give_devices_to_policy()
            elif step == "sync":
                version += 1
                await sync.sync(version)
            elif turns.engines_are_awake:
                await sync.verify(version)
            calls: Any = device.calls
            assert calls.count("sleep") - calls.count("wake cache") == (not turns.engines_are_awake)

    asyncio.run(run())
