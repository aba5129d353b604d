"""Conclusions about the last sync from the tokens of a batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from skyasync.config import load_config
from skyasync.trainer.weight_updates import ENOUGH_TOKENS, WeightUpdates

PLENTY = {"staleness/tokens_0": float(ENOUGH_TOKENS), "gap/mean": 1e-6}


class Client:
    """Does as it is told."""

    async def cut(self) -> None: ...
    async def pause(self, mode: str) -> None: ...
    async def resume(self) -> None: ...


def conclusions(overrides: list[str]) -> tuple[WeightUpdates, list[tuple[int, float]]]:
    parts: Any = SimpleNamespace(step=3)
    context: Any = SimpleNamespace(
        cfg=load_config(overrides), client=Client(), progress=parts, phases=parts
    )
    updates = WeightUpdates(context)
    told: list[tuple[int, float]] = []
    sync: Any = SimpleNamespace(sampled=lambda version, gap: told.append((version, gap)))
    updates.weight_sync = sync
    return updates, told


@pytest.mark.parametrize(
    ("setting", "comparable"),
    [("top_k=-1", True), ("temperature=0.7", False), ("top_p=0.9", False), ("min_tokens=2", False)],
)
def test_tokens_are_compared_that_were_drawn_as_the_probe_is_scored(
    setting: str, comparable: bool
) -> None:
    updates, told = conclusions([f"generator.sampling_params.{setting}"])
    updates.check_sampled_tokens(PLENTY)
    assert told == [(3, 1e-6)] * comparable


@pytest.mark.parametrize("missing", [{"staleness/tokens_0": 255.0}, {"staleness/tokens_0": 0.0}])
def test_few_tokens_say_nothing(missing: dict[str, float]) -> None:
    updates, told = conclusions([])
    updates.check_sampled_tokens(PLENTY | missing)
    updates.check_sampled_tokens({"staleness/tokens_0": 1e6})
    assert told == []


@pytest.mark.parametrize(("kept", "comparable"), [("keep", False), ("recompute", True)])
async def test_tokens_that_read_caches_of_older_weights_prove_nothing(
    kept: str, comparable: bool
) -> None:
    updates, told = conclusions(["trainer.plan=fully_async", f"trainer.partial_rollout={kept}"])
    async with updates.engines_paused():
        pass
    updates.check_sampled_tokens(PLENTY)
    assert bool(told) is comparable
