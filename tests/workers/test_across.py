"""Receivers of weights on a node of Ray, when rank 0 says that it is on another; what they hold, and their deaths."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file
from skyasync.workers.across import Across

from skyasync.engines.protocol import EngineDiedError
from skyasync.weight_sync import carry
from skyasync.weight_sync.transfers.file import remove_weights, write_weights
from skyasync.weight_sync.transfers.shared_memory import BufferReader, BufferWriter
from skyasync.weight_sync.update import WeightSyncError, WeightUpdate
from tests.end_to_end.leftovers import lives, none_soon

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_session")]

Weights = dict[str, torch.Tensor]


def many(seed: int) -> Weights:
    draw = torch.Generator().manual_seed(seed)
    return {"large": torch.randn(700, 500, generator=draw), "small": torch.randn(33, generator=draw).bfloat16()}


class Rank0:
    """In this process, and in its own words on a node of its own."""

    def __init__(self) -> None:
        self.lender, self.carried = BufferWriter(), 0
        self.damage = False

    async def call_first(self, method: str, *args: Any) -> Any:
        if method == "node":
            return "rank 0's", "127.0.0.1"
        self.carried += 1
        info, *rest = args
        if self.damage:
            info = {**info, "digests": {**info["digests"], "small": "0" * 16}}
        return await asyncio.to_thread(carry.carry, info, *rest)

    def update(self, seed: int) -> WeightUpdate:
        weights = many(seed)
        kinds = {name: (t.dtype, tuple(t.shape)) for name, t in weights.items()}
        return WeightUpdate(seed, "shared_memory", self.lender.write(kinds, weights.items()))


@asynccontextmanager
async def across(monkeypatch: pytest.MonkeyPatch, silence_s: float = 30.0) -> AsyncIterator[tuple[Rank0, Across, str]]:
    monkeypatch.setattr(carry, "PIECE", 1 << 17)  # 11 of them
    here = ray.get_runtime_context().get_node_id()
    both = Across(rank_0 := Rank0(), lambda: [here, here], computed_on=True, silence_s=silence_s)
    try:
        yield rank_0, both, here
    finally:
        both.close()


async def handed_over(both: Across, rank_0: Rank0, seed: int) -> WeightUpdate:
    update = await both.publish(rank_0.update(seed))
    await both.settle(update, kept=True)
    return replace(update, info={**update.info, "late": True})


async def read(update: WeightUpdate, node: str, borrower: BufferReader | None = None) -> Weights:
    return (borrower or BufferReader()).read((await update.on(node)).info)


def same(found: Weights, seed: int) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in many(seed).items())


async def receivers_pid(both: Across, node: str) -> int:
    found: int = await both._receivers[node].pid.remote()
    return found


async def test_engines_of_another_node_are_told_of_its_receivers_memory_and_those_of_rank_0s_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with across(monkeypatch) as (rank_0, both, there):
        engine, before = BufferReader(), dict[str, torch.Tensor]()
        for seed in range(3):
            update = await both.publish(rank_0.update(seed))
            assert not before or same(before, seed - 1), "what they compute on is not written to"
            told = [await update.on(there) for _ in range(2)]
            assert told[0].info["path"].startswith(f"/proc/{await receivers_pid(both, there)}/fd/")
            assert told[0].info == told[1].info and told[0].places is None and rank_0.carried == seed + 1
            assert (await update.on("rank 0's")).info == update.info
            assert same(before := engine.read(told[0].info), seed)
            nbytes = sum(tensor.nbytes for tensor in many(seed).values())
            assert nbytes <= update.metrics["sync/bytes_to_nodes"] < nbytes + 128, "once, for two engines"
            await both.settle(update)


async def test_a_receiver_that_dies_has_a_successor_in_the_next_sync_and_for_who_comes_late(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with across(monkeypatch) as (rank_0, both, there):
        kept = await handed_over(both, rank_0, 0)
        held = await read(kept, there, engine := BufferReader())
        assert rank_0.carried == 1, "one that comes late finds them there"
        os.kill(first := await receivers_pid(both, there), signal.SIGKILL)
        late = await kept.on(there)
        assert late.info["late"] and same(BufferReader().read(late.info), 0) and rank_0.carried == 2
        os.kill(second := await receivers_pid(both, there), signal.SIGKILL)
        assert first != second
        update = await both.publish(rank_0.update(1))
        assert "is lost" in caplog.text and same(held, 0), "their memory outlives it"
        assert same(await read(update, there, engine), 1)
        await both.settle(update)


async def test_one_that_is_silent_counts_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    async with across(monkeypatch) as (rank_0, both, there):
        await handed_over(both, rank_0, 0)
        stopped = await receivers_pid(both, there)
        both._silence_s = 0.5
        os.kill(stopped, signal.SIGSTOP)
        on_the_way = await asyncio.to_thread(carry.carry, rank_0.update(1).info, both._receivers, 0.5)
        assert on_the_way.deaths == {there: "TimeoutError: it gave no answer within 0.5 s"}
        monkeypatch.setattr("skyasync.workers.across.TRIES", 1)
        update = await both.publish(rank_0.update(1))
        with pytest.raises(EngineDiedError, match=r"^weights do not reach .* gave no answer within 0\.5 s$"):
            await update.on(there)
        assert (await update.on("rank 0's")).info == update.info, "the others have theirs"
        assert none_soon(lambda: [f"receiver {stopped}"] if lives(stopped) else []) == []


async def test_a_node_that_is_gone_fails_its_own_engines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with across(monkeypatch) as (rank_0, both, there):
        gone = "f" * (len(there) - 1) + "e"  # no node of this cluster
        both._nodes = lambda: [gone, there]
        update = await both.publish(rank_0.update(0))
        with pytest.raises(EngineDiedError, match="weights do not reach the engines of node ffffffff: "):
            await update.on(gone)
        assert same(await read(update, there), 0)


async def test_other_weights_than_were_sent_are_an_error_and_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    async with across(monkeypatch) as (rank_0, both, _):
        rank_0.damage = True
        with pytest.raises(WeightSyncError, match=r"carried to node .* other weights than the trainer sent in small$"):
            await both.publish(rank_0.update(0))


async def test_a_file_is_carried_as_it_is_and_gone_behind_its_hand_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async with across(monkeypatch) as (_, both, there):
        path = write_weights(many(0))
        try:
            update = await both.publish(WeightUpdate(1, "shared_memory", {"path": path}))
            copy = (await update.on(there)).info["path"]
            await both.settle(update, kept=True)
            assert load_file(copy).keys() == many(0).keys() and same(load_file(copy), 0), "for one that comes late"
            await both.settle(update)
            with pytest.raises(FileNotFoundError):
                load_file(copy)
            late = await both.publish(WeightUpdate(1, "shared_memory", {"path": path}), living=False)
            assert late.metrics == {} and same(load_file((await late.on(there)).info["path"]), 0)
        finally:
            remove_weights(path)


async def test_nobody_waits_for_a_node_on_which_no_engine_lives_any_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with across(monkeypatch) as (rank_0, both, there):
        await handed_over(both, rank_0, 0)
        os.kill(await receivers_pid(both, there), signal.SIGSTOP)
        asyncio.get_running_loop().call_later(0.2, lambda: setattr(both, "_nodes", list))
        began = asyncio.get_running_loop().time()
        await both.publish(rank_0.update(1))
        assert asyncio.get_running_loop().time() - began < 10.0 and "no engine lives there any more" in caplog.text
