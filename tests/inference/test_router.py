"""Routing: the pure rules, and the real client with simulated engines of different speeds."""

from __future__ import annotations

import asyncio
import random
import time
import timeit
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyasync.inference.client import InferenceClient
from skyasync.inference.inflight import InflightGroup, InflightRequest, InflightTable
from skyasync.inference.interface import (
    EngineStats,
    GenerationOutput,
    GenerationRequest,
    InferenceEngine,
    SamplingParams,
)
from skyasync.inference.router import CACHED, MIN_ANSWERS, Charge, Router, Throughput, relative
from skyasync.simulate import engines as virtual
from skyasync.simulate.clock import run_virtual

pytestmark = pytest.mark.slow


def request(
    name: str, prompt: int = 4, most: int = 16, session: str | None = None
) -> GenerationRequest:
    return GenerationRequest(
        name, np.ones(prompt, np.int32), SamplingParams(max_tokens=most), session
    )


def answer(tokens: int, reason: str = "stop") -> GenerationOutput:
    row = [0] * tokens
    return GenerationOutput("r", row, [0.0] * tokens, row, reason)  # type: ignore[arg-type]


def set_capacity(routes: Router, capacity: Sequence[int]) -> None:
    for index, tokens in enumerate(capacity[: len(routes.capacity)]):
        routes.capacity[index] = tokens or np.inf


EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("ask"),
            st.integers(1, 300),
            st.integers(1, 900),
            st.sampled_from([None, "a", "b", "c"]),
        ),
        st.tuples(st.just("end"), st.integers(0, 99), st.integers(0, 900), st.none()),
        st.tuples(st.just("die"), st.integers(0, 99), st.just(0), st.none()),
        st.tuples(st.just("renew"), st.integers(0, 99), st.just(0), st.none()),
        st.tuples(st.just("see"), st.integers(0, 99), st.integers(0, 900), st.none()),
    ),
    max_size=80,
)


@given(EVENTS, st.integers(1, 4), st.lists(st.integers(0, 2000), min_size=4, max_size=4))
def test_load_is_released_and_failed_engines_get_no_requests(
    events: list, count: int, capacity: list[int]
) -> None:
    routes, there = Router(count), list[Charge]()
    set_capacity(routes, capacity)
    began: dict[str, int] = {}
    for now, (kind, first, second, session) in enumerate(events):
        if kind == "ask":
            charge = routes.choose(request("r", first, second, session), now)
            if charge is None:
                assert all(
                    routes.in_flight[i] and np.isfinite(routes.capacity[i])
                    for i in range(count)
                    if routes.healthy[i]
                ), "no request waits without a reason"
                continue
            there.append(charge)
            assert routes.healthy[charge.engine]
            if session:
                assert began.setdefault(session, charge.engine) == charge.engine
        elif kind == "end" and there:
            routes.ended(there.pop(first % len(there)), answer(second) if second else None, now)
        elif kind == "die":
            routes.healthy[first % count] = False
            began = {name: engine for name, engine in began.items() if engine != first % count}
        elif kind == "renew":
            routes.renew(first % count)
        elif kind == "see":
            routes.reported(first % count, EngineStats(waiting=second % 7, cache_used=10 * first))
        for index in range(count):
            held = [charge.tokens for charge in there if charge.engine == index]
            assert routes.in_flight[index] == len(held)
            assert routes.outstanding[index] == pytest.approx(sum(held))
            assert routes.cache_tokens[index] == pytest.approx(
                sum(c.cache_tokens for c in there if c.engine == index)
            )


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), min_size=2, max_size=60))
def test_engines_that_are_alike_differ_by_one_request_at_most(sizes: list[tuple[int, int]]) -> None:
    routes = Router(3)
    for prompt, most in sizes:
        routes.choose(request("r", prompt, most))
    largest = max((1 + CACHED) * prompt + most for prompt, most in sizes)
    outstanding = routes.outstanding.tolist()
    assert max(outstanding) - min(outstanding) <= largest


def test_an_engine_with_a_full_cache_is_skipped_while_another_has_free_space() -> None:
    routes = Router(2)
    set_capacity(routes, [100, 0])
    chosen = [routes.choose(request(str(i), 10, 30)) for i in range(7)]
    assert [charge.engine for charge in chosen if charge] == [0, 1, 0, 1, 1, 1, 1]


@given(st.lists(st.tuples(st.integers(1, 200), st.booleans()), max_size=60), st.integers(1, 3))
def test_a_full_engine_gets_nothing_unless_it_is_idle(
    sizes: list[tuple[int, bool]], count: int
) -> None:
    routes, there = Router(count), list[Charge]()
    set_capacity(routes, [300] * count)
    for number, (prompt, ends) in enumerate(sizes):
        before = routes.cache_tokens.tolist()
        charge = routes.choose(
            GenerationRequest("r", np.full(prompt, number, np.int32), SamplingParams(max_tokens=9))
        )
        if charge is None:
            assert all(held + prompt > 300 for held in before)
        else:
            assert not before[charge.engine] or before[charge.engine] + charge.cache_tokens <= 300
            there.append(charge)
        if ends and there:
            routes.ended(there.pop(0))


def test_what_an_engine_says_of_its_cache_counts() -> None:
    routes = Router(1)
    set_capacity(routes, [100])
    first = routes.choose(request("a", 60))
    assert first and routes.choose(request("b", 50, 9)) is None
    routes.reported(0, EngineStats(cache_used=10))
    second = routes.choose(request("b", 50, 9))
    assert second
    routes.reported(0, EngineStats(cache_used=95, waiting=1))
    assert routes.choose(request("c", 10)) is None
    routes.ended(first)
    routes.ended(second)
    assert routes.choose(request("c", 1000)), "an idle engine's speed decides"


def test_an_engine_that_has_the_prompt_is_preferred_while_loads_are_near() -> None:
    def ask(text: int, prompt: int = 400, most: int = 10) -> int:
        charge = routes.choose(
            GenerationRequest("r", np.full(prompt, text, np.int32), SamplingParams(max_tokens=most))
        )
        assert charge
        return charge.engine

    routes = Router(2)
    assert [ask(1), ask(2)] == [0, 1]
    assert [ask(2), ask(1)] == [1, 0], "each request goes to the engine that has its prompt"
    assert [ask(3, 50), ask(2)] == [0, 1], (
        "the engine with the prompt has 50 tokens more: near enough"
    )
    assert ask(2) == 0, "the engine with the prompt has 450 tokens more: too many"
    routes.prompts.clear()
    routes = Router(2)
    assert [ask(1), ask(2)] == [0, 1]
    routes.prompts.clear()
    assert ask(2) == 0, "new weights"
    routes.healthy[1] = False
    routes.renew(1)
    assert ask(2) == 1


def test_a_response_is_expected_to_be_as_long_as_others_were() -> None:
    def expected(prompt: int, most: int) -> float:
        charge = routes.choose(request("r", prompt, most))
        assert charge
        routes.ended(charge)
        return charge.tokens

    routes = Router(1)
    assert expected(10, 500) == 510
    for tokens, reason in ((20, "stop"), (40, "length"), (900, "abort")):
        charge = routes.choose(request("r"))
        assert charge
        routes.ended(charge, answer(tokens, reason))
    assert expected(10, 500) == 40
    assert expected(10, 5) == 15


def test_a_straggler_does_not_make_an_engine_slow() -> None:
    speeds = [Throughput(), Throughput()]
    for speed in speeds:
        for wave in range(4):
            speed.load(0, 100.0 * wave)
            for done in range(MIN_ANSWERS):
                speed.load(MIN_ANSWERS - done, 100.0 * wave + 0.1 * (done + 1))
                speed.answered(10)
    speeds[1].load(0, 400.0)
    speeds[1].load(1, 480.0)  # one engine alone for 80 s
    speeds[1].answered(800)
    assert relative(np.array([speed.tokens_per_s for speed in speeds])).tolist() == [1.0, 1.0]


class Engine(InferenceEngine):
    """Seconds per token are proportional to the running requests, divided by ``speed``: it is saturated."""

    def __init__(self, speed: float, lengths: dict[str, int]) -> None:
        self.speed, self.lengths, self.tokens = speed, lengths, 0
        self._engine = virtual.VirtualEngine(virtual.DecodeCosts(64, 0.002 / speed, 0.001 / speed))

    async def start(self) -> None: ...

    async def shutdown(self) -> None: ...

    async def stats(self) -> EngineStats:
        return EngineStats()

    async def generate(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncIterator[list[GenerationOutput]]:
        loop = asyncio.get_running_loop()
        running = {}
        for each in requests:
            sequence = virtual.Sequence(
                len(each.prompt_token_ids), self.lengths[each.request_id], loop.create_future()
            )
            self._engine.submit(sequence)
            running[sequence.done] = each.request_id
        while running:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            names = [running.pop(future) for future in done]
            self.tokens += sum(self.lengths[name] for name in names)
            yield [GenerationOutput(n, *([[0] * self.lengths[n]] * 3), "stop") for n in names]


async def waves(
    speeds: Sequence[float], wave: int, count: int, seed: int = 0
) -> tuple[list[int], list[float]]:
    """Tokens by engine in all waves of requests but the first, and the duration of each wave."""
    draw = random.Random(seed)
    lengths = {
        f"{w}-{i}": min(1 + int(draw.expovariate(1 / 60)), 600)
        for w in range(count)
        for i in range(wave)
    }
    engines = [Engine(speed, lengths) for speed in speeds]
    client = InferenceClient(engines, 1e9)  # type: ignore[arg-type]
    await client.start()
    took, before = [], [0] * len(engines)
    for w in range(count):
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(client.generate(request(f"{w}-{i}", 10, 600)) for i in range(wave)))
        took.append(asyncio.get_running_loop().time() - began)
        if w == 0:
            before = [engine.tokens for engine in engines]
    return [engine.tokens - first for engine, first in zip(engines, before, strict=True)], took


def test_an_engine_twice_as_fast_gets_twice_the_tokens() -> None:
    (slow, fast), took = run_virtual(waves([1.0, 2.0], 400, 6))
    assert 1.8 < fast / slow < 2.2
    assert max(took[1:]) < 0.85 * took[0], (
        "a wave that is divided by number waits for the slow engine"
    )


@pytest.mark.matrix
def test_four_engines_of_two_kinds_have_as_much_to_do_for_their_speeds() -> None:
    speeds = [1.0, 1.0, 3.0, 3.0]
    tokens, _ = run_virtual(waves(speeds, 1000, 11))
    shares = [each / speed for each, speed in zip(tokens, speeds, strict=True)]
    assert max(shares) < 1.1 * min(shares)


class Small(Engine):
    """Has room for a hundred tokens; fails if it receives more prompt tokens than that."""

    def __init__(self, speed: float, lengths: dict[str, int]) -> None:
        super().__init__(speed, lengths)
        self.holds: dict[str, int] = {}
        self.most, self.order = 0, list[str]()

    async def stats(self) -> EngineStats:
        return EngineStats(cache_tokens=100)

    async def abort(self, names: Sequence[str]) -> None:
        for name in names:
            self.holds.pop(name, None)

    async def generate(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncIterator[list[GenerationOutput]]:
        sizes = {each.request_id: len(each.prompt_token_ids) for each in requests}
        self.order += sizes
        self.holds |= sizes
        self.most = max(self.most, sum(self.holds.values()))
        async for outputs in super().generate(requests):
            await self.abort([output.request_id for output in outputs])
            yield outputs


async def in_line(count: int) -> tuple[list[Small], float]:
    """Requests of one to eighty tokens to two engines; every fifth one is cancelled before it is answered."""
    draw = random.Random(1)
    lengths = {str(i): draw.randint(1, 40) for i in range(count)}
    engines = [Small(1.0, lengths), Small(2.0, lengths)]
    client = InferenceClient(engines, 1e9)  # type: ignore[arg-type]
    await client.start()

    async def ask(i: int) -> None:
        prompt = np.full(draw.randint(1, 80), i, np.int32)
        asked = client.generate(GenerationRequest(str(i), prompt, SamplingParams(max_tokens=40)))
        if i % 5:
            await asked
            return
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await asked

    await asyncio.gather(*(ask(i) for i in range(count)))
    assert not client._queue and client.pool.router.in_flight.tolist() == [0, 0]
    await client.shutdown()
    return engines, asyncio.get_running_loop().time()


def test_requests_wait_in_the_client_while_all_engines_are_full_and_none_starves() -> None:
    engines, _ = run_virtual(in_line(300))
    assert max(engine.most for engine in engines) <= 100
    for engine in engines:
        assert engine.order == sorted(engine.order, key=int), "requests keep their order"
    assert sum(len(engine.order) for engine in engines) >= 240


@pytest.mark.matrix
async def test_a_choice_among_1024_engines_with_256_requests_each_takes_microseconds() -> None:
    """Counting one engine's requests takes as long as it would without the other engines."""
    routes, table = Router(1024), InflightTable()
    routes.capacity[:] = 400_000.0
    for number in range(1024 * 256):
        each = request(str(number), 1, 700)
        table[each.request_id] = InflightRequest(each, each.request_id, InflightGroup([each]))
        charge = Charge(number % 1024, 700.0 + number % 7, 350.0)
        table.send(table[each.request_id], charge)
        routes.in_flight[charge.engine] += 1
        routes.outstanding[charge.engine] += charge.tokens
        routes.cache_tokens[charge.engine] += charge.cache_tokens
    new = [
        GenerationRequest(str(i), np.full(512, i, np.int32), SamplingParams(max_tokens=1024))
        for i in range(200)
    ]

    def choose() -> None:
        for each in new:
            charge = routes.choose(each, 1.0)
            assert charge
            routes.ended(charge)

    assert min(timeit.repeat(choose, timer=time.thread_time, number=1, repeat=9)) / len(new) <= 1e-4
    assert len(table.at(7)) == 256
    assert (
        min(timeit.repeat(lambda: table.at(7), timer=time.thread_time, number=1, repeat=9)) <= 1e-4
    )


def test_engines_that_are_alike_get_the_same() -> None:
    tokens, _ = run_virtual(waves([1.0, 1.0, 1.0], 300, 4))
    assert max(tokens) < 1.1 * min(tokens)
