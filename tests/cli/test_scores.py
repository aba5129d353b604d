"""The output of ``skyasync evaluate``: each mean with its error over prompts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from skyasync.cli.evaluate import scores
from skyasync.rollout.evaluation import prompt_scores
from skyasync.rollout.types import Group
from tests.rollout.episodes import action, prompt, trajectory


def group(row: int, *rewards: float, eval_set: str = "") -> Group:
    played = [trajectory(action([2], reward), row=row, repetition=n) for n, reward in enumerate(rewards)]
    return Group(replace(prompt(row), eval_set=eval_set), played)


def test_a_score_has_the_error_of_its_prompts() -> None:
    groups = [group(0, 1.0, 0.0), group(1, 1.0, 1.0)]
    found = scores(groups, [prompt_scores(each, [1, 2]) for each in groups])
    assert (found["eval/score"], found["eval/pass@1"], found["eval/pass@2"]) == (0.75, 0.75, 1.0)
    assert found["eval/score_error"] == pytest.approx(np.std([0.5, 1.0], ddof=1) / np.sqrt(2))


def test_a_set_has_its_own() -> None:
    groups = [group(0, 1.0), group(1, 1.0, eval_set="aime"), group(2, 0.0, eval_set="aime")]
    found = scores(groups, [prompt_scores(each, [1]) for each in groups])
    assert (found["eval/prompts"], found["eval/aime/prompts"], found["eval/aime/score"]) == (3, 2, 0.5)
    assert found["eval/aime/score_error"] == pytest.approx(np.std([1.0, 0.0], ddof=1) / np.sqrt(2))
