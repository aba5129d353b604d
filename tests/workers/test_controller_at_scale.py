"""The controller's own work at 1,024 engines and 4,096 ranks: linear in each, and nothing grows with their product.

Client, rank group, dispatch and weight sync are the run's own. Ray and the processes behind it are stand-ins that
answer at once: what is counted, and timed, is the controller's code.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from skyasync.config.schema import Config
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import (
    EngineConfig,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
    InferenceEngine,
    SamplingParams,
)
from skyasync.models import MeshShape
from skyasync.weight_sync.sync import WeightSync
from skyasync.weight_sync.transfers.shared_memory import SharedMemoryTransfer
from skyasync.workers import rank_actors
from skyasync.workers import ranks as ranks_module
from skyasync.workers.dispatch import Dispatch
from skyasync.workers.ranks import RankGroup, WorkerPlacement
from skyasync.workers.roles import POLICY, ROLES
from tests.models.test_batch import batch

PROBE = [[1, 2, 3]]
REQUESTS = 256


class Engine(InferenceEngine):
    def __init__(self, calls: Counter[str]) -> None:
        super().__init__(EngineConfig("m"))
        self.calls = calls

    async def start(self) -> None: ...

    async def generate(self, requests: Any) -> Any:
        self.calls["generate"] += 1
        yield [GenerationOutput(each.request_id, [1], [-1.0], [0], "stop") for each in requests]

    async def heartbeat(self) -> None:
        self.calls["heartbeat"] += 1

    async def progress(self) -> list[GenerationOutput]:
        self.calls["progress"] += 1
        return []

    async def score(self, sequences: Any) -> list[list[float]]:
        self.calls["engine score"] += 1
        return [[-1.0, -2.0]]

    async def pause(self, mode: Any = "keep") -> None:
        self.calls["pause"] += 1

    async def resume(self) -> None:
        self.calls["resume"] += 1

    async def abort(self, request_ids: Any = None) -> None: ...

    async def update_weights(self, update: Any) -> list[str]:
        self.calls["update_weights"] += 1
        return []

    async def sleep(self) -> None: ...

    async def wake(self, part: Any) -> None: ...

    async def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 1 << 20)

    async def shutdown(self) -> None: ...


class Ray:
    """What ``RankGroup`` asks of Ray: actors that answer at once."""

    def __init__(self, calls: Counter[str]) -> None:
        self.calls, self.made = calls, 0

    def remote(self, **_: Any) -> Callable[[type], Any]:
        return lambda cls: SimpleNamespace(
            options=lambda **_: SimpleNamespace(remote=lambda *_: self.actor())
        )

    def actor(self) -> Any:
        rank = self.made
        self.made += 1

        def call(method: str, *args: Any) -> asyncio.Future[Any]:
            name = "/".join([method, *(arg for arg in args[:2] if isinstance(arg, str))])
            self.calls[name] += 1
            answers: dict[str, Any] = {
                "score": [[-1.0, -2.0]],
                "transfer_weights": None if rank else {"path": "p"},
            }
            done = asyncio.get_running_loop().create_future()
            done.set_result(answers.get(method))
            return done

        return SimpleNamespace(call=SimpleNamespace(remote=call))

    def put(self, shard: Any) -> Any:
        self.calls["put"] += 1
        return shard


def step(
    engines: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Counter[str], int, float]:
    """Calls of engines and ranks, of Python functions, and processor seconds of one step."""
    calls: Counter[str] = Counter()
    for module in (ranks_module, rank_actors):
        monkeypatch.setattr(module, "ray", Ray(calls))
    placement = WorkerPlacement(None, range(ranks))  # type: ignore[arg-type]
    group = RankGroup(ROLES[POLICY], placement)
    group._mesh_shape = MeshShape(ranks)
    dispatch = Dispatch(Config(), {POLICY: group}, SharedMemoryTransfer(group, computed_on=False))
    whole = batch([5] * ranks)
    entered = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal entered
        entered += event == "call"

    async def controller() -> float:
        client = InferenceClient([Engine(calls) for _ in range(engines)])
        await client.start()
        sync = WeightSync(dispatch, client, PROBE, tolerance=1.0)
        calls.clear()
        began = time.thread_time()
        sys.setprofile(count)
        sampling = SamplingParams(max_tokens=4)
        requests = [GenerationRequest(str(i), [1, 2], sampling) for i in range(REQUESTS)]
        await asyncio.gather(*map(client.generate, requests))
        await group.on_rows("forward_backward", whole)
        await dispatch.call(POLICY, "optimizer_step")
        await client.pause()
        await sync.sync(1)
        await client.resume()
        await sync.verify(1)
        sys.setprofile(None)
        return time.thread_time() - began

    try:
        seconds = asyncio.run(controller())
    finally:
        sys.setprofile(None)
    return calls, entered, seconds


def test_no_work_of_the_controller_grows_with_engines_times_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = {(e, r): step(e, r, monkeypatch)[1] for e in (64, 128) for r in (128, 256)}
    both = counted[128, 256] - counted[128, 128] - counted[64, 256] + counted[64, 128]
    assert abs(both) < 0.005 * counted[64, 128], counted


@pytest.mark.matrix
def test_1024_engines_and_4096_ranks_are_each_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, ranks = 1024, 4096
    calls, entered, seconds = step(engines, ranks, monkeypatch)
    print(f"{entered:,} calls of functions, {seconds:.2f} CPU s with counting")
    of_engines = {
        name: calls[name] for name in ("pause", "update_weights", "resume", "engine score")
    }
    assert set(of_engines.values()) == {engines}, of_engines
    of_ranks = {name: calls[name] for name in ("forward_backward", "optimizer_step", "put")}
    assert set(of_ranks.values()) == {ranks}, of_ranks
    assert max(calls.values()) == ranks
    assert entered < 400 * (engines + ranks)
