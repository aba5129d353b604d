"""A group of trajectories: its rewards and metrics."""

import pytest

from skyasync.errors import UserError
from skyasync.rollout.types import Group
from tests.rollout.episodes import action, prompt, trajectory


def group(*pairs):
    """A reward and metrics for each trajectory."""
    found = [
        trajectory(action([7], reward), repetition=number)
        for number, (reward, _) in enumerate(pairs)
    ]
    for each, (_, metrics) in zip(found, pairs, strict=True):
        each.metrics = metrics
    return Group(prompt(0), found)


def test_without_a_metric_it_is_the_rewards():
    assert group((1.0, {"score": 0.25}), (0.0, {})).metric_values("") == [1.0, 0.0]


def test_a_metric_takes_the_rewards_place_except_where_an_episode_was_given_up():
    assert group((1.0, {"score": 0.25}), (-1.0, {"given_up": 1.0})).metric_values("score") == [
        0.25,
        -1.0,
    ]
    assert group((-1.0, {"given_up": 1.0})).metric_values("score") == [-1.0]


def test_an_unknown_metric_is_rejected_with_the_nearest_name():
    with pytest.raises(UserError, match=r"unknown metric in trainer\.algorithm\.dynamic_sampling\.metric 'scores': "
                                        r"did you mean 'score'\? allowed: score"):  # fmt: skip
        group((1.0, {"score": 0.25})).metric_values("scores")
