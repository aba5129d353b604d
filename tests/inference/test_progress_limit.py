"""The limit of a request counts time without progress of its engine, in simulation."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import (
    EngineConfig,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
    InferenceEngine,
    SamplingParams,
)
from tests.virtual_time import virtual_time

NEVER_S = 1e9
RESPONSE = 32_768
SLOTS = 256
STEP_S = 0.05


class SlowEngine(InferenceEngine):
    """Computes up to ``slots`` requests at once, a token of each in ``step_s``, until ``stops_s``."""

    def __init__(
        self,
        slots: int = SLOTS,
        step_s: float = STEP_S,
        stops_s: float = NEVER_S,
        cache_tokens: int = 0,
    ) -> None:
        super().__init__(EngineConfig("model"))
        self.step_s = step_s
        self.stops_s = stops_s
        self.cache_tokens = cache_tokens
        self.reports = 0
        self._slots = asyncio.Semaphore(slots)
        self._tasks: list[asyncio.Task[None]] = []
        self._started_s: dict[str, float] = {}
        self._finished_tokens = 0

    async def start(self) -> None: ...

    async def abort(self, request_ids: Any = None) -> None: ...

    async def shutdown(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def generate(self, requests):
        answers: asyncio.Queue[GenerationOutput] = asyncio.Queue()
        tasks = [asyncio.create_task(self._answer(request, answers)) for request in requests]
        self._tasks += tasks
        for _ in tasks:
            yield [await answers.get()]

    async def _answer(
        self, request: GenerationRequest, answers: asyncio.Queue[GenerationOutput]
    ) -> None:
        loop = asyncio.get_running_loop()
        count = request.sampling.max_tokens
        async with self._slots:
            self._started_s[request.request_id] = loop.time()
            await asyncio.sleep(count * self.step_s)
            if loop.time() > self.stops_s:
                await asyncio.sleep(NEVER_S)
            del self._started_s[request.request_id]
            self._finished_tokens += count
        await answers.put(
            GenerationOutput(request.request_id, [7] * count, [-0.5] * count, [0] * count, "length")
        )

    async def stats(self) -> EngineStats:
        self.reports += 1
        now = min(asyncio.get_running_loop().time(), self.stops_s)
        running = sum(
            int((now - started) / self.step_s)
            for started in self._started_s.values()
            if started < now
        )
        return EngineStats(
            generated_tokens=self._finished_tokens + running, cache_tokens=self.cache_tokens
        )


def request(number: int, tokens: int = RESPONSE) -> GenerationRequest:
    return GenerationRequest(f"r{number}", [number], SamplingParams(max_tokens=tokens))


async def results(client: InferenceClient, count: int, tokens: int = RESPONSE) -> list[Any]:
    calls = [client.generate(request(number, tokens)) for number in range(count)]
    return await asyncio.gather(*calls, return_exceptions=True)


@virtual_time
async def test_the_time_in_an_engines_queue_does_not_count_while_it_answers():
    client = InferenceClient([SlowEngine(slots=2, step_s=0.3)], request_timeout_s=1.0)
    answers = await results(client, 12, tokens=1)
    assert [type(answer) for answer in answers] == [GenerationOutput] * 12
    assert asyncio.get_running_loop().time() == pytest.approx(6 * 0.3)


WAITS = pytest.mark.parametrize(
    "cache_tokens", [0, SLOTS * RESPONSE], ids=["engine's queue", "client's queue"]
)


@WAITS
@virtual_time
async def test_long_responses_are_no_timeout_while_the_engine_generates(cache_tokens):
    client = InferenceClient([SlowEngine(cache_tokens=cache_tokens)], request_timeout_s=600.0)
    await client.start()
    answers = await results(client, 1024)
    assert {type(answer) for answer in answers} == {GenerationOutput}
    assert asyncio.get_running_loop().time() >= 4 * RESPONSE * STEP_S > 10 * 600.0


@WAITS
@pytest.mark.parametrize("stops_s", [1.0, 700.0, 1638.5, 3000.0])
@virtual_time
async def test_an_engine_that_stops_ends_its_requests_within_the_limit(cache_tokens, stops_s):
    client = InferenceClient(
        [SlowEngine(cache_tokens=cache_tokens, stops_s=stops_s)], request_timeout_s=600.0
    )
    await client.start()
    answers = await results(client, 1024)
    errors = [answer for answer in answers if isinstance(answer, TimeoutError)]
    assert len(errors) == 1024 - SLOTS * int(stops_s / (RESPONSE * STEP_S))
    for error in errors:
        assert str(error).endswith("generated nothing for 600 s (generator.request_timeout_s)")
        assert "\n" not in str(error)
    ended_s = asyncio.get_running_loop().time() - stops_s
    assert 500.0 <= ended_s <= 600.0 + STEP_S


@virtual_time
async def test_an_engine_that_stops_is_not_excused_by_another_that_generates():
    engines = [SlowEngine(), SlowEngine(stops_s=100.0)]
    client = InferenceClient(engines, request_timeout_s=600.0)
    ended_s = {}

    async def call(number: int) -> None:
        try:
            await client.generate(request(number))
        except TimeoutError as error:
            assert "engine 1 generated nothing for 600 s" in str(error)
            ended_s[number] = asyncio.get_running_loop().time()

    await asyncio.gather(*map(call, range(8)))
    assert len(ended_s) == 4 and max(ended_s.values()) <= 100.0 + 600.0


@pytest.mark.parametrize("fault", ["error", "no answer"])
@virtual_time
async def test_the_limit_holds_for_an_engine_that_does_not_report(fault):
    class Mute(SlowEngine):
        async def stats(self) -> EngineStats:
            if fault == "error":
                raise ConnectionError("gone")
            await asyncio.sleep(NEVER_S)
            return EngineStats()

    client = InferenceClient([Mute()], request_timeout_s=600.0)
    answers = await results(client, 4)
    assert {type(answer) for answer in answers} == {TimeoutError}
    assert asyncio.get_running_loop().time() == pytest.approx(600.0)
    await client.shutdown()
    assert asyncio.all_tasks() - {asyncio.current_task()} == set()


@virtual_time
async def test_an_engine_is_asked_for_its_tokens_only_if_it_has_not_answered_for_a_while():
    engine = SlowEngine(slots=1, step_s=30.0)
    client = InferenceClient([engine], request_timeout_s=600.0)
    await results(client, 40, tokens=1)
    assert asyncio.get_running_loop().time() == pytest.approx(1200.0)
    assert engine.reports == 0


@virtual_time
async def test_the_limit_counts_again_from_a_later_request():
    engine = SlowEngine(stops_s=1.0, step_s=0.5)
    client = InferenceClient([engine], request_timeout_s=600.0)
    await client.generate(request(0, tokens=2))
    await asyncio.sleep(5000.0)
    with pytest.raises(
        TimeoutError, match="request r1 was not answered: engine 0 generated nothing for 600 s"
    ):
        await client.generate(request(1))
    assert asyncio.get_running_loop().time() == pytest.approx(5601.0)
