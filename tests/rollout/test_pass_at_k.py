"""pass@k and maj@k against their definitions: every subset, counted."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from math import comb
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyasync.rollout.evaluation import MOST, majority_at, mean_scores, pass_at, prompt_scores
from skyasync.rollout.types import Group, Segment, Trajectory
from tests.rollout.episodes import action, prompt, trajectory

ANSWERS = st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.booleans()), min_size=1, max_size=9)


def by_hand(answers: list[str | None], right: list[bool], drawn: tuple[int, ...]) -> float:
    """Accuracy of one draw's winners: of all the prompt's samples with the same answer."""
    counts = Counter(answer for i in drawn if (answer := answers[i]) is not None)
    winners = [answer for answer, count in counts.items() if count == max(counts.values())]
    shares = [fmean(r for a, r in zip(answers, right, strict=True) if a == winner) for winner in winners]
    return fmean(shares) if shares else 0.0


@given(ANSWERS)
def test_both_are_means_over_all_subsets(samples: list[tuple[str | None, bool]]) -> None:
    answers, right = [answer for answer, _ in samples], [passes for _, passes in samples]
    n, rewards = len(samples), [float(passes) for passes in right]
    found = majority_at(range(1, n + 1), answers, right)
    for k in range(1, n + 1):
        subsets = list(combinations(range(n), k))
        assert pass_at(k, rewards) == pytest.approx(fmean(any(right[i] for i in each) for each in subsets))
        assert found[k] == pytest.approx(fmean(by_hand(answers, right, each) for each in subsets), abs=1e-12)


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
    answers, right = ["7", "7", "8", "9"], [True, True, False, False]
    assert majority_at([4], answers, right) == {4: 1.0}
    # of three: {7, 7, 8}, {7, 7, 9} are won by 7, the two {7, 8, 9} tie
    assert majority_at([3], answers, right)[3] == pytest.approx((1 + 1 + 1 / 3 + 1 / 3) / 4)
    assert majority_at([2, 3], [None, None, None], [True] * 3) == {2: 0.0, 3: 0.0}
    assert majority_at([2], [None, "7"], [False, True]) == {2: 1.0}


def test_many_samples_take_no_time_to_count() -> None:
    answers: list[str | None] = [str(number % 40) for number in range(256)]
    found = majority_at([2, 16, 128, 256], answers, [answer == "0" for answer in answers])
    assert found[2] == pytest.approx(7 / 256, abs=0.01)
    assert 0 < found[16] < found[128] and found[256] == pytest.approx(1 / 16)  # 16 of 40 answers have 7 votes
    many: list[str | None] = ["a"] * (MOST + 1)
    assert majority_at([2, MOST + 1], many, [True] * len(many)) == {MOST + 1: 1.0}


def group(row: int, *rewards: float, ended: int = 0) -> Group:
    played = [trajectory(action([1], reward), row=row, repetition=n) for n, reward in enumerate(rewards)]
    early = [Trajectory(played[0].id, [Segment("prompt", [1])], "abort") for _ in range(ended)]
    return Group(prompt(row), [*played, *early])


def test_of_fewer_samples_than_k_there_is_none() -> None:
    few = prompt_scores(group(0, 1.0, 0.0, ended=2), [1, 2, 4], answers=["a", "b"])
    assert few.passes == {1: 0.5, 2: 1.0} and set(few.majorities) == {2}
    many = prompt_scores(group(1, 1.0, 1.0, 0.0, 0.0), [1, 2, 4], answers=["a", "a", "b", "c"])
    assert set(mean_scores([few, many])) == {"pass@1", "pass@2", "maj@2"}
    assert mean_scores([many])["maj@4"] == 1.0
    assert mean_scores([]) == {}
