"""Advantage estimators, the normalisation matrix, returns and GAE, on numbers small enough to do by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from skyasync.algorithms import ADVANTAGE_ESTIMATORS
from skyasync.algorithms.advantages import compute_advantages, normalize
from skyasync.algorithms.masked import whiten
from skyasync.algorithms.values import discounted_returns, gae
from skyasync.errors import UserError
from tests.algorithms.batches import config, random_batch

SCORES = torch.tensor([1.0, 3.0, 2.0, 0.0, 4.0, 8.0], dtype=torch.float64)
GROUPS = torch.tensor([7, 7, 7, 3, 3, 3])
LEVELS = ("group", "batch", "none")


def estimate(
    name: str, scores: Tensor = SCORES, groups: Tensor = GROUPS, **changes: object
) -> list[float]:
    """One advantage per sample, each with two tokens, the reward on the last."""
    rewards = torch.stack([torch.zeros_like(scores), torch.zeros_like(scores), scores], 1)
    mask = torch.tensor([[False, True, True]] * len(scores))
    advantages, _ = compute_advantages(
        config(advantage_estimator=name, **changes), rewards, mask, groups
    )
    assert not advantages[:, 0].any()
    torch.testing.assert_close(advantages[:, 1], advantages[:, 2])
    return advantages[:, 1].tolist()


@pytest.mark.parametrize(("name", "expected"), [
    ("dr_grpo", [-1, 1, 0, -4, 0, 4]),
    ("grpo", [-1, 1, 0, -1, 0, 1]),
    ("rloo", [-1.5, 1.5, 0, -6, 0, 6]),
    ("maxrl", [-0.5, 0.5, 0, -1, 0, 1]),
    ("gpg", [-1.2, 1.2, 0, -4.8, 0, 4.8]),
    ("opo", [-1, 1, 0, -4, 0, 4]),
    ("grpo_passk", [0, 1, 0, 0, 0, 1]),
])  # fmt: skip
def test_group_estimators_by_hand(name: str, expected: list[float]) -> None:
    assert estimate(name) == pytest.approx(expected, abs=1e-5)


def test_grpo_without_std_is_dr_grpo() -> None:
    assert estimate("grpo", grpo_norm_by_std=False) == estimate("dr_grpo")


@pytest.mark.parametrize(("mean", "std"), [*itertools.product(LEVELS, LEVELS)])
def test_the_matrix_normalises_over_what_it_names(mean: str, std: str) -> None:
    pools = {
        "group": [SCORES[:3], SCORES[3:]],
        "batch": [SCORES, SCORES],
        "none": [torch.zeros(2), torch.zeros(2)],
    }
    centred = torch.cat(
        [half - pool.mean() for half, pool in zip(SCORES.split(3), pools[mean], strict=True)]
    )
    spreads = {
        "group": [half.std() for half in SCORES.split(3)],
        "none": [torch.ones(()), torch.ones(())],
    }
    spreads["batch"] = [centred.std(), centred.std()]
    expected = torch.cat(
        [half / spread for half, spread in zip(centred.split(3), spreads[std], strict=True)]
    )
    torch.testing.assert_close(normalize(SCORES, GROUPS, mean=mean, std=std, eps=0.0), expected)


def test_the_matrix_is_reached_by_its_keys() -> None:
    found = estimate("normalized", reward_norm_mean="batch", reward_norm_std="none")
    assert found == pytest.approx((SCORES - 3).tolist())


def test_a_sample_without_a_reward_counts_nowhere_and_gets_zero() -> None:
    scores = SCORES.clone()
    scores[1] = torch.nan
    assert normalize(scores, GROUPS, std="none").tolist() == [-0.5, 0, 0.5, -4, 0, 4]


def test_a_group_of_one_gets_zero_unless_asked_to_keep_its_reward() -> None:
    groups = torch.arange(6)
    assert not normalize(SCORES, groups, std="none").any()
    torch.testing.assert_close(normalize(SCORES, groups, std="none", singleton_raw=True), SCORES)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e8 / 7])
def test_rounding_gives_a_constant_group_no_advantage_however_small_the_epsilon(
    value: float,
) -> None:
    scores = torch.full((7,), value, dtype=torch.float32)
    assert not normalize(scores, torch.zeros(7, dtype=torch.long), eps=1e-30).any()


def test_a_sample_without_loss_tokens_still_counts_in_its_groups_baseline() -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.0, 3.0]])
    mask = torch.tensor([[False, True], [False, False]])
    advantages, _ = compute_advantages(
        config(advantage_estimator="dr_grpo"), rewards, mask, torch.zeros(2).long()
    )
    assert advantages.tolist() == [[0, -1], [0, 0]]


def test_responses_that_are_masked_keep_their_length_in_the_optimal_baseline() -> None:
    """Lengths 3, 5, 5 and rewards 1, 0, 0; the last two are truncated, and have no loss token."""
    mask = torch.tensor([[True] * 3 + [False] * 2, [False] * 5, [False] * 5])
    rewards = torch.zeros(3, 5, dtype=torch.float64)
    rewards[0, 2] = 1.0
    sampled, groups = torch.tensor([3, 5, 5]), torch.zeros(3, dtype=torch.int64)
    advantages, _ = compute_advantages(
        config(advantage_estimator="opo"), rewards, mask, groups, lengths=sampled
    )
    torch.testing.assert_close(advantages[0, :3], torch.full((3,), 1 - 3 / 13, dtype=torch.float64))
    rows = torch.tensor([0, 1, 2, 2])  # the last trajectory is two rows
    mask, rewards = torch.cat([mask, mask[:1] & False]), torch.cat([rewards, rewards[:1] * 0])
    advantages, _ = compute_advantages(
        config(advantage_estimator="opo"), rewards, mask, torch.zeros(4, dtype=torch.int64), None, rows,
        torch.tensor([3, 5, 2, 3]),
    )  # fmt: skip
    torch.testing.assert_close(advantages[0, :3], torch.full((3,), 1 - 3 / 13, dtype=torch.float64))


@pytest.mark.parametrize("reward", [5.3, 100.3, 1000.1])
@pytest.mark.parametrize("name", ["reinforce++", "reinforce++_baseline", "gae"])
def test_a_batch_of_equal_rewards_has_no_signal_in_float32(name: str, reward: float) -> None:
    mask = torch.arange(64)[None] < torch.arange(1, 65)[:, None]
    rewards = torch.zeros(64, 64)
    rewards[torch.arange(64), torch.arange(64)] = reward
    values = torch.zeros(64, 64) if name == "gae" else None
    advantages, _ = compute_advantages(
        config(advantage_estimator=name), rewards, mask, torch.arange(64), values
    )  # fmt: skip
    assert advantages.dtype == torch.float32 and advantages.abs().max() < 1e-6


def test_returns_skip_tool_outputs_without_discounting_them() -> None:
    rewards = torch.tensor([[0.0, 1.0, 9.0, 9.0, 2.0, 9.0]])
    mask = torch.tensor([[True, True, False, False, True, False]])
    assert discounted_returns(rewards, mask, gamma=0.5).tolist() == [[1.0, 2.0, 0.0, 0.0, 2.0, 0.0]]


def test_gae_with_lambda_one_is_the_return_minus_the_value() -> None:
    batch = random_batch()
    advantages, returns = gae(batch.rewards, batch.entropy, batch.loss_mask, gamma=0.9, lambd=1.0)
    expected = discounted_returns(batch.rewards, batch.loss_mask, gamma=0.9)
    torch.testing.assert_close(returns, expected)
    torch.testing.assert_close(
        advantages, torch.where(batch.loss_mask, expected - batch.entropy, 0)
    )


def test_gae_with_lambda_zero_is_the_one_step_error() -> None:
    rewards, values = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[10.0, 20.0, 30.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    advantages, _ = gae(rewards, values, mask, gamma=0.5, lambd=0.0, bootstrap=torch.tensor([40.0]))
    assert advantages.tolist() == [[1.0, -3.0, -7.0]]


def test_gae_without_values_is_an_error() -> None:
    batch = random_batch()
    with pytest.raises(ValueError, match="critic"):
        compute_advantages(
            config(advantage_estimator="gae"), batch.rewards, batch.loss_mask, batch.group_ids
        )


@pytest.mark.parametrize("name", ["reinforce++", "reinforce++_baseline"])
def test_whitened_estimators_have_mean_zero_and_variance_one_over_the_tokens(name: str) -> None:
    batch = random_batch(rows=12)
    advantages, _ = compute_advantages(
        config(advantage_estimator=name), batch.rewards, batch.loss_mask, batch.group_ids
    )
    tokens = advantages[batch.loss_mask]
    assert tokens.mean().item() == pytest.approx(0, abs=1e-9)
    assert tokens.var().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS.names())
def test_whitening_and_clipping_come_last(name: str) -> None:
    batch = random_batch(rows=12)
    args = batch.rewards, batch.loss_mask, batch.group_ids, batch.entropy
    plain, _ = compute_advantages(config(advantage_estimator=name), *args)
    changed, _ = compute_advantages(
        config(advantage_estimator=name, advantage_batch_normalize=True, advantage_clip=0.7), *args
    )
    torch.testing.assert_close(changed, whiten(plain, batch.loss_mask).clamp(-0.7, 0.7))


@pytest.mark.parametrize(("returned", "found"), [
    (lambda rewards: rewards, "Tensor"),
    (lambda rewards: (rewards.sum(1), rewards.sum(1)), r"tensors of shapes \[\(2,\), \(2,\)\]"),
    (lambda rewards: None, "NoneType"),
])  # fmt: skip
@pytest.mark.parametrize("joined", [False, True])
def test_an_estimator_that_returns_no_pair_of_the_right_shape_is_an_error_that_names_it(
    returned: Callable[[Tensor], object], found: str, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ADVANTAGE_ESTIMATORS, "mine", returned)
    rewards, rows = torch.ones(2, 3), torch.arange(2)
    with pytest.raises(
        UserError, match=rf"'mine' must return a pair .*\(2, 3\); it returned {found}"
    ):
        compute_advantages(
            config(advantage_estimator="mine"),
            rewards,
            rewards > 0,
            rows,
            trajectory_ids=rows if joined else None,
        )
