"""A trajectory in several rows counts as one sample: the same numbers as if it were one row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyasync.algorithms import ADVANTAGE_ESTIMATORS, LOSS_REDUCTIONS
from skyasync.algorithms.advantages import compute_advantages
from skyasync.algorithms.masked import JoinedRows
from skyasync.algorithms.objective import loss_weights
from tests.algorithms.batches import config, random_batch

few = settings(max_examples=8, deadline=None)
seeds = st.integers(0, 2**31)


def split_rows(whole: torch.Tensor, parts: int = 2) -> torch.Tensor:
    """``[batch, length]`` with each row cut in ``parts``, which become rows of a padded batch."""
    return whole.reshape(len(whole) * parts, -1)


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), seeds)
def test_splitting_undoes_joining_whatever_the_order_of_the_rows(
    owners: list[int], seed: int
) -> None:
    samples = JoinedRows(torch.tensor(owners))
    values = torch.rand(len(owners), 3, generator=torch.Generator().manual_seed(seed))
    joined = samples.join(values)
    assert torch.equal(samples.split(joined), values)
    torch.testing.assert_close(joined.sum(), values.sum())
    assert samples.first(torch.tensor(owners)).tolist() == sorted(set(owners))


@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS.names())
@few
@given(seed=seeds)
def test_advantages_are_those_of_the_trajectory_in_one_row(estimator: str, seed: int) -> None:
    cfg, batch = config(advantage_estimator=estimator), random_batch(rows=6, length=8, seed=seed)
    whole = compute_advantages(cfg, batch.rewards, batch.loss_mask, batch.group_ids, batch.entropy)
    cut = compute_advantages(
        cfg, split_rows(batch.rewards), split_rows(batch.loss_mask), batch.group_ids.repeat_interleave(2),
        split_rows(batch.entropy), trajectory_ids=torch.arange(6).repeat_interleave(2),
    )  # fmt: skip
    for expected, found in zip(whole, cut, strict=True):
        torch.testing.assert_close(found, split_rows(expected))


@pytest.mark.parametrize("reduction", LOSS_REDUCTIONS.names())
@few
@given(seed=seeds)
def test_loss_weights_are_those_of_the_trajectory_in_one_row(reduction: str, seed: int) -> None:
    cfg, batch = config(loss_reduction=reduction), random_batch(rows=6, length=8, seed=seed)
    whole = loss_weights(cfg, batch.loss_mask, batch.group_ids)
    cut = loss_weights(
        cfg, split_rows(batch.loss_mask), batch.group_ids.repeat_interleave(2),
        trajectory_ids=torch.arange(6).repeat_interleave(2),
    )  # fmt: skip
    torch.testing.assert_close(cut, split_rows(whole))
