"""Which groups are kept, and how rewards are shaped."""

from __future__ import annotations

import pytest
import torch

from skyasync.algorithms.advantages import compute_advantages
from skyasync.algorithms.shaping import (
    add_at_end,
    group_filter,
    has_variance,
    mean_inside,
    overlong_filter,
    overlong_penalty,
    shape_rewards,
    stop_properly_penalty,
)
from skyasync.config.schema.algorithm import DynamicSamplingConfig, OverlongBufferConfig
from tests.algorithms.batches import config

MASK = torch.tensor([[False, True, True, True], [False, True, False, False]])


@pytest.mark.parametrize(("rewards", "mean", "variance"), [
    ([0.0, 0.0], False, False), ([1.0, 1.0], False, False), ([0.0, 1.0], True, True), ([0.5, 0.5], True, False),
    ([-1.0, 1.0], False, True), ([0.3], True, True),
])  # fmt: skip
def test_filters_keep_groups_that_teach(rewards: list[float], mean: bool, variance: bool) -> None:
    assert mean_inside(rewards) == mean
    assert has_variance(rewards) == variance
    assert group_filter(config(dynamic_sampling=DynamicSamplingConfig("mean")))(rewards) == mean
    assert (
        group_filter(config(dynamic_sampling=DynamicSamplingConfig("variance")))(rewards)
        == variance
    )
    assert group_filter(config())(rewards)


def test_rewards_within_the_tolerance_count_as_equal() -> None:
    assert not has_variance([0.5, 0.5 + 1e-9], tolerance=1e-6)
    assert not has_variance([0.5], keep_singletons=False)


def test_the_overlong_penalty_grows_over_the_buffer_and_is_capped() -> None:
    lengths = torch.tensor([10, 80, 90, 100, 120])
    assert overlong_penalty(lengths, 100, 20).tolist() == [0, 0, -0.5, -1, -1]
    assert overlong_penalty(lengths, 100, 20, capped=False, factor=2.0).tolist() == [
        0,
        0,
        -1,
        -2,
        -4,
    ]


def test_a_truncated_sample_is_scaled_or_replaced() -> None:
    scores, truncated = torch.tensor([1.0, 1.0]), torch.tensor([True, False])
    assert stop_properly_penalty(scores, truncated, 0.25).tolist() == [0.25, 1.0]
    assert stop_properly_penalty(scores, truncated, -0.5).tolist() == [-0.5, 1.0]


def test_samples_that_did_not_stop_leave_the_mask() -> None:
    assert overlong_filter(MASK, ["stop", "length"]).sum(1).tolist() == [3, 0]


def test_a_score_is_added_on_the_last_loss_token() -> None:
    assert add_at_end(torch.zeros(2, 4), torch.tensor([5.0, 6.0]), MASK).tolist() == [
        [0, 0, 0, 5],
        [0, 6, 0, 0],
    ]


def test_shaping_acts_on_a_samples_score_and_keeps_where_rewards_were_earned() -> None:
    rewards = torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.0, -3.0, 0.0, 0.0]])
    cfg = config(reward_bias=1.0, reward_scale=2.0, reward_clip=3.0)
    shaped = shape_rewards(cfg, rewards, MASK)
    assert shaped.sum(1).tolist() == [3.0, -3.0]
    assert shaped[0, 1] == 1.0
    assert shape_rewards(config(), rewards, MASK) is rewards


def test_advantages_see_the_overlong_penalty() -> None:
    cfg = config(
        advantage_estimator="dr_grpo", overlong_buffer=OverlongBufferConfig(len=2, max_len=3)
    )
    advantages, _ = compute_advantages(
        cfg, shape_rewards(cfg, torch.zeros(2, 4), MASK), MASK, torch.zeros(2).long()
    )
    assert advantages[:, 1].tolist() == [-0.5, 0.5]


@pytest.mark.parametrize(("changes", "scores"), [
    ({"truncated_responses": "zero"}, [2.0, 0.0]), ({"stop_properly_penalty_coef": 0.5}, [2.0, 1.0]),
    ({"stop_properly_penalty_coef": -1.0}, [2.0, -1.0]), ({"truncated_responses": "mask"}, [2.0, 2.0]),
    ({"truncated_responses": "zero", "reward_bias": 1.0, "reward_scale": 3.0, "reward_clip": 5.0}, [5.0, 3.0]),
    ({"reward_normalization": "batch", "truncated_responses": "zero"}, [0.5**0.5, -(0.5**0.5)]),
])  # fmt: skip
def test_a_truncated_response_is_rewarded_as_its_key_says(
    changes: dict[str, object], scores: list[float]
) -> None:
    rewards = torch.tensor([[0.0, 0.0, 0.0, 2.0], [0.0, 2.0, 0.0, 0.0]])
    shaped = shape_rewards(
        config(**changes),
        rewards,
        MASK,
        truncated=torch.tensor([False, True]),
        group_ids=torch.tensor([0, 0]),
    )
    assert shaped.sum(1).tolist() == pytest.approx(scores, abs=1e-5)


def test_rewards_are_normalised_within_their_group_or_over_the_batch() -> None:
    rewards, mask = (
        torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 10.0], [0.0, 12.0]]),
        torch.ones(4, 2).bool(),
    )
    by_group = shape_rewards(
        config(reward_normalization="group"), rewards, mask, group_ids=torch.tensor([0, 0, 1, 1])
    )
    assert by_group.sum(1).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5] * 2, abs=1e-5)
    batch = shape_rewards(
        config(reward_normalization="batch"), rewards, mask, group_ids=torch.tensor([0, 0, 1, 1])
    )
    assert batch.sum().item() == pytest.approx(0, abs=1e-5) and batch.sum(
        1
    ).std().item() == pytest.approx(1, abs=1e-5)


def test_the_rows_of_one_trajectory_are_shaped_as_one_sample() -> None:
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 1.0]]), torch.ones(3, 2).bool()
    cfg = config(
        reward_clip=2.0, overlong_buffer=OverlongBufferConfig(len=1, max_len=4, penalty_factor=0.5)
    )
    shaped = shape_rewards(cfg, rewards, mask, trajectory_ids=torch.tensor([0, 0, 1]))
    assert shaped.tolist() == [[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]]  # 4 - 0.5, clipped to 2; and 1
