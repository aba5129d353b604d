"""The client with scripted engines, in simulation."""

import asyncio
from contextlib import aclosing

import pytest

from skyasync.arrays import TURN_TOKENS
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import (
    EngineStats,
    GenerationOutput,
    GenerationRequest,
    RequestFailedError,
    SamplingParams,
    refusal,
)
from skyasync.weight_sync.update import WeightUpdate
from tests.virtual_time import virtual_time


class Engine:
    """Answers each request after ``seconds`` with as many tokens as requested, or raises ``fault``."""

    def __init__(self, name="engine", seconds=1.0, fault=None):
        self.name, self.seconds, self.fault = name, seconds, fault
        self.messages, self.calls = [], []

    async def generate(self, requests):
        self.messages.append([r.request_id for r in requests])
        for request in requests:
            await asyncio.sleep(self.seconds)
            if self.fault:
                raise self.fault
            yield [self.answer(request)]

    def answer(self, request):
        count = request.sampling.max_tokens
        return GenerationOutput(
            request.request_id, [7] * count, [-0.5] * count, [0] * count, "length"
        )

    def __getattr__(self, method):
        async def call(*args):
            self.calls.append((method, *args))
            return {"stats": EngineStats(), "update_weights": None}.get(method, [[0.0]])

        return call


def request(name, session=None, tokens=2):
    return GenerationRequest(name, [1], SamplingParams(max_tokens=tokens), session)


def requests_of(engine):
    return [name for message in engine.messages for name in message]


@virtual_time
async def test_each_request_gets_its_own_answer():
    client = InferenceClient([Engine(), Engine()])
    found = await asyncio.gather(
        *(client.generate(request(f"r{i}", tokens=i + 1)) for i in range(9))
    )
    assert [(o.request_id, len(o.token_ids)) for o in found] == [(f"r{i}", i + 1) for i in range(9)]


@virtual_time
async def test_long_answers_of_one_message_wake_their_callers_in_turns_of_their_own():
    class AtOnce(Engine):
        async def generate(self, requests):
            yield [self.answer(r) for r in requests]

    async def caller(name, tokens):
        await client.generate(request(name, tokens=tokens))
        woken.append(turns[0])

    async def count():
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    for tokens, different in ((TURN_TOKENS, 4), (1, 1)):
        client, woken, turns = InferenceClient([AtOnce()]), [], [0]
        counter = asyncio.create_task(count())
        await asyncio.gather(*(caller(f"r{i}", tokens) for i in range(4)))
        counter.cancel()
        assert len(set(woken)) == different


@virtual_time
async def test_requests_of_one_turn_of_the_loop_travel_in_one_message_per_engine_shared_out_evenly():
    engines = [Engine(), Engine(), Engine()]
    client = InferenceClient(engines)
    await asyncio.gather(*(client.generate(request(f"r{i}")) for i in range(30)))
    assert [len(e.messages) for e in engines] == [1, 1, 1]
    assert [len(requests_of(e)) for e in engines] == [10, 10, 10]


@virtual_time
async def test_a_request_goes_to_the_engine_with_the_fewest_in_flight():
    slow, fast = Engine(seconds=100.0), Engine(seconds=1.0)
    client = InferenceClient([slow, fast])
    waiting = [asyncio.create_task(client.generate(request(f"r{i}"))) for i in range(2)]
    await asyncio.sleep(5)
    await client.generate(request("late"))
    assert "late" in requests_of(fast)
    await asyncio.gather(*waiting)


@virtual_time
async def test_a_session_stays_on_its_engine_also_when_nothing_of_it_is_in_flight():
    first, second = Engine(), Engine()
    client = InferenceClient([first, second])
    await client.generate(request("a0", "a"))
    busy = [asyncio.create_task(client.generate(request(f"x{i}"))) for i in range(3)]
    await asyncio.sleep(0)
    await client.generate(request("a1", "a"))
    await client.generate(request("a2", "a"))
    await asyncio.gather(*busy)
    assert {"a0", "a1", "a2"} <= set(requests_of(first))


@virtual_time
async def test_sessions_are_forgotten_in_the_end(monkeypatch):
    monkeypatch.setattr("skyasync.inference.router.REMEMBERED_SESSIONS", 3)
    client = InferenceClient([Engine()])
    for i in range(10):
        await client.generate(request(f"r{i}", f"s{i}"))
    assert len(client.pool.router.sessions) == 3


@virtual_time
async def test_an_engines_error_reaches_every_request_it_had_and_no_other():
    error = RuntimeError("out of memory")
    broken, whole = Engine(fault=error), Engine()
    client = InferenceClient([broken, whole])
    found = await asyncio.gather(
        *(client.generate(request(f"r{i}")) for i in range(6)), return_exceptions=True
    )
    assert [o is error for o in found] == [True, False] * 3


@virtual_time
async def test_a_request_that_cannot_be_answered_fails_alone():
    class Picky(Engine):
        def answer(self, request):
            if request.request_id == "bad":
                return refusal(request, ValueError("too odd"))
            return super().answer(request)

    client = InferenceClient([Picky()])
    bad, good = await asyncio.gather(
        *map(client.generate, map(request, ["bad", "good"])), return_exceptions=True
    )
    assert (type(bad), str(bad)) == (
        RequestFailedError,
        "request 'bad' cannot be answered: ValueError: too odd",
    )
    assert len(good.token_ids) == 2
    assert len((await client.generate(request("later"))).token_ids) == 2


@virtual_time
async def test_an_engines_own_timeout_is_not_taken_for_the_requests():
    client = InferenceClient([Engine(fault=TimeoutError("the worker is away"))])
    with pytest.raises(TimeoutError, match="the worker is away"):
        await client.generate(request("r"))


@virtual_time
async def test_an_unanswered_request_is_an_error_that_names_it():
    class Forgetful(Engine):
        def answer(self, request):
            return super().answer(request) if request.request_id != "r1" else None

        async def generate(self, requests):
            async for (output,) in super().generate(requests):
                if output:
                    yield [output]

    client = InferenceClient([Forgetful()])
    found = await asyncio.gather(
        *(client.generate(request(f"r{i}")) for i in range(3)), return_exceptions=True
    )
    assert isinstance(found[1], RuntimeError)
    assert "engine 0 ended without answering r1" in str(found[1])
    assert [isinstance(o, GenerationOutput) for o in found] == [True, False, True]


@virtual_time
async def test_a_request_that_is_not_answered_in_time_is_a_timeout_that_names_it_and_the_key():
    client = InferenceClient([Engine(seconds=100.0)], request_timeout_s=30.0)
    with pytest.raises(
        TimeoutError, match=r"request r was .* for 30 s \(generator\.request_timeout_s\)"
    ):
        await client.generate(request("r"))
    assert asyncio.get_running_loop().time() == pytest.approx(30)


@virtual_time
async def test_a_cancelled_caller_does_not_disturb_others():
    client = InferenceClient([Engine()])
    tasks = [asyncio.create_task(client.generate(request(f"r{i}"))) for i in range(3)]
    await asyncio.sleep(0.5)
    tasks[0].cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert [o.request_id for o in found[1:]] == ["r1", "r2"]
    assert client.pool.router.in_flight.tolist() == [0]


@virtual_time
async def test_requests_of_cancelled_callers_are_aborted_at_their_engines_in_one_message_each():
    engines = [Engine(seconds=100.0), Engine(seconds=100.0)]
    client = InferenceClient(engines)
    tasks = [asyncio.create_task(client.generate(request(f"r{i}"))) for i in range(6)]
    await asyncio.sleep(5)
    for task in tasks[:4]:
        task.cancel()
    await asyncio.sleep(1)
    assert engines[0].calls == [("abort", ["r0", "r2"])] and engines[1].calls == [
        ("abort", ["r1", "r3"])
    ]
    for task in tasks[4:]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@virtual_time
async def test_a_request_that_has_not_left_yet_never_does():
    engine = Engine()
    client = InferenceClient([engine])
    tasks = [asyncio.create_task(client.generate(request(f"r{i}"))) for i in range(2)]
    asyncio.get_running_loop().call_soon(tasks[0].cancel)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert requests_of(engine) == ["r1"]


@virtual_time
async def test_a_request_that_timed_out_is_aborted():
    engine = Engine(seconds=100.0)
    client = InferenceClient([engine], request_timeout_s=30.0)
    with pytest.raises(TimeoutError):
        await client.generate(request("r"))
    await asyncio.sleep(1)
    assert [call for call in engine.calls if call != ("stats",)] == [("abort", ["r"])]


@virtual_time
async def test_an_id_is_in_flight_once():
    client = InferenceClient([Engine()])
    first = asyncio.create_task(client.generate(request("same")))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="same is in flight already"):
        await client.generate(request("same"))
    assert (await first).request_id == "same"
    assert (await client.generate(request("same"))).request_id == "same"


@virtual_time
async def test_every_engine_is_told_and_one_that_fails_is_heard():
    class Deaf(Engine):
        async def pause(self, mode):
            raise ConnectionError("gone")

    engines = [Engine(), Engine()]
    client = InferenceClient(engines)
    update = WeightUpdate(1, "shared_memory", {})
    await client.pause("keep")
    await client.update_weights(update)
    await client.resume()
    assert (
        engines[0].calls
        == engines[1].calls
        == [("pause", "keep"), ("update_weights", update), ("resume",)]
    )
    assert len(await client.score([[1, 2]])) == len(await client.stats()) == 2
    with pytest.raises(ConnectionError, match="gone"):
        await InferenceClient([Engine(), Deaf()]).pause("keep")


@virtual_time
async def test_shutting_down_ends_what_waits_and_reaches_every_engine():
    class Stubborn(Engine):
        async def shutdown(self):
            raise ConnectionError("gone")

    engines = [Stubborn(seconds=1000.0), Engine(seconds=1000.0)]
    client = InferenceClient(engines)
    tasks = [asyncio.create_task(client.generate(request(f"r{i}"))) for i in range(4)]
    await asyncio.sleep(1)
    await client.shutdown()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert {str(error) for error in found} == {"the inference client was shut down"}
    assert ("shutdown",) in engines[1].calls
    assert asyncio.get_running_loop().time() == pytest.approx(1)


@virtual_time
async def test_what_was_asked_in_the_turn_of_the_shutdown_is_answered_too():
    client = InferenceClient([Engine(seconds=1000.0)])
    task = asyncio.create_task(client.generate(request("r")))
    await asyncio.sleep(0)
    await client.shutdown()
    with pytest.raises(RuntimeError, match="was shut down"):
        await asyncio.wait_for(task, 1)


def test_a_client_needs_an_engine():
    with pytest.raises(ValueError, match="at least one engine"):
        InferenceClient([])


@pytest.mark.parametrize(("at_once", "waves"), [(0, [[0, 1, 2, 3, 4]]), (2, [[0, 1], [2, 3], [4]])])
async def test_engines_that_share_devices_load_one_after_the_other(at_once, waves):
    loading, found = set(), []

    class Loading:
        def __init__(self, index):
            self.index = index

        async def start(self):
            loading.add(self.index)
            await asyncio.sleep(0)
            if loading:
                found.append(sorted(loading))
                loading.clear()

        async def stats(self):
            return EngineStats()

    await InferenceClient([Loading(i) for i in range(5)], start_at_once=at_once).start()
    assert found == waves


@virtual_time
async def test_an_engine_that_is_silent_after_its_start_ends_the_start():
    class Silent(Engine):
        async def stats(self):
            await asyncio.Event().wait()

    client = InferenceClient([Engine(), Silent()], request_timeout_s=30.0)
    with pytest.raises(
        TimeoutError,
        match=r"one did not answer a request for its state within 30 s \(generator\.request_timeout_s\)",
    ):
        await client.start()


@virtual_time
async def test_a_request_that_is_made_after_a_pause_does_not_overtake_it():
    class Noting(Engine):
        async def generate(self, requests):
            self.calls.append("generate")
            async for outputs in super().generate(requests):
                yield outputs

    engine = Noting()
    client = InferenceClient([engine])
    await asyncio.gather(client.cut(), client.generate(request("r")))
    assert engine.calls == [("pause", "abort"), "generate"]


@virtual_time
async def test_a_group_is_answered_sample_by_sample_as_the_engine_finishes_them():
    client, loop = InferenceClient([Engine()]), asyncio.get_running_loop()
    began = loop.time()
    async with aclosing(
        client.generate_group([request(f"r{i}", tokens=i + 1) for i in range(3)])
    ) as arriving:
        answers = [
            (loop.time() - began, output.request_id, len(output.token_ids))
            async for (output,) in arriving
        ]
    assert answers == [(1.0, "r0", 1), (2.0, "r1", 2), (3.0, "r2", 3)]
    assert not client._inflight and client.pool.router.in_flight.tolist() == [0]


@virtual_time
async def test_leaving_a_group_early_aborts_the_samples_without_an_answer():
    engine = Engine()
    client = InferenceClient([engine])
    async with aclosing(client.generate_group([request(f"r{i}") for i in range(3)])) as arriving:
        await anext(arriving)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert engine.calls == [("abort", ["r1", "r2"])]
    assert not client._inflight and client.pool.router.in_flight.tolist() == [0]


@virtual_time
async def test_an_error_of_one_sample_is_raised_by_its_group():
    class Choosy(Engine):
        def answer(self, asked):
            return (
                refusal(asked, ValueError("no"))
                if asked.request_id == "r1"
                else super().answer(asked)
            )

    client = InferenceClient([Choosy()])
    with pytest.raises(RequestFailedError, match="request 'r1' cannot be answered"):
        async with aclosing(
            client.generate_group([request(f"r{i}") for i in range(3)])
        ) as arriving:
            async for _ in arriving:
                pass


@virtual_time
async def test_a_sample_that_is_not_answered_in_time_is_named():
    class Slower(Engine):
        async def generate(self, requests):
            async for outputs in super().generate(requests):
                yield outputs
                self.seconds *= 2

    client = InferenceClient([Slower(seconds=4.0)], request_timeout_s=5.0)
    with pytest.raises(
        TimeoutError, match="request r1 was not answered: engine 0 generated nothing for 5 s"
    ):
        async with aclosing(client.generate_group([request("r0"), request("r1")])) as arriving:
            async for _ in arriving:
                pass


@virtual_time
async def test_samples_of_a_group_spread_over_engines_like_single_requests():
    single, together = [Engine(), Engine(), Engine()], [Engine(), Engine(), Engine()]
    await asyncio.gather(
        *map(InferenceClient(single).generate, [request(f"r{i}") for i in range(9)])
    )
    async with aclosing(
        InferenceClient(together).generate_group([request(f"r{i}") for i in range(9)])
    ) as arriving:
        async for _ in arriving:
            pass
    assert [requests_of(engine) for engine in together] == [
        requests_of(engine) for engine in single
    ]


@virtual_time
async def test_requests_that_are_collected_leave_in_one_message():
    engine = Engine()
    client = InferenceClient([engine])
    with client.collecting():
        tasks = []
        for number in range(3):
            tasks.append(asyncio.create_task(client.generate(request(f"r{number}"))))
            await asyncio.sleep(0.5)
        assert engine.messages == []
    await asyncio.gather(*tasks)
    assert engine.messages == [["r0", "r1", "r2"]]
