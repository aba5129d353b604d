"""Engines that fail at any moment: healthy engines give every request one complete answer (in simulation)."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import (
    EngineFailedError,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
    InferenceEngine,
    SamplingParams,
)
from skyasync.inference.supervisor import POLLED_PER_S, EngineSupervisor
from skyasync.simulate.clock import run_virtual
from skyasync.weight_sync.update import WeightSyncError, WeightUpdate
from tests.virtual_time import virtual_time

START_S = 3.0
PROMPT = 4


class Machine:
    """Engines that generate one token a second, which is its own position, and a record of computed positions."""

    def __init__(self) -> None:
        self.computed: dict[
            str, list[int]
        ] = {}  # caller's request -> positions that an engine reported or answered
        self.killed = self.made = 0
        self.broken_starts = 0


class Engine(InferenceEngine):
    restartable = True

    def __init__(self, machine: Machine, version: int = 0) -> None:
        self.machine, self.version = machine, version
        machine.made += 1
        self.gone, self.wire = asyncio.Event(), asyncio.Lock()
        self.hung = self.told = False
        self.running = asyncio.Event()
        self.running.set()
        self.rows: dict[str, dict] = {}
        self.calls: list[str] = []

    def successor(self) -> Engine:
        return Engine(self.machine)

    def kill(self) -> None:
        self.machine.killed += 1
        self.gone.set()

    async def start(self) -> None:
        await self.here()
        await asyncio.sleep(START_S)
        if self.machine.broken_starts:
            self.machine.broken_starts -= 1
            raise EngineFailedError("it failed while it loaded")

    async def here(self) -> None:
        if self.gone.is_set():
            raise EngineFailedError("the actor failed")
        if self.hung:
            await self.gone.wait()
            raise EngineFailedError("the actor failed")
        async with self.wire:  # messages arrive in the order in which they were sent
            await asyncio.sleep(0.01)

    async def call(self, name: str) -> None:
        self.calls.append(name)
        await self.here()
        if self.hung or self.gone.is_set():
            await self.here()

    async def generate(self, requests):
        await self.here()
        for request in requests:
            assert request.request_id not in self.rows
            self.rows[request.request_id] = {
                "request": request,
                "tokens": [],
                "versions": [],
                "told": 0,
                "end": None,
            }
        mine = [request.request_id for request in requests]
        while mine:
            ending = asyncio.create_task(self.gone.wait())
            await asyncio.wait({ending}, timeout=1.0)
            ending.cancel()
            await self.here()
            await self.running.wait()
            done = []
            for name in mine:
                row = self.rows[name]
                if row["end"] is None:
                    row["tokens"].append(len(row["request"].prompt_token_ids) + len(row["tokens"]))
                    row["versions"].append(self.version)
                    if len(row["tokens"]) == row["request"].sampling.max_tokens:
                        row["end"] = "length"
                if row["end"]:
                    done.append(self.output(self.rows.pop(name), 0))
            mine = [name for name in mine if name in self.rows]
            if done:
                yield done

    def output(self, row, start):
        tokens = row["tokens"][start:]
        return GenerationOutput(
            row["request"].request_id,
            tokens,
            [-0.5] * len(tokens),
            row["versions"][start:],
            row["end"],
        )

    async def progress(self):
        await self.call("progress")
        outputs = []
        for row in self.rows.values():
            if row["end"] is None and len(row["tokens"]) > row["told"]:
                outputs.append(self.output(row, row["told"]))
                row["told"] = len(row["tokens"])
        return outputs

    async def pause(self, mode="keep"):
        await self.call(f"pause {mode}")
        if mode == "abort":
            self.end(
                None
            )  # interrupted requests are reported; computing on afterwards does no harm here
        else:
            self.running.clear()

    async def resume(self):
        await self.call("resume")
        self.running.set()

    async def abort(self, ids=None):
        await self.call("abort")
        self.end(ids)

    def end(self, ids):
        for name, row in self.rows.items():
            if ids is None or name in ids:
                row["end"] = "abort"

    async def update_weights(self, update):
        await self.call(f"update {update.version}")
        await asyncio.sleep(0.5)
        await self.here()
        self.version = update.version

    async def score(self, sequences):
        await self.call("score")
        return [[0.0] for _ in sequences]

    async def stats(self):
        await self.call("stats")
        return EngineStats(generated_tokens=7)

    async def shutdown(self):
        self.gone.set()


class Weights:
    def __init__(self) -> None:
        self.version, self.turn, self.fault = 0, asyncio.Lock(), None

    @asynccontextmanager
    async def between_syncs(self):
        async with self.turn:
            if self.fault:
                raise self.fault
            yield WeightUpdate(self.version, "shared_memory", {})

    def quiet(self):
        return self.turn


class Run:
    """Two engines (or another number), a client, and the supervisor that replaces failed engines."""

    def __init__(self, engines: int = 2, restarts: int = 100, timeout_s: float = 600.0) -> None:
        self.machine, self.weights = Machine(), Weights()
        self.client = InferenceClient([Engine(self.machine) for _ in range(engines)], timeout_s)
        self.supervisor = EngineSupervisor(
            self.client,
            self.weights,
            max_restarts=restarts,
            heartbeat_s=2.0,
            heartbeat_timeout_s=5.0,
            limit_s=60.0,
        )

    async def __aenter__(self) -> Run:
        self.supervisor.begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.supervisor.close()
        await self.client.shutdown()

    def kill(self, index: int) -> None:
        self.client.engines[index].gone.set()

    def hang(self, index: int) -> None:
        self.client.engines[index].hung = True

    async def sync(self, mode: str = "keep") -> None:
        async with self.weights.turn:
            await (self.client.cut() if mode == "recompute" else self.client.pause("keep"))
            self.weights.version += 1
            await self.client.update_weights(
                WeightUpdate(self.weights.version, "shared_memory", {})
            )
        await self.client.resume()


def ask(run: Run, count: int, tokens: int = 12) -> list[asyncio.Task[GenerationOutput]]:
    sampling = SamplingParams(max_tokens=tokens)
    requests = [GenerationRequest(f"r{i}", [1] * PROMPT, sampling) for i in range(count)]
    return [asyncio.create_task(run.client.generate(request)) for request in requests]


def check(answers: list[GenerationOutput], tokens: int = 12) -> None:
    assert [answer.request_id for answer in answers] == [f"r{i}" for i in range(len(answers))]
    for answer in answers:
        assert answer.token_ids.tolist() == list(range(PROMPT, PROMPT + tokens)), (
            "each position once, in order"
        )
        assert answer.versions.tolist() == sorted(answer.versions.tolist())
        assert len(answer.logprobs) == tokens and answer.finish_reason == "length"


@virtual_time
async def test_requests_of_a_failed_engine_continue_at_the_other_from_their_known_tokens() -> None:
    async with Run() as run:
        tasks = ask(run, 4)
        await asyncio.sleep(7.5)
        before = asyncio.get_running_loop().time()
        run.kill(1)
        check(await asyncio.gather(*tasks))
        took = asyncio.get_running_loop().time() - before
    assert took < 12, "a failure costs the tokens since the last heartbeat, not the whole answer"


@pytest.mark.parametrize(
    "sampling",
    [
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"bad_words": ["x"]},
        {"structured_outputs": {"regex": "x*"}},
    ],
)
@virtual_time
async def test_a_response_starts_over_if_its_sampling_looks_at_the_response_so_far(
    sampling: dict,
) -> None:
    sent: list[tuple[int, int]] = []

    class Seeing(Engine):
        def generate(self, requests):
            sent.extend(
                (len(request.prompt_token_ids), request.sampling.max_tokens) for request in requests
            )
            return super().generate(requests)

    run = Run()
    run.client.engines[:] = [Seeing(run.machine), Seeing(run.machine)]
    request = GenerationRequest("r0", [1] * PROMPT, SamplingParams(max_tokens=12, **sampling))
    async with run:
        task = asyncio.create_task(run.client.generate(request))
        await asyncio.sleep(7.5)
        run.kill(0)
        check([await task])
        assert sent == [(PROMPT, 12)] * 2
        partial = GenerationOutput("r0", [7] * 5, [-0.5] * 5, [0] * 5)  # of a checkpoint
        check([await run.client.go_on(request, partial)])
        assert sent == [(PROMPT, 12)] * 3


@virtual_time
async def test_a_request_without_an_engine_waits_for_the_one_that_is_started() -> None:
    async with Run(engines=1) as run:
        tasks = ask(run, 3)
        await asyncio.sleep(4.5)
        run.kill(0)
        check(await asyncio.gather(*tasks))
        assert (
            run.supervisor.failures,
            run.supervisor.restarts,
            run.machine.made,
            run.machine.killed,
        ) == (1, 1, 2, 1)


@virtual_time
async def test_without_an_engine_the_requests_own_limit_holds() -> None:
    async with Run(engines=1, timeout_s=2.0) as run:
        (task,) = ask(run, 1)
        await asyncio.sleep(0.5)
        run.kill(0)
        with pytest.raises(TimeoutError, match="request_timeout_s"):
            await task


@virtual_time
async def test_a_hanging_engine_counts_as_failed_after_the_timeout_and_its_process_is_killed() -> (
    None
):
    async with Run() as run:
        tasks = ask(run, 4, tokens=20)
        await asyncio.sleep(3.5)
        old = run.client.engines[0]
        run.hang(0)
        check(await asyncio.gather(*tasks), tokens=20)
        await asyncio.sleep(10)
        assert old.gone.is_set()
        assert run.client.engines[0] is not old and run.supervisor.restarts == 1


@pytest.mark.parametrize("end", ["kill", "hang"])
@virtual_time
async def test_an_engine_that_fails_in_a_sync_is_left_out_and_gets_the_new_version_afterwards(
    end: str,
) -> None:
    async with Run() as run:
        tasks = ask(run, 4, tokens=30)
        await asyncio.sleep(3.3)
        sync = asyncio.create_task(run.sync())
        await asyncio.sleep(0.2)
        getattr(run, end)(1)
        await sync
        check(await asyncio.gather(*tasks), tokens=30)
        await asyncio.sleep(10)
        assert [engine.version for engine in run.client.engines] == [1, 1]
        assert "update 1" in run.client.engines[1].calls


@virtual_time
async def test_engines_send_heartbeats_in_time_however_many_there_are_and_few_of_them_their_tokens() -> (
    None
):
    count, seconds = 300, 41
    async with Run(engines=count) as run:
        await asyncio.sleep(seconds)
        asked = [
            [name for name in engine.calls if name in ("progress", "stats")]
            for engine in run.client.engines
        ]
    assert min(map(len, asked)) >= seconds // 2 - 2, "every heartbeat_s"
    tokens = [names.count("progress") for names in asked]
    assert min(tokens) >= 1 and sum(tokens) <= POLLED_PER_S * seconds + count
    assert max(tokens) - min(tokens) <= 1, "all in turn"


@virtual_time
async def test_a_replacement_engine_is_paused_if_the_others_are() -> None:
    async with Run() as run:
        run.kill(1)
        await asyncio.sleep(2.5)  # a heartbeat has found it
        await run.client.pause("keep")
        await asyncio.sleep(10)
        assert not run.client.engines[1].running.is_set()
        await run.client.resume()
        assert run.client.engines[1].running.is_set()


@virtual_time
async def test_when_all_restarts_are_used_the_run_ends_with_the_error_of_the_engine() -> None:
    async with Run(restarts=2) as run:
        tasks = ask(run, 2, tokens=99)
        for _ in range(3):
            await asyncio.sleep(8.5)
            run.kill(1)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(error) for error in found] == ["the actor failed"] * 2
        assert "generator.max_engine_restarts" in found[0].__notes__[-1]
        with pytest.raises(EngineFailedError, match="the actor failed"):
            await run.client.pause("keep")


@virtual_time
async def test_restarts_are_counted_by_the_hour() -> None:
    async with Run(restarts=1) as run:
        for _ in range(3):
            run.kill(1)
            await asyncio.sleep(3700)
        check(await asyncio.gather(*ask(run, 2)))
        assert run.supervisor.restarts == 3


@virtual_time
async def test_a_replacement_engine_that_fails_while_it_loads_costs_another_restart() -> None:
    async with Run(restarts=3) as run:
        run.machine.broken_starts = 2
        run.kill(1)
        await asyncio.sleep(30)
        assert run.supervisor.restarts == 1 and run.machine.made == 2 + 3
        run.kill(0)
        await asyncio.sleep(5)
        with pytest.raises(EngineFailedError):
            await run.client.stats()


@virtual_time
async def test_weights_that_do_not_arrive_in_a_replacement_engine_end_the_run() -> None:
    async with Run() as run:
        run.weights.fault = WeightSyncError("the engine received other bytes")
        run.kill(1)
        await asyncio.sleep(10)
        with pytest.raises(WeightSyncError, match="other bytes"):
            await run.client.resume()


@virtual_time
async def test_without_another_engine_the_failure_is_the_error_of_the_engines_requests() -> None:
    run = Run()
    tasks = ask(run, 4)
    await asyncio.sleep(2.5)
    run.kill(1)
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(answer, EngineFailedError) for answer in found] == [False, True, False, True]


@virtual_time
async def test_an_engine_without_progress_is_alive_while_it_answers_and_its_requests_start_again() -> (
    None
):
    class Silent(Engine):
        progress = InferenceEngine.progress

    run = Run()
    run.client.engines[1] = Silent(run.machine)
    async with run:
        tasks = ask(run, 4)
        await asyncio.sleep(6.5)
        assert "stats" in run.client.engines[1].calls
        run.kill(1)
        check(await asyncio.gather(*tasks))


@virtual_time
async def test_a_failed_engine_has_no_counters_and_gets_no_scoring_request() -> None:
    async with Run() as run:
        run.kill(1)
        assert [s.generated_tokens for s in await run.client.stats()] == [7, 0]
        assert len(await run.client.score([[1, 2]])) == 1


@virtual_time
async def test_a_request_that_waits_for_an_engine_can_be_ended() -> None:
    async with Run(engines=1) as run:
        tasks = ask(run, 1)
        await asyncio.sleep(2.5)
        run.kill(0)
        await asyncio.sleep(1.5)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await asyncio.shield(tasks[0])
        await run.client.abort(["r0"])
        assert (await tasks[0]).finish_reason == "abort"


class Loading(Engine):
    """Like vLLM's core it reports no progress while it loads, but its process answers."""

    load_s = 30.0

    async def progress(self):
        async with self.loads:
            return await super().progress()

    async def update_weights(self, update):
        async with self.loads:
            ending = asyncio.create_task(self.gone.wait())
            await asyncio.wait({ending}, timeout=self.load_s)
            ending.cancel()
            await super().update_weights(update)

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.loads = asyncio.Lock()


@pytest.mark.parametrize("members", [{}, {"members": [0, 1]}], ids=["each", "together"])
@virtual_time
async def test_an_engine_that_loads_for_longer_than_a_heartbeats_limit_is_healthy(
    members: dict,
) -> None:
    run = Run()
    run.client.engines[:] = [Loading(run.machine), Loading(run.machine)]
    async with run:
        tasks = ask(run, 4)
        await asyncio.sleep(3)
        await run.client.update_weights(WeightUpdate(1, "nccl", members))
        check(await asyncio.gather(*tasks))
        assert run.supervisor.failures == 0 and [
            engine.version for engine in run.client.engines
        ] == [1, 1]


@virtual_time
async def test_an_engine_that_hangs_while_it_loads_and_one_whose_update_was_given_up_have_failed() -> (
    None
):
    run = Run()
    run.client.engines[:] = [Loading(run.machine), Loading(run.machine)]
    async with run:
        update = asyncio.create_task(
            run.client.update_weights(WeightUpdate(1, "shared_memory", {}))
        )
        await asyncio.sleep(3)
        run.hang(1)
        await update
        assert run.supervisor.failures == 1
        await asyncio.sleep(20)
        stuck = run.client.engines[0]
        stuck.load_s = 1e6
        update = asyncio.create_task(
            run.client.update_weights(WeightUpdate(2, "shared_memory", {}))
        )
        blocked = asyncio.create_task(
            stuck.update_weights(WeightUpdate(2, "shared_memory", {}))
        )  # remains in it
        await asyncio.sleep(1)
        update.cancel()
        await asyncio.sleep(15)
        assert stuck.gone.is_set() and run.client.engines[0] is not stuck
        await asyncio.gather(blocked, return_exceptions=True)


EVENTS = st.lists(
    st.tuples(
        st.floats(0.0, 30.0),
        st.sampled_from(["kill 0", "kill 1", "hang 0", "hang 1", "keep", "recompute"]),
    ),
    max_size=8,
)


@settings(max_examples=100)
@example(
    events=[(1e-283, "recompute")], starts=[1e-90, 1e-116, 1e-283]
)  # a request at the moment of an interruption
@given(events=EVENTS, starts=st.lists(st.floats(0.0, 12.0), min_size=1, max_size=6))
def test_whenever_engines_die_every_request_is_answered_once_and_whole(events, starts) -> None:
    async def play() -> None:
        async with Run() as run:
            sampling = SamplingParams(max_tokens=12)

            async def one(index: int, after: float) -> GenerationOutput:
                await asyncio.sleep(after)
                return await run.client.generate(
                    GenerationRequest(f"r{index}", [1] * PROMPT, sampling)
                )

            async def happen(after: float, what: str) -> None:
                await asyncio.sleep(after)
                name, _, index = what.partition(" ")
                if index:
                    getattr(run, name)(int(index))
                else:
                    async with one_sync:
                        await run.sync(name)

            one_sync = asyncio.Lock()
            tasks = [asyncio.create_task(one(i, after)) for i, after in enumerate(starts)]
            await asyncio.gather(*(happen(after, what) for after, what in events))
            check(await asyncio.gather(*tasks))
            await asyncio.sleep(60)
            assert {engine.version for engine in run.client.engines} == {run.weights.version}
            assert run.client.pool.router.in_flight.tolist() == [0, 0]
            assert not run.client._inflight and not run.client._cut

    run_virtual(play())
