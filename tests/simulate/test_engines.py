"""Simulated engines: every token once, with its version, in the time that the costs determine."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyasync.simulate.clock import run_virtual
from skyasync.simulate.engines import DecodeCosts, VirtualClient, VirtualEngine


async def finished_at(client: VirtualClient, lengths: list[int]) -> list[float]:
    loop, ends = asyncio.get_running_loop(), [0.0] * len(lengths)
    for i, sequence in enumerate([client.submit(0, n) for n in lengths]):
        sequence.done.add_done_callback(lambda _, i=i: ends.__setitem__(i, loop.time()))
    await asyncio.sleep(1000)
    return ends


def client(slots: int, engines: int = 1, **costs: float) -> VirtualClient:
    return VirtualClient(
        [
            VirtualEngine(DecodeCosts(slots, costs.pop("base_s", 1.0), **costs))
            for _ in range(engines)
        ]
    )


def test_sequences_share_slots_in_order_of_arrival() -> None:
    async def run() -> list[float]:
        return await finished_at(client(slots=2), [5, 3, 4, 1])

    assert run_virtual(run()) == pytest.approx([5, 3, 7, 6])


def test_a_step_takes_longer_with_more_sequences() -> None:
    async def run() -> list[float]:
        return await finished_at(client(slots=8, base_s=1.0, per_sequence_s=0.5), [2, 4])

    assert run_virtual(run()) == pytest.approx([2 * 2.0, 2 * 2.0 + 2 * 1.5])


def test_the_least_loaded_engine_gets_the_next_sequence() -> None:
    async def run() -> list[float]:
        return await finished_at(client(slots=1, engines=3), [9, 2, 2, 1, 1])

    assert run_virtual(run()) == pytest.approx([9, 2, 2, 10, 3])


@pytest.mark.parametrize("prefill", [0.0, 0.5])
def test_an_interrupted_request_continues_after_the_prefill_of_all_its_tokens(
    prefill: float,
) -> None:
    async def run() -> tuple[Counter[int], float]:
        engines = client(slots=1, prefill=prefill)
        sequence = engines.submit(2, 10)
        await asyncio.sleep(2 * prefill + 4.3)
        await engines.cut()
        await asyncio.sleep(100)
        engines.set_version(1)
        await engines.resume()
        await sequence.done
        return sequence.tokens, asyncio.get_running_loop().time()

    tokens, ended = run_virtual(run())
    assert tokens == {0: 4, 1: 6}
    assert ended == pytest.approx(2 * prefill + 4.3 + 100 + (2 + 4) * prefill + 6)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    slots=st.integers(1, 4),
    events=st.lists(st.tuples(st.floats(0.1, 7.0), st.sampled_from(["keep", "cut"])), max_size=6),
)
def test_no_token_is_lost_or_made_twice_by_swaps(
    lengths: list[int], slots: int, events: list[tuple[float, str]]
) -> None:
    async def run() -> list[Counter[int]]:
        engines = client(slots, engines=2, per_sequence_s=0.1)
        sequences = [engines.submit(1, n) for n in lengths]
        for version, (seconds, mode) in enumerate(events, start=1):
            await asyncio.sleep(seconds)
            await (engines.cut() if mode == "cut" else engines.pause())
            await asyncio.sleep(0.5)
            engines.set_version(version)
            await engines.resume()
        for sequence in sequences:
            await sequence.done
        return [sequence.tokens for sequence in sequences]

    tokens = run_virtual(run())
    assert [counter.total() for counter in tokens] == lengths
    assert all(0 <= version <= len(events) for counter in tokens for version in counter)
