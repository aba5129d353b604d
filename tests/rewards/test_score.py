"""Allowed results of a reward function."""

import math

import numpy as np
import pytest

from skyasync.envs.base import check_metrics
from skyasync.errors import NonFiniteRewardError, UserError
from skyasync.rewards.signature import Score, as_score


@pytest.mark.parametrize(
    ("returned", "score"),
    [
        (1, Score(1.0)),
        (0.25, Score(0.25)),
        (np.float32(0.5), Score(0.5)),
        ({"reward": 1}, Score(1.0)),
        ({"score": 0.5}, Score(0.5)),
        ({"reward": 1, "score": 0.5, "length": 3}, Score(1.0, {"score": 0.5, "length": 3.0})),
    ],
)
def test_a_number_or_a_mapping_with_one(returned, score):
    assert as_score("f", returned) == score


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            math.nan,
            r"^reward function f is nan: it must be a finite number or a mapping with the key 'reward'$",
        ),
        (math.inf, "f is inf: it must be a finite number"),
        ("good", "f is 'good': it must be a finite number"),
        (None, "f is None: it must be a finite number"),
        (True, r"f is True: write float\(True\)"),
        ([1.0], r"f is \[1.0\]: it must be a finite number"),
        ({}, "f returned a mapping without 'reward' or 'score'; it has: nothing"),
        (
            {"rewrd": 1.0},
            r"without 'reward' or 'score' \(did you mean 'reward' by 'rewrd'\?\); it has: rewrd",
        ),
        ({"reward": None}, "'reward' of reward function f is None: it must be a finite number"),
        (
            {"reward": 1.0, "why": "good"},
            "'why' of reward function f is 'good': it must be a finite number",
        ),
        ({"reward": 1.0, "n": math.nan}, "'n' of reward function f is nan"),
        (
            {"reward": 1.0, "k" * 10_000_000: 2.0},
            "which is no metric's name: it has 10000000 characters",
        ),
        ({"reward": 1.0, "a\nb": 2.0}, r"a number named 'a\\nb', which is no metric's name"),
        (
            {"reward": 1.0} | {f"m{number}": 1.0 for number in range(300)},
            "f returned 301 numbers; 256 are the most",
        ),
    ],
)
def test_anything_else_is_refused_by_the_functions_name(returned, message):
    with pytest.raises(UserError, match=message):
        as_score("f", returned)


@pytest.mark.parametrize(
    "digits", [400, 5000]
)  # beyond a float, and beyond what Python writes as text
def test_an_integer_that_no_float_holds_is_one_line(digits):
    for value in (10**digits, -(10**digits)):
        with pytest.raises(
            NonFiniteRewardError, match=r"f is an integer of \d+ bits: it must be a finite number"
        ):
            as_score("f", value)
        with pytest.raises(NonFiniteRewardError, match=r"the metric m is an integer of \d+ bits"):
            check_metrics({"m": value})
