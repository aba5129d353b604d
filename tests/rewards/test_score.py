"""Allowed results of a reward function."""

import math

import numpy as np
import pytest

from skyasync.errors import UserError
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
        (math.nan, r"^reward function f is nan: it must be a finite number or a mapping with the key 'reward'$"),
        (math.inf, "f is inf: it must be a finite number"),
        ("good", "f is 'good': it must be a finite number"),
        (None, "f is None: it must be a finite number"),
        (True, r"f is True: write float\(True\)"),
        ([1.0], r"f is \[1.0\]: it must be a finite number"),
        ({}, "f returned a mapping without 'reward' or 'score'; it has: nothing"),
        ({"rewrd": 1.0}, r"without 'reward' or 'score' \(did you mean 'reward' by 'rewrd'\?\); it has: rewrd"),
        ({"reward": None}, "'reward' of reward function f is None: it must be a finite number"),
        ({"reward": 1.0, "why": "good"}, "'why' of reward function f is 'good': it must be a finite number"),
        ({"reward": 1.0, "n": math.nan}, "'n' of reward function f is nan"),
    ],
)
def test_anything_else_is_refused_by_the_functions_name(returned, message):
    with pytest.raises(UserError, match=message):
        as_score("f", returned)
