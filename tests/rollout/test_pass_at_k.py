"""pass@k against its definition (every subset, counted), and the majority of all samples."""

from __future__ import annotations

from itertools import combinations
from math import comb
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyasync.rollout.evaluation import majority, mean_scores, pass_at, prompt_scores
from skyasync.rollout.types import Group, Segment, Trajectory
from tests.rollout.episodes import action, prompt, trajectory


@given(st.lists(st.booleans(), min_size=1, max_size=9))
def test_pass_at_k_is_the_mean_over_all_subsets(right: list[bool]) -> None:
    rewards = [float(passes) for passes in right]
    for k in range(1, len(right) + 1):
        subsets = list(combinations(range(len(right)), k))
        assert pass_at(k, rewards) == pytest.approx(
            fmean(any(right[i] for i in each) for each in subsets)
        )


@given(st.lists(st.booleans(), min_size=2, max_size=20))
def test_more_samples_pass_no_less(right: list[bool]) -> None:
    rewards = [float(passes) for passes in right]
    series = [pass_at(k, rewards) for k in range(1, len(rewards) + 1)]
    assert series == sorted(series)
    assert series[0] == pytest.approx(fmean(rewards)) and series[-1] == float(any(right))


def test_chens_estimator_in_figures() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0]
    assert pass_at(1, rewards) == pytest.approx(0.4)
    assert pass_at(2, rewards) == pytest.approx(1 - comb(3, 2) / comb(5, 2))
    assert pass_at(4, rewards) == 1.0
    assert pass_at(5, [0.5] * 5) == 0.0 and pass_at(1, [0.5] * 5, passing=0.5) == 1.0
    for k in (0, 6):
        with pytest.raises(ValueError, match=f"pass@{k} of 5 samples: k is from 1"):
            pass_at(k, rewards)


def test_majorities_in_figures() -> None:
    assert majority(["7", "7", "8", "9"], [True, True, False, False]) == 1.0
    assert majority(["7", "8", "9"], [True, False, False]) == pytest.approx(1 / 3), "a tie"
    assert majority(["7", "7", "8"], [True, False, False]) == 0.5, (
        "a part of an answer's samples is correct"
    )
    assert majority([None, None, "7"], [False, False, True]) == 1.0
    assert majority([None, None, None], [True] * 3) == 0.0


def group(row: int, *rewards: float, ended: int = 0) -> Group:
    played = [
        trajectory(action([1], reward), row=row, repetition=n) for n, reward in enumerate(rewards)
    ]
    early = [Trajectory(played[0].id, [Segment("prompt", [1])], "abort") for _ in range(ended)]
    return Group(prompt(row), [*played, *early])


def test_of_fewer_samples_than_k_there_is_none() -> None:
    few = prompt_scores(group(0, 1.0, 0.0, ended=2), [1, 2, 4], answers=["a", "b"])
    assert few.passes == {1: 0.5, 2: 1.0} and set(few.majorities) == {2}
    many = prompt_scores(group(1, 1.0, 1.0, 0.0, 0.0), [1, 2, 4], answers=["a", "a", "b", "c"])
    assert set(mean_scores([few, many])) == {"pass@1", "pass@2"}, (
        "the prompts have other numbers of samples"
    )
    assert mean_scores([many])["maj@4"] == 1.0
    assert mean_scores([]) == {}
