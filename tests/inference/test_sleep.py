"""Engines that fall asleep with requests in flight: awake engines give each request one complete answer."""

from __future__ import annotations

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import GenerationOutput, GenerationRequest, SamplingParams
from skyasync.simulate.clock import run_virtual
from tests.chaos.simulated_processes import Engine, response_tokens


def request(number: int) -> GenerationRequest:
    return GenerationRequest(
        f"r{number}", [number], SamplingParams(max_tokens=8), session_id=f"s{number}"
    )


async def start_requests(
    client: InferenceClient, count: int
) -> list[asyncio.Task[GenerationOutput]]:
    await client.start()
    return [asyncio.create_task(client.generate(request(number))) for number in range(count)]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 12), st.integers(0, 2**32))
def test_no_token_is_lost_or_repeated_whichever_engines_sleep_and_wake(
    engines: int, count: int, seed: int
) -> None:
    """``Engine`` fails the test if it gets requests while it sleeps, or falls asleep with requests."""

    async def run() -> None:
        client, chance = InferenceClient([Engine() for _ in range(engines)]), random.Random(seed)
        tasks = await start_requests(client, count)
        for _ in range(chance.randint(1, 4)):
            await asyncio.sleep(chance.uniform(0.0, 2.0))
            some = frozenset(chance.sample(range(engines), chance.randint(1, engines)))
            await client.sleep(some)
            assert client.pool.asleep == some
            assert not any(client._inflight.at(index) for index in some)
            await asyncio.sleep(chance.uniform(0.0, 2.0))
            await client.wake("weights", some)
            await client.wake("cache", some)
        for number, answer in enumerate(await asyncio.gather(*tasks)):
            assert answer.request_id == f"r{number}"
            assert len(answer.token_ids) == response_tokens(request(number))
        await client.shutdown()

    run_virtual(run())


def test_the_time_for_an_answer_stands_still_while_all_engines_sleep() -> None:
    async def run() -> None:
        client = InferenceClient([Engine()], request_timeout_s=10.0)
        tasks = await start_requests(client, 3)
        await asyncio.sleep(0.7)
        await client.sleep()
        tasks.append(asyncio.create_task(client.generate(request(7))))
        await asyncio.sleep(100.0)
        assert not any(task.done() for task in tasks[1:])
        await client.wake("weights")
        await client.wake("cache")
        assert [len(answer.token_ids) for answer in await asyncio.gather(*tasks)] == [1, 2, 3, 8]
        await client.shutdown()

    run_virtual(run())


def test_engines_that_wake_get_their_share_of_what_waits() -> None:
    async def run() -> None:
        client = InferenceClient([Engine(), Engine(), Engine()])
        await client.start()
        await client.sleep([1, 2])
        tasks = [
            asyncio.create_task(client.generate(request(7 + 8 * number))) for number in range(9)
        ]
        await asyncio.sleep(0.1)
        assert client.pool.router.in_flight.tolist() == [9, 0, 0]
        await client.wake("weights", [1, 2])
        await client.wake("cache", [1, 2])
        await asyncio.sleep(0.7)
        assert client.pool.router.in_flight.tolist() == [3, 3, 3]
        await asyncio.gather(*tasks)
        await client.shutdown()

    run_virtual(run())


def test_an_engine_that_fails_while_it_falls_asleep_is_one_engine_less() -> None:
    async def run() -> None:
        engines = [Engine(), Engine()]
        client = InferenceClient(engines)
        tasks = await start_requests(client, 6)
        client.pool.on_failure = lambda index, error, lost: None
        await asyncio.sleep(0.3)
        engines[1].kill()
        await client.sleep([1])
        assert client.pool.healthy == client.pool.awake == [0]
        await asyncio.gather(*tasks)
        await client.shutdown()

    run_virtual(run())
