"""The streaming plan under random schedules: durations, failures and interruptions.

The plan is the real one, in simulation, where a deadlock is an error; only the tensors are left out. A run resumes from
the state that the former run saved, as from a checkpoint.

    SCHEDULES=10000 uv run --no-sync pytest tests/trainer/plans/test_schedules.py      # about a minute
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyasync.rollout.types import Group, PromptId, Rollout
from skyasync.simulate.clock import run_virtual
from skyasync.trainer.plans.fully_async import FullyAsyncRayPPOTrainer
from tests.trainer.plans.parts import make_run

QUICK = 300
THOROUGH = int(os.environ.get("SCHEDULES", "1000"))
DURATIONS = (0.0, 0.1, 1.0, 7.0, 60.0)


class Broken(Exception):
    pass


class Unlucky(FullyAsyncRayPPOTrainer):
    """Every part has random durations and failures."""

    def prepare(self, seed: int, failures: float, history: History) -> None:
        self.chance, self.failures, self.history = random.Random(seed), failures, history
        self.context.progress.resumed(*history.saved)
        self.context.progress.synced()
        self.submitted: dict[PromptId, int] = {}
        self.admitted_at: dict[PromptId, int] = {}

    async def happens(self) -> None:
        await asyncio.sleep(self.chance.choice(DURATIONS))
        if self.chance.random() < self.failures:
            raise Broken

    async def roll_out(
        self, prompts: Any, step: int | None = None
    ) -> tuple[list[Group], dict[str, float]]:
        for prompt in prompts:
            assert prompt.id not in self.admitted_at, "submitted twice"
            self.admitted_at[prompt.id] = self.policy_version
        async with self.weight_updates.gate.entered():
            await self.happens()
        return [Group(prompt, []) for prompt in prompts], {}

    def assemble(self, groups: Any, metrics: Any, positions: Any, rejected: Any = ()) -> Any:
        return Rollout(groups, positions)

    async def train_on(self, rollout: Any) -> dict[str, float]:
        await self.happens()
        self.history.ages.update(
            self.global_step - self.admitted_at[group.prompt.id] for group in rollout.groups
        )
        self.history.unsaved += [group.prompt.id for group in rollout.groups]
        self.context.progress.trained(rollout.positions)
        return {}

    async def async_sync_policy_weights_to_inference_engines(self) -> None:
        if not self.weight_updates.scheduled(final=self.global_step >= self.total_steps):
            return
        if self.cfg.trainer.partial_rollout == "wait":
            async with self.weight_updates.without_rollouts():
                await self.happens()
        else:
            await self.happens()
        self.context.progress.synced()

    async def end_step(self, status: dict[str, float]) -> None:
        await self.happens()
        if self.chance.random() < 0.5:
            self.history.save(
                (
                    self.global_step,
                    self.context.progress.position,
                    self.context.progress.trained_early,
                )
            )


class History:
    """Of a run and the runs that resumed it."""

    def __init__(self) -> None:
        self.saved: tuple[int, int, frozenset[int]] = (0, 0, frozenset())
        self.trained: list[PromptId] = []
        self.unsaved: list[PromptId] = []
        self.ages: Counter[int] = Counter()

    def save(self, state: tuple[int, int, frozenset[int]]) -> None:
        self.saved = state
        self.trained += self.unsaved
        self.unsaved = []


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, Any]:
    batch, staleness = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    interval = draw(st.integers(1, staleness + 1))
    slots = (staleness + 1) * batch
    return {
        "prompts": draw(st.integers(1, 10)),
        "trainer__epochs": draw(st.integers(1, 2)),
        "trainer__train_batch_size": batch,
        "trainer__max_staleness": staleness,
        "trainer__sync_interval": interval,
        "trainer__partial_rollout": draw(st.sampled_from(["keep", "wait"])),
        "generator__generate_batch_size": draw(
            st.sampled_from([0, min(interval * batch + 1, slots)])
        ),
        "generator__max_concurrent_rollouts": draw(st.integers(0, 2 * batch)),
    }


def play(settings_: dict[str, Any], seed: int, failures: float) -> None:
    """Run, and resume from the saved state, until a run finishes."""
    history, chance = History(), random.Random(seed)
    for attempt in range(1000):
        run = make_run(Unlucky, **settings_)
        run.trainer.prepare(chance.randrange(2**32), failures if attempt < 20 else 0.0, history)
        history.unsaved = []
        interrupted = attempt < 20 and chance.random() < failures * 4
        with suppress(Broken, asyncio.CancelledError):
            run_virtual(interruptible(run.trainer, chance.uniform(0, 200) if interrupted else None))
            break
        assert run.tracker.closed == 1
    history.save(history.saved)
    rows, epochs = range(settings_["prompts"]), range(settings_["trainer__epochs"])
    assert sorted(history.trained) == [PromptId(epoch, row) for epoch in epochs for row in rows]
    assert max(history.ages) <= settings_["trainer__max_staleness"]


async def interruptible(trainer: Any, after: float | None) -> None:
    task = asyncio.create_task(trainer.run())
    if after is not None:
        asyncio.get_running_loop().call_later(after, task.cancel)
    await task


@settings(max_examples=QUICK, deadline=None)
@given(schedules(), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.02, 0.1]))
def test_none_is_lost_or_trained_twice_or_too_old_and_nothing_jams(
    schedule: dict[str, Any], seed: int, failures: float
) -> None:
    play(schedule, seed, failures)


@pytest.mark.matrix
@pytest.mark.slow
@settings(max_examples=THOROUGH, deadline=None, database=None)
@given(schedules(), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.02, 0.1]))
def test_the_same_on_ten_thousand_schedules(
    schedule: dict[str, Any], seed: int, failures: float
) -> None:
    play(schedule, seed, failures)
