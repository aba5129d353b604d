"""Routing: pure rules, and the real client before engines of unequal speed on virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyasync.engines.client import InferenceClient
from skyasync.engines.protocol import EngineStats, GenerationOutput, GenerationRequest, SamplingParams
from skyasync.engines.routes import Charge, Routes
from skyasync.engines.speeds import ENOUGH, Speed, relative
from skyasync.simulate import engines as virtual
from skyasync.simulate.clock import run_virtual

pytestmark = pytest.mark.slow


def request(name: str, prompt: int = 4, most: int = 16, session: str | None = None) -> GenerationRequest:
    return GenerationRequest(name, np.ones(prompt, np.int32), SamplingParams(max_tokens=most), session)


def answer(tokens: int, reason: str = "stop") -> GenerationOutput:
    row = [0] * tokens
    return GenerationOutput("r", row, [0.0] * tokens, row, reason)  # type: ignore[arg-type]


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 300), st.integers(1, 900), st.sampled_from([None, "a", "b", "c"])),
        st.tuples(st.just("end"), st.integers(0, 99), st.integers(0, 900), st.none()),
        st.tuples(st.just("die"), st.integers(0, 99), st.just(0), st.none()),
        st.tuples(st.just("renew"), st.integers(0, 99), st.just(0), st.none()),
    ),
    max_size=80,
)


@given(EVENTS, st.integers(1, 4), st.lists(st.integers(0, 2000), min_size=4, max_size=4))
def test_what_is_charged_is_given_back_and_the_dead_get_nothing(events: list, count: int, capacity: list[int]) -> None:
    routes, there = Routes(count), list[Charge]()
    routes.capacity = capacity[:count]
    began: dict[str, int] = {}
    for now, (kind, first, second, session) in enumerate(events):
        if kind == "ask":
            charge = routes.choose(request("r", first, second, session), now)
            assert (charge is None) == (len(routes.dead) == count)
            if charge is None:
                continue
            there.append(charge)
            assert charge.engine not in routes.dead
            if session:
                assert began.setdefault(session, charge.engine) == charge.engine
        elif kind == "end" and there:
            routes.ended(there.pop(first % len(there)), answer(second) if second else None, now)
        elif kind == "die":
            routes.dead.add(first % count)
            began = {name: engine for name, engine in began.items() if engine != first % count}
        elif kind == "renew":
            routes.renew(first % count)
        for index in range(count):
            held = [charge.tokens for charge in there if charge.engine == index]
            assert routes.in_flight[index] == len(held)
            assert routes.outstanding[index] == pytest.approx(sum(held))


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), min_size=2, max_size=60))
def test_engines_that_are_alike_differ_by_one_request_at_most(sizes: list[tuple[int, int]]) -> None:
    routes = Routes(3)
    for prompt, most in sizes:
        routes.choose(request("r", prompt, most))
    assert max(routes.outstanding) - min(routes.outstanding) <= max(map(sum, sizes))


def test_an_engine_whose_cache_is_full_is_passed_over_while_another_has_room() -> None:
    routes = Routes(2)
    routes.capacity = [100, 0]
    chosen = [routes.choose(request(str(i), 10, 30)) for i in range(7)]
    assert [charge.engine for charge in chosen if charge] == [0, 1, 0, 1, 1, 1, 1]


def test_a_response_is_expected_to_be_as_long_as_others_were() -> None:
    routes = Routes(1)
    assert routes.expected(10, 500) == 510
    for tokens, reason in ((20, "stop"), (40, "length"), (900, "abort")):
        charge = routes.choose(request("r"))
        assert charge
        routes.ended(charge, answer(tokens, reason))
    assert routes.expected(10, 500) == 40
    assert routes.expected(10, 5) == 15


def test_a_straggler_does_not_make_an_engine_slow() -> None:
    speeds = [Speed(), Speed()]
    for speed in speeds:
        for wave in range(4):
            speed.load(0, 100.0 * wave)
            for done in range(ENOUGH):
                speed.load(ENOUGH - done, 100.0 * wave + 0.1 * (done + 1))
                speed.gave(10)
    speeds[1].load(0, 400.0)
    speeds[1].load(1, 480.0)  # alone for 80 s
    speeds[1].gave(800)
    assert relative(speeds) == [1.0, 1.0]


class Engine:
    """Seconds per token in proportion to what runs, over ``speed``: it is saturated."""

    def __init__(self, speed: float, lengths: dict[str, int]) -> None:
        self.speed, self.lengths, self.tokens = speed, lengths, 0
        self._engine = virtual.VirtualEngine(virtual.DecodeCosts(64, 0.002 / speed, 0.001 / speed))

    async def start(self) -> None: ...

    async def shutdown(self) -> None: ...

    async def stats(self) -> EngineStats:
        return EngineStats()

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[list[GenerationOutput]]:
        loop = asyncio.get_running_loop()
        running = {}
        for each in requests:
            sequence = virtual.Sequence(len(each.prompt_token_ids), self.lengths[each.request_id], loop.create_future())
            self._engine.submit(sequence)
            running[sequence.done] = each.request_id
        while running:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            names = [running.pop(future) for future in done]
            self.tokens += sum(self.lengths[name] for name in names)
            yield [GenerationOutput(n, *([[0] * self.lengths[n]] * 3), "stop") for n in names]


async def waves(speeds: Sequence[float], wave: int, count: int, seed: int = 0) -> tuple[list[int], list[float]]:
    """Tokens by engine in all waves of requests but the first, and the seconds that each wave took."""
    draw = random.Random(seed)
    lengths = {f"{w}-{i}": min(1 + int(draw.expovariate(1 / 60)), 600) for w in range(count) for i in range(wave)}
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
    assert max(took[1:]) < 0.85 * took[0], "a wave divided by numbers waits for the slow one"


def test_four_engines_of_two_kinds_have_as_much_to_do_for_their_speeds() -> None:
    speeds = [1.0, 1.0, 3.0, 3.0]
    tokens, _ = run_virtual(waves(speeds, 1000, 11))
    shares = [each / speed for each, speed in zip(tokens, speeds, strict=True)]
    assert max(shares) < 1.1 * min(shares)


def test_engines_that_are_alike_get_the_same() -> None:
    tokens, _ = run_virtual(waves([1.0, 1.0, 1.0], 300, 4))
    assert max(tokens) < 1.1 * min(tokens)
