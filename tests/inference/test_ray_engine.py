"""An engine in a Ray actor: its process answers, however many requests wait in it."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import Awaitable, Callable

import pytest
import ray.exceptions

from skyasync.errors import UserError
from skyasync.inference import ray_engine
from skyasync.inference.interface import (
    ENGINES,
    EngineConfig,
    EngineFailedError,
    GenerationRequest,
    InferenceEngine,
    SamplingParams,
)
from skyasync.inference.ray_engine import RayEngine
from skyasync.weight_sync.update import WeightUpdate

REQUESTS = 1_100  # each is one call; Ray's own limit of concurrent calls per actor is 1,000


@pytest.mark.matrix
@pytest.mark.slow
async def test_a_paused_engine_full_of_requests_can_be_resumed(
    ray_session: None, tied_model: str
) -> None:
    async def answer(number: int) -> int:
        request = GenerationRequest(str(number), [1, 2], SamplingParams(max_tokens=1))
        return sum([len(outputs) async for outputs in engine.generate([request])])

    engine = RayEngine("transformers", EngineConfig(tied_model, max_model_len=16, threads=1))
    await engine.start()
    try:
        await engine.pause("keep")
        answers = [asyncio.create_task(answer(number)) for number in range(REQUESTS)]
        async with asyncio.timeout(60):
            while (await engine.stats()).waiting < REQUESTS:
                pass  # lets the other tasks run
            await engine.resume()
            assert await asyncio.gather(*answers) == [1] * REQUESTS
        with pytest.raises(UserError, match="takes 1000 GPUs, and Ray has"):
            RayEngine.one_more([engine], [False], 1000)
        RayEngine.one_more([engine], [False], 1000, may_grow=True).kill()  # it waits for a node
    finally:
        await engine.shutdown()


class Loading(InferenceEngine):
    async def start(self) -> None: ...


async def test_garbage_collection_leaves_out_what_an_engine_has_loaded_at_its_start() -> None:
    actor = ray_engine._EngineActor("loading", {"loading": Loading})
    try:
        await actor.start(EngineConfig("model"))
        assert gc.get_freeze_count() > 10_000, "objects of imported libraries"
    finally:
        gc.unfreeze()
        ENGINES.pop("loading")


class Actors:
    """In place of Ray, without a free GPU."""

    def remote(self, *_: object) -> Actors:
        return self

    def options(self, **_: object) -> Actors:
        return self

    def kill(self, actor: object) -> None: ...

    def available_resources(self) -> dict[str, float]:
        return {}


def test_one_that_joins_takes_the_slot_of_one_that_has_left_and_not_of_one_that_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_engine, "ray", Actors())
    slots = [{"num_gpus": 1, "slot": number} for number in range(3)]
    engines = [
        RayEngine("transformers", EngineConfig("no model", max_model_len=16), slot)
        for slot in slots
    ]
    engines[0].kill()  # its replacement loads
    with pytest.raises(UserError, match="takes 1 GPUs, and Ray has 0 that are free"):
        RayEngine.one_more(engines, [False, False, False], 1)
    joined = RayEngine.one_more(engines, [False, False, True], 1)
    assert joined.options is slots[2]
    with pytest.raises(UserError, match="takes 1 GPUs"):
        RayEngine.one_more([*engines, joined], [False, False, True, False], 1)
    assert RayEngine.one_more([*engines, joined], [True, False, True, False], 1).options is slots[0]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "shutdown"])
async def test_every_call_of_an_engine_that_was_shut_down_fails(
    ray_session: None, end: str
) -> None:
    """A caller may have started its call before the engine was shut down: the call has to fail as well."""

    async def generate() -> None:
        async for _ in engine.generate([GenerationRequest("r", [1], SamplingParams())]):
            pass

    engine = RayEngine("transformers", EngineConfig("no model is loaded", max_model_len=16))
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "start": engine.start,
        "generate": generate,
        "heartbeat": engine.heartbeat,
        "progress": engine.progress,
        "score": lambda: engine.score([[1, 2]]),
        "pause": engine.pause,
        "resume": engine.resume,
        "abort": engine.abort,
        "update_weights": lambda: engine.update_weights(WeightUpdate(1, "shared_memory", {})),
        "sleep": engine.sleep,
        "wake": lambda: engine.wake("weights"),
        "stats": engine.stats,
    }
    own = {
        name
        for name, method in vars(RayEngine).items()
        if not name.startswith("_") and _is_remote_call(method)
    }
    assert calls.keys() == own - {"shutdown"}
    if end == "kill":
        engine.kill()
    await engine.shutdown()
    for name, call in calls.items():
        with pytest.raises(EngineFailedError, match="the transformers engine has been ended"):
            await call()
            pytest.fail(f"{name} was answered")


@pytest.mark.parametrize(
    "error",
    [ray.exceptions.RayActorError(), ray.exceptions.OutOfMemoryError("")],
    ids=["ended", "memory"],
)
def test_an_engine_whose_process_ended_or_was_ended_for_its_memory_has_failed(
    error: Exception,
) -> None:
    engine = object.__new__(RayEngine)
    engine._actor = object()
    with pytest.raises(EngineFailedError), engine._alive():
        raise error


def _is_remote_call(method: object) -> bool:
    return inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
