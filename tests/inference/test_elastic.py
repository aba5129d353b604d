"""Engines that join and leave a run: every request has one complete answer (in simulation)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyasync.errors import UserError
from skyasync.inference.elastic import (
    ElasticEngines,
    read_engine_list,
    write_engine_list,
    wrong_name,
)
from skyasync.inference.interface import EngineFailedError, GenerationRequest, SamplingParams
from skyasync.weight_sync.sync import WeightSync
from skyasync.weight_sync.transfers.broadcast import BroadcastTransfer
from skyasync.weight_sync.update import WeightSyncError
from tests.inference.test_supervisor import Engine, Run, ask, check
from tests.virtual_time import virtual_time


class Changing(Run):
    """Two engines named 0 and 1, and an engine list file."""

    def __init__(self, folder: Path, engines: int = 2, names: tuple[str, ...] = ()) -> None:
        super().__init__(engines)
        self.file = folder / "engines.txt"
        self.made: dict[str, Engine] = {}
        self.refusals: list[Exception] = []
        self.membership = ElasticEngines(
            self.client, self.weights, self.supervisor, self.make, names or [str(i) for i in range(engines)], self.file,
            interval_s=1.0, limit_s=60.0,
        )  # fmt: skip

    async def make(self, name: str) -> Any:
        if self.refusals:
            raise self.refusals.pop(0)
        self.made[name] = Engine(self.machine)
        return self.made[name]

    async def __aenter__(self) -> Changing:
        await super().__aenter__()
        self.membership.on_start(None)  # type: ignore[arg-type]
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.membership.close()
        await super().__aexit__(*error)

    def want(self, *names: str) -> None:
        write_engine_list(self.file, names)

    @property
    def healthy(self) -> list[int]:
        return self.client.pool.healthy


def warnings_of(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


@virtual_time
async def test_one_that_joins_has_the_others_weights_before_it_gets_requests(
    tmp_path: Path,
) -> None:
    async with Changing(tmp_path) as run:
        await run.sync()
        tasks = ask(run, 4, tokens=30)
        run.want("0", "1", "2")
        await asyncio.sleep(6)
        assert run.healthy == [0, 1, 2]
        joined = run.made["2"]
        assert joined.version == 1 and joined.calls[0] == "update 1"
        more = [asyncio.create_task(run.client.generate(task)) for task in requests("m", 3)]
        await asyncio.sleep(2)
        assert run.client.pool.router.in_flight[2] >= 2, "the idlest engine gets the next requests"
        check(await asyncio.gather(*tasks), tokens=30)
        assert all(len(answer.token_ids) == 12 for answer in await asyncio.gather(*more))
        await run.sync()
        assert joined.version == 2
        metrics: dict[str, float] = {}
        run.membership.on_step_end(None, metrics)  # type: ignore[arg-type]
        assert metrics == {"engines/joined": 1.0, "engines/left": 0.0, "engines/alive": 3.0}
    assert not run.file.exists()


@virtual_time
async def test_what_a_leaving_one_has_goes_on_at_the_others_and_no_token_is_made_twice(
    tmp_path: Path,
) -> None:
    async with Changing(tmp_path) as run:
        tasks = ask(run, 6, tokens=20)
        await asyncio.sleep(7.5)
        run.want("1")
        await asyncio.sleep(2)
        assert run.healthy == [1] and run.client.engines[0].gone.is_set()
        check(await asyncio.gather(*tasks), tokens=20)
        await run.sync()
        assert run.machine.killed == 0 and run.supervisor.failures == 0, "leaving is no failure"
        assert asyncio.get_running_loop().time() < 60


class Ranks:
    """Of a policy that sends by NCCL, in which a failure ends them."""

    lost = ""

    async def call(self, method: str, *args: Any) -> list[Any]:
        if method == "node":
            return [("here", "127.0.0.1")]
        await asyncio.sleep(1)
        return [""]

    async def call_first(self, method: str, *args: Any) -> dict[str, Any]:
        return {}

    def give_up(self, reason: str, cause: BaseException | None = None) -> None:
        self.lost = reason


@virtual_time
async def test_one_that_shall_leave_during_a_sync_gets_its_weights_and_leaves_afterwards(
    tmp_path: Path,
) -> None:
    async with Changing(tmp_path, engines=3) as run:
        ranks, source = Ranks(), SimpleNamespace()
        source.transfer = BroadcastTransfer(ranks, 1, lambda: run.client.pool.awake)
        sync = run.membership._weights = WeightSync(source, run.client, ())
        tasks = ask(run, 6, tokens=40)

        @asynccontextmanager
        async def paused() -> AsyncIterator[None]:
            run.want("0", "2")
            await asyncio.sleep(5)
            yield

        leaving = run.client.engines[1]
        await sync.sync(1, paused)
        assert ranks.lost == "" and leaving.version == 1 and run.supervisor.failures == 0
        await asyncio.sleep(2)
        assert run.healthy == [0, 2] and leaving.gone.is_set()
        await sync.sync(2)
        assert [run.client.engines[index].version for index in run.healthy] == [2, 2]
        check(await asyncio.gather(*tasks), tokens=40)


@virtual_time
async def test_no_sync_begins_while_one_leaves(tmp_path: Path) -> None:
    async with Changing(tmp_path) as run:
        tasks = ask(run, 4, tokens=20)
        await asyncio.sleep(2.5)
        run.hang(0)
        run.want("1")
        await asyncio.sleep(1)
        await run.sync()
        assert (
            run.membership.left == 1 and run.healthy == [1] and run.client.engines[1].version == 1
        )
        check(await asyncio.gather(*tasks), tokens=20)


@virtual_time
async def test_an_engine_that_hangs_or_fails_while_it_leaves_is_not_waited_for(
    tmp_path: Path,
) -> None:
    async with Changing(tmp_path, engines=3) as run:
        tasks = ask(run, 9, tokens=20)
        await asyncio.sleep(5.5)
        run.hang(0)
        run.kill(1)
        run.want("2")
        check(await asyncio.gather(*tasks), tokens=20)
        await asyncio.sleep(60)
        assert run.healthy == [2]


@virtual_time
async def test_a_failed_engine_may_leave_and_is_not_restarted(tmp_path: Path) -> None:
    async with Changing(tmp_path) as run:
        tasks = ask(run, 2)
        await asyncio.sleep(2.5)
        run.kill(0)
        run.want("1")
        check(await asyncio.gather(*tasks))
        await asyncio.sleep(30)
        assert run.healthy == [1] and run.supervisor.restarts == 0


@virtual_time
async def test_an_engine_that_joined_and_failed_is_replaced_like_others(tmp_path: Path) -> None:
    async with Changing(tmp_path) as run:
        run.want("0", "1", "x")
        await asyncio.sleep(6)
        tasks = ask(run, 6)
        await asyncio.sleep(1.5)
        run.kill(2)
        check(await asyncio.gather(*tasks))
        await asyncio.sleep(20)
        assert run.healthy == [0, 1, 2] and (run.supervisor.failures, run.supervisor.restarts) == (
            1,
            1,
        )


@virtual_time
async def test_one_comes_and_goes_many_times_in_a_busy_run(tmp_path: Path) -> None:
    async with Changing(tmp_path) as run:
        tasks = ask(run, 12, tokens=60)
        for turn in range(6):
            run.want("1", "2", "3") if turn % 2 else run.want("0" if turn == 0 else "4", "1")
            await asyncio.sleep(4)
            await run.sync("recompute" if turn % 3 == 0 else "keep")
        check(await asyncio.gather(*tasks), tokens=60)
        assert run.membership.left >= 4 and run.membership.joined >= 4


@virtual_time
async def test_the_last_one_stays_until_another_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with Changing(tmp_path, engines=1) as run:
        run.refusals = [UserError("no room")]
        run.want("1")
        await asyncio.sleep(10)
        assert run.healthy == [0]
        assert "engine 0 stays: it is the last healthy one" in warnings_of(caplog)
        assert (
            "engine 1 could not join and is left out until engines.txt changes: no room"
            in warnings_of(caplog)
        )
        run.want("1", "1", "# a word")
        await asyncio.sleep(10)
        assert run.healthy == [1]


@virtual_time
async def test_a_server_that_cannot_join_yet_is_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    first, second = "http://a:1", "http://b:2"
    async with Changing(tmp_path, engines=1, names=(f"{first}/",)) as run:
        run.refusals = [
            UserError("it does not answer"),
            EngineFailedError("it failed"),
            WeightSyncError("digests differ"),
        ]
        run.want(first, second, "3")
        await asyncio.sleep(150)
        assert run.healthy == [0, 1] and run.made[second].version == 0
        assert warnings_of(caplog).count("could not join") == 3
        assert "'3' is not the address of a server" in warnings_of(caplog)


@virtual_time
async def test_a_joining_engine_with_wrong_weights_is_shut_down_and_the_run_continues(
    tmp_path: Path,
) -> None:
    async with Changing(tmp_path) as run:
        run.weights.fault = WeightSyncError("it does not hold what was sent")
        run.want("0", "1", "2")
        await asyncio.sleep(8)
        assert run.healthy == [0, 1] and run.made["2"].gone.is_set()
        check(await asyncio.gather(*ask(run, 2)))


@virtual_time
async def test_a_file_that_is_gone_or_empty_changes_nothing(tmp_path: Path) -> None:
    async with Changing(tmp_path) as run:
        for text in ("", "# 0\n", "\xff"):
            run.file.write_text(text, encoding="latin-1")
            await asyncio.sleep(3)
        run.file.unlink()
        await asyncio.sleep(3)
        assert run.healthy == [0, 1]


def test_names() -> None:
    assert read_engine_list("# x\n0\n 0 \nhttp://a:1/ # one\n\n") == ["0", "http://a:1"]
    assert not wrong_name("3", servers=False) and not wrong_name("http://a:1", servers=True)
    assert (
        wrong_name("http://a:1", servers=False)
        and wrong_name("a b", servers=False)
        and wrong_name("3", servers=True)
    )


def requests(name: str, count: int) -> list[Any]:
    return [
        GenerationRequest(f"{name}{i}", [1] * 4, SamplingParams(max_tokens=12))
        for i in range(count)
    ]
