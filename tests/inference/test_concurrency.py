"""Adaptive concurrency: the limit alone, and the real client in front of engines in simulation."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from math import inf
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from skyasync.inference.backends.transformers.engine import TransformersEngine
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import EngineConfig, EngineStats
from skyasync.inference.router import FULL, SETTLED, ConcurrencyLimit
from skyasync.simulate.clock import run_virtual
from tests.inference.test_router import Engine, request
from tests.inference.tiny_llama import save_tiny_llama

REPORTS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=40)


def limits(*reports: tuple[int, int], cache: tuple[int | None, int] = (None, 0)) -> list[float]:
    """After reports of running and waiting requests, which are all that the engine was sent."""
    rule = ConcurrencyLimit()
    used, tokens = cache
    stats = [
        EngineStats(running=r, waiting=w, cache_used=used, cache_tokens=tokens) for r, w in reports
    ]
    return [rule.observe(each, each.running + each.waiting) for each in stats]


def test_a_queue_that_stays_sets_the_limit_a_little_above_what_runs() -> None:
    assert limits((64, 900), (64, 900), (64, 900)) == [inf, inf, 72]
    assert limits((1, 3), (1, 2), (1, 1))[-1] == 2


def test_requests_that_have_just_arrived_set_no_limit() -> None:
    assert set(limits((0, 900), (200, 700), (500, 400), (900, 0))) == {inf}
    assert set(limits((64, 9), (64, 9), (64, 0), (64, 9), (64, 9))) == {inf}


def test_a_limit_grows_while_it_leaves_the_engine_without_a_queue_unless_its_cache_is_full() -> (
    None
):
    reports = [(64, 900)] * SETTLED + [(72, 0), (144, 0), (100, 0)]
    assert limits(*reports)[-3:] == [144, 288, 288], "100 are fewer than the limit"
    assert limits(*reports, cache=(int(FULL * 1000), 1000))[-3:] == [72, 72, 72]


def test_a_limit_follows_an_engine_that_has_room_for_fewer() -> None:
    assert limits(*[(64, 9)] * SETTLED, *[(32, 40)] * SETTLED)[-1] == 36


@given(REPORTS)
@example([(0, 1), (1, 1), (0, 1), (5, 0)])
def test_a_limit_is_above_what_runs(reports: list[tuple[int, int]]) -> None:
    for (running, waiting), limit in zip(reports, limits(*reports), strict=True):
        assert limit > 1
        if waiting == 0 and running < limit < inf:
            continue
        assert limit >= running or waiting, "an engine that has no queue may have more"


class Reporting(Engine):
    """Reports its queue, as engines do."""

    failed = False

    async def stats(self) -> EngineStats:
        return self._engine.stats()


async def busy(
    speeds: Sequence[float], adaptive: bool, waves: int = 5, wave: int = 400
) -> tuple[float, float]:
    """Seconds for waves of requests, each of which starts when half of the one before is answered, and how many of
    them waited in engines on average."""
    draw = random.Random(3)
    lengths = {
        f"{w}-{i}": min(1 + int(draw.expovariate(1 / 60)), 600)
        for w in range(waves)
        for i in range(wave)
    }
    engines = [Reporting(speed, lengths) for speed in speeds]
    client = InferenceClient(engines, 1e9, adaptive=adaptive)
    await client.start()
    waiting: list[int] = []

    async def supervise() -> None:
        while True:
            await asyncio.sleep(0.5)
            for index in range(len(engines)):
                await client.poll(index)
            waiting.append(sum(engine._engine.stats().waiting for engine in engines))

    supervisor = asyncio.create_task(supervise())
    tasks: list[asyncio.Task[object]] = []
    for w in range(waves):
        own = [
            asyncio.create_task(client.generate(request(f"{w}-{i}", 10, 600))) for i in range(wave)
        ]
        tasks += own
        while sum(task.done() for task in own) < wave / 2:
            await asyncio.wait(
                [task for task in own if not task.done()], return_when=asyncio.FIRST_COMPLETED
            )
    await asyncio.gather(*tasks)
    took = asyncio.get_running_loop().time()
    supervisor.cancel()
    await client.shutdown()
    return took, sum(waiting) / len(waiting)


@pytest.mark.slow
@pytest.mark.parametrize(
    "speeds",
    [
        pytest.param([1.0], marks=pytest.mark.matrix),
        pytest.param([1.0, 1.0], marks=pytest.mark.matrix),
        [1.0, 3.0],
    ],
)
def test_engines_have_no_queue_and_are_not_slower(speeds: list[float]) -> None:
    took, queue = run_virtual(busy(speeds, adaptive=True))
    before, queue_before = run_virtual(busy(speeds, adaptive=False))
    assert took <= 1.01 * before
    assert queue < 0.25 * queue_before


@pytest.mark.slow
def test_an_engine_that_becomes_slow_keeps_few_requests_from_the_others() -> None:
    """What waits in it has to wait for it; what waits in the client goes to the others."""

    async def run(adaptive: bool) -> float:
        draw = random.Random(3)
        lengths = {str(i): draw.randint(20, 80) for i in range(1000)}
        engines = [Reporting(1.0, lengths), Reporting(1.0, lengths)]
        client = InferenceClient(engines, 1e9, adaptive=adaptive)
        await client.start()
        tasks = [asyncio.create_task(client.generate(request(str(i), 10, 80))) for i in range(300)]

        async def supervise() -> None:
            while True:
                await asyncio.sleep(0.5)
                for index in range(2):
                    await client.poll(index)

        supervisor = asyncio.create_task(supervise())
        await asyncio.sleep(5.0)
        tasks += [
            asyncio.create_task(client.generate(request(str(i), 10, 80))) for i in range(300, 1000)
        ]
        await asyncio.sleep(5.0)
        engines[0]._engine.costs.base_s *= 10
        engines[0]._engine.costs.per_sequence_s *= 10
        await asyncio.gather(*tasks)
        supervisor.cancel()
        took = asyncio.get_running_loop().time()
        await client.shutdown()
        return took

    assert run_virtual(run(adaptive=True)) < 0.8 * run_virtual(run(adaptive=False))


@pytest.mark.slow
async def test_a_real_engine_gets_what_it_computes_at_once_and_answers_all(tmp_path: Path) -> None:
    path = save_tiny_llama(tmp_path, tied=True)
    engine = TransformersEngine(EngineConfig(path, max_model_len=64, max_num_seqs=4, threads=1))
    client = InferenceClient([engine], 60.0, adaptive=True)
    await client.start()
    tasks = [asyncio.create_task(client.generate(request(str(i), 4, 50))) for i in range(12)]
    while not client.pool.router.limit[0] < inf:
        await client.poll(0)
        await asyncio.sleep(0.001)
    tasks += [asyncio.create_task(client.generate(request(str(i), 4, 50))) for i in range(12, 36)]
    await asyncio.sleep(0)
    assert await client.waiting() >= 20 and not all(task.done() for task in tasks)
    waiting: list[int] = []
    while len(client._queue) > 4:
        await client.poll(0)
        if client.pool.router.in_flight[0] <= 5:
            waiting.append((await engine.stats()).waiting)
        await asyncio.sleep(0.001)
    answers = await asyncio.gather(*tasks)
    assert (
        sum(waiting) < 2 * len(waiting)
        and len(answers) == 36
        and all(len(each.token_ids) for each in answers)
    )
    await client.shutdown()
