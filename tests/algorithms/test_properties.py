"""Rules for every loss, correction, reduction and estimator, with any numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyasync.algorithms import ADVANTAGE_ESTIMATORS, CORRECTIONS, LOSS_REDUCTIONS, POLICY_LOSSES
from skyasync.algorithms.advantages import compute_advantages
from skyasync.algorithms.binding import bind
from skyasync.algorithms.objective import loss_weights
from tests.algorithms.batches import Batch, config, gradient, prepared, random_batch, token_loss

LOSSES, REDUCTIONS, ESTIMATORS = (
    POLICY_LOSSES.names(),
    LOSS_REDUCTIONS.names(),
    ADVANTAGE_ESTIMATORS.names(),
)
GROUP_RELATIVE = sorted(set(ESTIMATORS) - {"gae", "reinforce++", "reinforce++_baseline"})
TERMS = {"use_kl_loss": True, "use_entropy_loss": True, "kl_importance_weighted": True}
seeds = st.integers(0, 2**31)
few = settings(max_examples=8, deadline=None)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def with_garbage(batch: Batch, columns: int, value: float) -> Batch:
    """More padding on the right, and ``value`` in everything outside the mask."""
    mask = torch.nn.functional.pad(batch.loss_mask, (0, columns))

    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, torch.nn.functional.pad(tensor, (0, columns)), value)

    names = (
        "current",
        "proximal_logprobs",
        "behaviour_logprobs",
        "reference_logprobs",
        "advantages",
        "entropy",
    )
    padded = {name: spoil(getattr(batch, name)) for name in names}
    rewards = torch.nn.functional.pad(batch.rewards, (0, columns))
    return replace(batch, **padded, rewards=rewards, loss_mask=mask)


@pytest.mark.parametrize("value", [37.0, -1e4, float("nan"), float("inf")])
@pytest.mark.parametrize("loss", LOSSES)
@few
@given(seed=seeds, columns=st.integers(0, 4))
def test_what_stands_outside_the_mask_has_no_influence(
    loss: str, value: float, seed: int, columns: int
) -> None:
    if loss == "clip_cov":
        columns = 0  # its draw is random, and another shape is another draw
    cfg = config(
        policy_loss_type=loss, max_seq_len=10, loss_reduction="seq_mean_token_sum_norm", **TERMS
    )
    batch = random_batch(seed=seed)
    torch.manual_seed(seed)
    clean = gradient(cfg, prepared(cfg, batch))
    torch.manual_seed(seed)
    spoilt = gradient(cfg, prepared(cfg, with_garbage(batch, columns, value)))
    close(spoilt, torch.nn.functional.pad(clean, (0, columns)))


@pytest.mark.parametrize("correction", CORRECTIONS.names())
@few
@given(seed=seeds)
def test_garbage_outside_the_mask_does_not_reach_a_correction(correction: str, seed: int) -> None:
    cfg = config(off_policy_correction=correction, policy_loss_type="gspo")
    batch = prepared(cfg, random_batch(seed=seed))
    close(gradient(cfg, with_garbage(batch, 0, float("nan"))), gradient(cfg, batch))


@pytest.mark.parametrize("loss", sorted(set(LOSSES) - {"clip_cov"}))
@few
@given(seed=seeds, order=st.permutations(range(6)))
def test_permuting_the_batch_permutes_the_loss(loss: str, seed: int, order: list[int]) -> None:
    cfg, batch, index = (
        config(policy_loss_type=loss, **TERMS),
        random_batch(seed=seed),
        torch.tensor(order),
    )
    close(
        gradient(cfg, prepared(cfg, batch.rows(index))), gradient(cfg, prepared(cfg, batch))[index]
    )


@pytest.mark.parametrize("estimator", ESTIMATORS)
@few
@given(seed=seeds, order=st.permutations(range(6)))
def test_permuting_the_batch_permutes_the_advantages(
    estimator: str, seed: int, order: list[int]
) -> None:
    cfg, batch, index = (
        config(advantage_estimator=estimator),
        random_batch(seed=seed),
        torch.tensor(order),
    )

    def both(b: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return compute_advantages(cfg, b.rewards, b.loss_mask, b.group_ids, values=b.entropy)

    for permuted, plain in zip(both(batch.rows(index)), both(batch), strict=True):
        torch.testing.assert_close(permuted, plain[index], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@few
@given(seed=seeds, columns=st.integers(1, 4))
def test_padding_changes_no_advantage(estimator: str, seed: int, columns: int) -> None:
    cfg, batch = config(advantage_estimator=estimator), random_batch(seed=seed)
    wide = with_garbage(batch, columns, 7.0)
    plain, _ = compute_advantages(
        cfg, batch.rewards, batch.loss_mask, batch.group_ids, values=batch.entropy
    )
    padded, _ = compute_advantages(
        cfg, wide.rewards, wide.loss_mask, wide.group_ids, values=wide.entropy
    )
    close(padded, torch.nn.functional.pad(plain, (0, columns)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", GROUP_RELATIVE)
@few
@given(
    rewards=st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=2),
    size=st.integers(1, 9),
    seed=seeds,
)
def test_a_group_of_equal_rewards_has_advantage_exactly_zero(
    estimator: str, dtype: torch.dtype, rewards: list[float], size: int, seed: int
) -> None:
    batch = random_batch(rows=2 * size, seed=seed, group_size=size)
    tokens = torch.zeros(2 * size, 7, dtype=dtype)
    tokens[:, 1] = torch.tensor(rewards, dtype=dtype)[batch.group_ids]
    cfg = config(advantage_estimator=estimator)
    advantages, _ = compute_advantages(cfg, tokens, batch.loss_mask, batch.group_ids)
    assert not advantages.any()


@pytest.mark.parametrize("correction", CORRECTIONS.names())
@few
@given(seed=seeds)
def test_a_correction_is_the_identity_where_behaviour_is_proximal(
    correction: str, seed: int
) -> None:
    batch = random_batch(seed=seed)
    tensors = {
        "proximal": batch.proximal_logprobs,
        "behaviour": batch.proximal_logprobs,
        "mask": batch.loss_mask,
    }
    weight = bind(CORRECTIONS[correction], config())(tensors | {"advantages": batch.advantages})
    assert (weight.expand_as(batch.current)[batch.loss_mask] == 1).all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=3, deadline=None)
@given(seed=seeds, ranks=st.integers(1, 3), size=st.integers(1, 4))
def test_the_gradient_does_not_depend_on_micro_batches_or_ranks(
    loss: str, reduction: str, seed: int, ranks: int, size: int
) -> None:
    cfg = config(policy_loss_type=loss, loss_reduction=reduction, **TERMS)
    batch = prepared(cfg, random_batch(rows=8, seed=seed, group_size=4))
    whole = gradient(cfg, batch)
    pieces = torch.zeros_like(whole)
    for rank in range(ranks):
        for rows in torch.arange(rank, 8, ranks).split(size):
            pieces[rows] += gradient(cfg, batch.rows(rows))
    close(pieces, whole)


@pytest.mark.parametrize("reduction", sorted(set(REDUCTIONS) - {"token_sum"}))
@few
@given(seed=seeds)
def test_a_reduction_of_ones_is_one_per_unit(reduction: str, seed: int) -> None:
    batch = random_batch(seed=seed)
    batch.loss_mask[0] = False  # a sample without loss tokens does not count
    cfg = config(loss_reduction=reduction, max_seq_len=1)
    weights = loss_weights(cfg, batch.loss_mask, batch.group_ids, dtype=torch.float64)
    per_sequence = batch.loss_mask.sum().double() / 5
    expected = per_sequence if "sum" in reduction else torch.ones((), dtype=torch.float64)
    close(weights.sum(), expected)
    assert not weights[~batch.loss_mask].any()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_row_without_loss_tokens_contributes_nothing(loss: str) -> None:
    cfg, batch = config(policy_loss_type=loss, **TERMS), random_batch()
    batch.loss_mask[2] = False
    batch = prepared(cfg, batch)
    assert gradient(cfg, batch).isfinite().all()
    assert not gradient(cfg, batch)[2].any()
    assert not token_loss(cfg, batch)[0][2].any()
