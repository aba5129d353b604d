"""What an evaluation says of the rewards: pass@k and the error of a score."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest

from skyasync.rollout.types import Group, Prompt, PromptId, Segment, Trajectory, TrajectoryId
from skyasync.tools.evaluate import pass_at, scores


def test_pass_at_k_is_the_share_of_draws_that_have_a_right_one() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0]
    assert pass_at(1, rewards) == pytest.approx(0.4)
    assert pass_at(2, rewards) == pytest.approx(1 - comb(3, 2) / comb(5, 2))
    assert pass_at(4, rewards) == 1.0
    assert pass_at(5, [0.5] * 5) == 0.0 and pass_at(1, [0.5] * 5, passing=0.5) == 1.0


def test_a_score_has_the_error_of_its_prompts() -> None:
    def group(row: int, *rewards: float) -> Group:
        prompt = Prompt(PromptId(-1, row), [], "env")
        return Group(prompt, [
            Trajectory(TrajectoryId(prompt.id, n), [Segment("prompt", [1]), Segment("action", [2], [0.0], [0], reward)])
            for n, reward in enumerate(rewards)
        ])  # fmt: skip

    found = scores([group(0, 1.0, 0.0), group(1, 1.0, 1.0)], [1, 2])
    assert (found["eval/score"], found["eval/pass@1"], found["eval/pass@2"]) == (0.75, 0.75, 1.0)
    assert found["eval/score_error"] == pytest.approx(np.std([0.5, 1.0], ddof=1) / np.sqrt(2))
