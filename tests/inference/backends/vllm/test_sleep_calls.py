"""vLLM's sleep and wake-up in two steps: the calls that its core receives. It really sleeps on a GPU only."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from skyasync.inference.backends.vllm.engine import VLLMEngine
from skyasync.inference.interface import EngineConfig
from skyasync.weight_sync.update import WeightUpdate

pytestmark = pytest.mark.vllm


class Recorder:
    """Records every call of vLLM's ``AsyncLLM`` and of its core."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        if name == "engine_core":
            return self

        async def noted(*args: Any, **kwargs: Any) -> list[str]:
            if name != "collective_rpc":  # asks the workers which layers they could not compare
                said = [str(a) for a in args if isinstance(a, list)] + [
                    f"{k}={v}" for k, v in kwargs.items()
                ]
                self._calls.append(" ".join([name, *said]))
            return []

        return noted


def recorded(monkeypatch: pytest.MonkeyPatch) -> tuple[VLLMEngine, list[str]]:
    calls: list[str] = []
    engine = VLLMEngine(EngineConfig("m", extra={"sleep_mode": True}))
    monkeypatch.setattr(type(engine), "llm", Recorder(calls))

    async def call(answer: Any) -> Any:
        return await answer

    monkeypatch.setattr(engine, "call", call)
    engine.cpu = False
    return engine, calls


async def test_weights_are_updated_between_the_two_steps_and_nothing_is_scheduled_before_the_second(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine, calls = recorded(monkeypatch)
    save_file({"weight": torch.ones(1)}, tmp_path / "weights")
    update = WeightUpdate(1, "shared_memory", {"path": str(tmp_path / "weights")})
    await engine.sleep()
    await engine.wake("weights")
    await engine.update_weights(update)
    await engine.wake("cache")
    assert calls == [
        "sleep level=2 mode=wait",
        "wake_up ['weights']",
        "start_weight_update",
        "update_weights",
        "finish_weight_update weight_version=1",
        "abort []",
        "wake_up ['kv_cache']",
    ]
    calls.clear()
    await engine.update_weights(update)  # after the wake-up: paused around the update, as usual
    assert calls[0].startswith("pause_scheduler_async")
    assert calls[-1] == "resume_generation"


async def test_an_update_that_is_cancelled_ends_first_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM accepts no update while another one is open."""
    engine, calls = recorded(monkeypatch)
    save_file({"weight": torch.ones(1)}, tmp_path / "weights")
    updating = asyncio.create_task(
        engine.update_weights(WeightUpdate(1, "shared_memory", {"path": str(tmp_path / "weights")}))
    )
    while "start_weight_update" not in calls:  # noqa: ASYNC110
        await asyncio.sleep(0)
    updating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await updating
    assert calls[-2:] == ["finish_weight_update weight_version=1", "resume_generation"]


def test_vllm_wakes_by_these_tags() -> None:
    from vllm.v1.executor.abstract import SLEEP_TAGS

    from skyasync.inference.backends.vllm.engine import VLLM_TAGS

    assert set(VLLM_TAGS.values()) == set(SLEEP_TAGS)
