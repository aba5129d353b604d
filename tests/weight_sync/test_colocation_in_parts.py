"""Engines read weights in parts from the policy's devices: who uses them when, and the state after a failure."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from skyasync.weight_sync.colocation import Colocation
from skyasync.weight_sync.sync import WeightSync
from skyasync.weight_sync.update import WeightsMovedError, WeightUpdate
from tests.weight_sync.test_colocation import PROBE, Device, Engines, Policy

PARTS = 3


class InParts(Policy):
    fails_at = PARTS  # none of them
    proves_content = False

    def _note(self, call: str) -> None:
        self.calls.append(call)
        assert not (self.policy and self.cache), f"{call}: the policy and a cache fill the device"

    async def publish(self, version: int) -> WeightUpdate:
        self._note("publish")
        return WeightUpdate(version, "cuda_ipc", {"in_parts": True})

    async def parts(self, update: WeightUpdate) -> AsyncGenerator[WeightUpdate]:
        try:
            for part in range(PARTS):
                if part == self.fails_at:
                    raise RuntimeError("a rank has failed")
                assert self.policy, "sharded weights are gathered on the devices"
                self._note(f"pack {part}")
                yield replace(
                    update, info={"part": part, "last": part == PARTS - 1, "trained": self.trained}
                )
        finally:
            self._note("free")

    async def for_late_engine(self, version: int) -> WeightUpdate:
        assert not self.policy, "it is read in host memory"
        self._note("write")
        return WeightUpdate(version, "shared_memory", {"trained": self.trained})


class Readers(Engines):
    async def update_weights(self, update: WeightUpdate) -> None:
        device: Device = self.device
        assert device.engine_weights and not device.cache
        if "broken_off" in update.info:
            device._note("break off")
            return
        device._note(f"load {update.info['part']}")
        device.loaded = update.info["trained"] if update.info["last"] else None


def made() -> tuple[InParts, Colocation, WeightSync]:
    device = InParts()
    turns = Colocation(device, Readers(device), PROBE)  # type: ignore[arg-type]
    sync = WeightSync(turns.source, turns.destination, PROBE, 1e-6, interval=100)
    sync.expects_late_engines = True
    return device, turns, sync


async def test_the_policy_stays_for_all_parts_and_goes_before_the_caches_wake() -> None:
    device, turns, sync = made()
    await turns.start()
    for version in (1, 2, 3):
        await turns.give_devices_to_policy()
        device.trained += 1
        device.calls.clear()
        await sync.sync(version)
        parts = [call for i in range(PARTS) for call in (f"pack {i}", f"load {i}")]
        ways = [call for call in device.calls if call != "send"]
        assert ways == ["publish", "wake weights", *parts, "free", "score", "offload", "wake cache"]
        assert turns.engines_are_awake
        assert await sync.verify(version), "no digests: the verification prompts follow every sync"


@pytest.mark.parametrize("part", range(PARTS))
async def test_if_the_policy_fails_between_parts_the_engines_sleep_and_the_next_sync_sends_all(
    part: int,
) -> None:
    device, turns, sync = made()
    await turns.start()
    await turns.give_devices_to_policy()
    device.fails_at = part
    device.calls.clear()
    with pytest.raises(RuntimeError, match="a rank has failed"):
        await sync.sync(1)
    assert device.calls[-3:] == ["free", "break off", "sleep"]
    assert not turns.engines_are_awake

    await turns.policy_is_lost()
    device.fails_at, device.policy = PARTS, True
    turns.restart(device)
    device.trained += 1
    await sync.sync(1)
    assert device.loaded == device.trained
    await sync.verify(1)


async def test_an_engine_that_comes_late_is_given_weights_while_the_policy_is_in_host_memory() -> (
    None
):
    device, turns, sync = made()
    await turns.start()
    await turns.give_devices_to_policy()
    await sync.sync(1)
    async with sync.between_syncs() as update:
        assert (update.backend, update.info) == ("shared_memory", {"trained": device.trained})
    await turns.give_devices_to_policy()
    source: Any = turns.source
    with pytest.raises(WeightsMovedError, match="may be training"):
        await source.transfer.for_late_engine(1)
