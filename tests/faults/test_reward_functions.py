"""Runs whose reward functions hang, or end their process, in many calls at once."""

from __future__ import annotations

import pytest

from tests.end_to_end import leftovers
from tests.end_to_end.runs import PARTS, Train

pytestmark = [pytest.mark.slow, pytest.mark.fault]

REWARD = "hangs_or_exits_at_random"


def test_an_evaluation_outlives_a_reward_function_that_hangs_or_exits_in_most_calls(
    train: Train,
) -> None:
    """32 responses are evaluated; those that hang keep all reward workers for longer than a step may take."""
    run = train(
        "trainer.max_training_steps=1", "trainer.eval_before_train=true", "trainer.eval_interval=1",
        f"data.val_data={PARTS}:val_prompts", "environment.env_class=reward",
        f"environment.reward_funcs=tests.rewards.functions:{REWARD}",
        "environment.reward_timeout_s=1", "environment.step_timeout_s=1.2",
    )  # fmt: skip
    evaluated = run.result
    assert evaluated is not None
    (step,) = run.metrics
    assert 0.1 < evaluated["eval/score"] < 0.7, (
        "about two thirds of the responses have the reward 0"
    )
    assert step["reward/mean"] == pytest.approx(1.0 - step[f"env/{REWARD}/no_reward"])
    assert run.series("step") == [1]
    assert leftovers.none_soon(leftovers.of_the_cluster) == []
