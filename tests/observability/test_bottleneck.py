"""The sentence about the bottleneck names the slow part, for real plans in simulation."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest

from skyasync.observability.summary import summarise
from skyasync.rollout.types import GeneratorInput, Trajectory
from skyasync.simulate.clock import run_virtual
from skyasync.simulate.parts import VirtualGenerator
from skyasync.simulate.run import make_trainer
from skyasync.trainer.plans import PLANS
from tests.simulate.test_plans import config

STEPS = 12


class SlowRewards(VirtualGenerator):
    """The reward of each response takes some time."""

    judging_s = 0.0

    async def roll_out(self, input_batch: GeneratorInput) -> list[Trajectory]:
        trajectories = await super().roll_out(input_batch)
        await asyncio.sleep(self.judging_s)
        return trajectories


class Rows:
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append({"step": step, **metrics})

    def close(self) -> None: ...


def sentence(plan: str, judging_s: float = 0.0, checkpoint_s: float = 0.0, **settings: Any) -> str:
    """The sentence for a run whose batches take about 4 s of the engines and 1 s of the trainer."""

    async def run() -> list[dict[str, float]]:
        usual = {"train_s_per_token": 0.00015, "token_s": 0.01}
        trainer = make_trainer(config(steps=STEPS, **usual | settings), PLANS[plan])
        generator: Any = trainer.generator
        generator.__class__, generator.judging_s = SlowRewards, judging_s
        trainer.context.tracker = rows = Rows()

        async def save(*, patient: bool = True) -> None:
            with trainer.timed("checkpoint"):
                await asyncio.sleep(checkpoint_s)

        if checkpoint_s:
            trainer.context.schedule.reached = Mock(
                side_effect=lambda what, step: what == "checkpoint"
            )
            trainer.save_checkpoint = save  # type: ignore[method-assign,assignment]
        await trainer.run()
        return rows.rows

    return summarise(run_virtual(run())).limit


@pytest.mark.parametrize("plan", ["sync", "one_step_off"])
@pytest.mark.parametrize(
    ("slow", "named"),
    [
        ({"judging_s": 30.0}, "environments and reward functions are the bottleneck"),
        ({"token_s": 0.05}, "generation"),
        ({"train_s_per_token": 0.004}, "training"),
        ({"sync_s": 30.0}, "weight sync is the bottleneck"),
        ({"checkpoint_s": 30.0}, "saving checkpoints is the bottleneck"),
    ],
)
def test_the_part_that_was_made_slow_is_named(plan: str, slow: dict[str, Any], named: str) -> None:
    said = sentence(plan, **slow)
    assert said.startswith(named) or (plan == "sync" and f"take turns, {named} longer" in said), (
        said
    )


def test_a_plan_without_overlap_and_with_idle_sides_names_the_idle_time() -> None:
    row = {"step": 1, "time/step_s": 2.0, "idle/trainer": 0.79, "idle/engines": 0.79}
    assert summarise([row]).limit.startswith(
        "neither trainer nor engines worked for 58% of the time"
    )


def test_the_seven_rows_of_a_reward_that_takes_half_of_the_step() -> None:
    row = {"step": 1, "time/step_s": 1.42, "time/generate_s": 0.905, "time/train_s": 0.463}
    said = summarise([row | {"idle/trainer": 0.69, "idle/engines": 0.79}]).limit
    assert said.startswith(
        "environments and reward functions are the bottleneck: episodes waited for them in 43%"
    ), said
