"""Repeated samples: repetitions within chance raise no alarm, others raise one at once."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyasync.rollout.metrics import FALSE_ALARM, Repeats, count_repeats, repeat_metrics, repeat_warning, repeats_of
from skyasync.rollout.types import Group, PromptId, Segment, Trajectory, TrajectoryId
from tests.rollout.episodes import prompt

pytestmark = pytest.mark.slow

SIZES = {"groups": st.integers(1, 12), "size": st.integers(1, 16), "seed": st.integers(0, 2**32 - 1)}


def drawn(groups: int, size: int, seed: int, *, answers: int, sharpness: float) -> list[list[tuple[bytes, float]]]:
    """Independent samples from ``answers`` answers; the larger ``sharpness``, the more alike."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(groups):
        logits = sharpness * rng.standard_normal(answers)
        p = np.exp(logits - logits.max())
        p /= p.sum()
        chosen = rng.choice(answers, size=size, p=p)
        made.append([(bytes([c % 256, c // 256]), float(np.log(p[c]))) for c in chosen])
    return made


@settings(max_examples=300)
@given(**SIZES, answers=st.integers(1, 2000), sharpness=st.floats(0, 30))
def test_independent_samples_of_any_distribution_raise_no_alarm(
    groups: int, size: int, seed: int, answers: int, sharpness: float
) -> None:
    assert not count_repeats(drawn(groups, size, seed, answers=answers, sharpness=sharpness)).impossible


@settings(max_examples=60)
@given(**SIZES, answers=st.integers(1, 300), sharpness=st.floats(0, 10))
def test_what_is_expected_is_what_is_found_on_average(
    groups: int, size: int, seed: int, answers: int, sharpness: float
) -> None:
    """Over many groups; the difference is a martingale whose steps are at most 1."""
    many = count_repeats(drawn(100 * groups, size, seed, answers=answers, sharpness=sharpness))
    assert abs(many.repeated - many.expected) <= 8 * math.sqrt(many.samples)


@pytest.mark.matrix
def test_the_bound_holds_as_often_as_it_says() -> None:
    """Of 20,000 independent draws at most a share of 1/10 (1/100) may reach a surprise of 1 (2)."""
    surprises = [
        count_repeats(drawn(2, 6, seed, answers=1 + seed % 40, sharpness=seed % 5)).surprise for seed in range(20_000)
    ]
    assert np.mean(np.array(surprises) >= 1) <= 0.1
    assert np.mean(np.array(surprises) >= 2) <= 0.01


@given(size=st.integers(2, 16), logprob=st.floats(-500, -40))
def test_one_long_response_given_twice_is_an_alarm(size: int, logprob: float) -> None:
    group = [(bytes([i]), logprob) for i in range(size - 1)]
    once_more = count_repeats([[*group, group[0]]])
    assert (once_more.repeated, once_more.impossible) == (1, True)


@given(copies=st.integers(2, 64))
def test_a_policy_that_knows_one_answer_alone_repeats_it_without_alarm(copies: int) -> None:
    sure = count_repeats([[(b"42", math.log(0.999))] * copies])
    assert not sure.impossible
    assert sure.repeated == copies - 1
    assert sure.expected == pytest.approx(0.999 * (copies - 1))


def test_two_engines_with_one_random_stream_are_an_alarm_within_a_step() -> None:
    """Short answers too: eight prompts, half of each group of eight repeated, answers of probability 1/1000."""
    halves = [[(bytes([g, i]), math.log(1e-3)) for i in range(4)] for g in range(8)]
    repeats = count_repeats([half + half for half in halves])
    assert repeats.impossible
    assert repeats.repeated == 32
    assert "32 of 64 samples repeat another of their group" in repeat_warning(repeats)
    assert repeat_metrics(repeats)["warnings/repeated_samples"] == 1.0


def test_nothing_is_said_of_samples_without_probabilities_or_without_samples() -> None:
    assert count_repeats([]) == count_repeats([[(b"a", math.nan)] * 4]) == Repeats()
    assert repeat_metrics(Repeats()) == {}
    assert repeat_warning(Repeats()) == ""
    assert FALSE_ALARM < 1e-6


def trajectory(sample: int, *actions: list[int], asked: int = 1) -> Trajectory:
    segments = [Segment("action", tokens, [-3.0] * len(tokens), [0] * len(tokens)) for tokens in actions]
    return Trajectory(TrajectoryId(PromptId(0, 0), sample), [Segment("prompt", [asked]), *segments])


def test_a_trajectory_is_all_of_its_actions_and_empty_ones_do_not_count() -> None:
    asked = prompt(0, "any")
    same = Group(asked, [trajectory(i, [5] * 8, [6] * 8) for i in range(3)])
    split_differently = Group(
        asked, [trajectory(0, [5, 6], [7]), trajectory(1, [5], [6, 7]), trajectory(2), trajectory(3)]
    )
    assert repeats_of([same])[:2] == (3, 2)
    assert repeats_of([same]).impossible
    assert repeats_of([split_differently])[:2] == (2, 0)


def test_the_same_answer_to_another_question_is_no_repeat() -> None:
    """An environment may give each sample another prompt: then probabilities of one say nothing about the other."""
    asked_differently = Group(prompt(0, "any"), [trajectory(i, [5] * 8, asked=i) for i in range(4)])
    assert repeats_of([asked_differently])[:2] == (4, 0)
