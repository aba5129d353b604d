"""Corrections by hand, the approximated proximal policy, metrics and the warning."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from skyasync.algorithms import CORRECTIONS
from skyasync.algorithms.binding import bind
from skyasync.algorithms.corrections import normalize_weights, summarize
from skyasync.algorithms.masked import segment_mean
from skyasync.algorithms.off_policy import (
    approximate_proximal,
    effective_sample_size,
    gap_metrics,
    off_policy_metrics,
    smoothing_exponent,
    stuck_ratio,
)
from skyasync.errors import UserError
from tests.algorithms.batches import config, random_batch

#: w = exp(proximal - behaviour) of two sequences; the last token of the second is a gap.
WEIGHTS = torch.tensor([[0.5, 4.0, 1.0], [0.9, 0.1, 7.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, True, False]])


@pytest.mark.parametrize(("name", "expected"), [
    ("none", [1, 1, 1, 1, 1]),
    ("token_tis", [0.5, 2, 1, 0.9, 0.1]),
    ("sequence_tis", [2, 2, 2, 0.09, 0.09]),
    ("geometric_tis", [2 ** (1 / 3)] * 3 + [0.3] * 2),
    ("segment_tis", [2 ** (1 / 3)] * 3 + [0.3] * 2),
    ("icepop", [0.5, 4, 1, 0.9, 0]),
    ("sequence_icepop", [2, 2, 2, 0, 0]),
    ("token_mask", [1, 0, 1, 1, 0]),
    ("sequence_mask", [1, 1, 1, 0, 0]),
    ("geometric_mask", [0, 0, 0, 0, 0]),
    ("outlier_mask", [1, 1, 1, 1, 1]),
    ("sequence_mask_tis", [0, 0, 0, 0, 0]),
])  # fmt: skip
def test_corrections_by_hand(name: str, expected: list[float]) -> None:
    tensors = {"proximal": WEIGHTS.log(), "behaviour": torch.zeros_like(WEIGHTS), "mask": MASK}
    cfg = config(product_mask_low=0.5, product_mask_high=2.0 + 1e-9)
    weight = bind(CORRECTIONS[name], cfg)(tensors).expand_as(WEIGHTS)[MASK]
    torch.testing.assert_close(weight.double(), torch.tensor(expected, dtype=torch.float64))


def test_a_bad_sample_that_the_policy_makes_less_likely_is_masked() -> None:
    advantages = torch.tensor([[-1.0] * 3, [-1.0] * 3], dtype=torch.float64)
    tensors = {
        "proximal": WEIGHTS.log(),
        "behaviour": torch.zeros_like(WEIGHTS),
        "mask": MASK,
        "advantages": advantages,
    }
    masked = bind(CORRECTIONS["negative_mask"], config())(tensors)
    assert masked[MASK].tolist() == [1, 1, 1, 0, 0]


def test_self_normalised_weights_have_mean_one() -> None:
    assert normalize_weights(WEIGHTS, MASK)[MASK].mean().item() == pytest.approx(1)


def test_a_segment_is_a_run_of_tokens_within_one_row() -> None:
    mask = torch.tensor([[True, True, False, True], [True, False, True, True]])
    values = torch.tensor([[1.0, 3.0, 9.0, 5.0], [2.0, 9.0, 4.0, 8.0]])
    assert segment_mean(values, mask).tolist() == [[2, 2, 0, 5], [2, 0, 6, 6]]


def test_an_unknown_level_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="geometric"):
        summarize(WEIGHTS, MASK, "geometrc")


def test_the_older_a_token_the_nearer_its_proximal_policy_is_to_the_current_one() -> None:
    current, behaviour = torch.zeros(1, 5), torch.full((1, 5), -1.0)
    versions = torch.tensor([[-1, 5, 4, 2, 0]])
    proximal = approximate_proximal(current, behaviour, versions, current_version=6)
    torch.testing.assert_close(proximal, torch.tensor([[-1.0, -1.0, -0.5, -0.25, -1 / 6]]))
    assert torch.equal(
        approximate_proximal(current, behaviour, versions, 6, method="rollout"), behaviour
    )
    with pytest.raises(ValueError, match="loglinear"):
        approximate_proximal(current, behaviour, versions, 6, method="cubic")


def test_metrics_describe_the_ratio() -> None:
    metrics = off_policy_metrics(WEIGHTS.log(), torch.zeros_like(WEIGHTS), MASK)
    chosen = WEIGHTS[MASK]
    assert metrics["off_policy/ratio_mean"] == pytest.approx(chosen.mean().item())
    assert metrics["off_policy/ratio_max"] == pytest.approx(4)
    assert metrics["off_policy/ratio_min"] == pytest.approx(0.1)
    assert metrics["off_policy/kl"] == pytest.approx((chosen - 1 - chosen.log()).mean().item())
    ess = chosen.sum().item() ** 2 / (5 * chosen.square().sum().item())
    assert metrics["off_policy/effective_sample_size"] == pytest.approx(ess)


def test_metrics_are_split_by_the_staleness_that_occurs() -> None:
    staleness = torch.tensor([[0, 2, 2], [0, 2, 9]])
    metrics = off_policy_metrics(WEIGHTS.log(), torch.zeros_like(WEIGHTS), MASK, staleness)
    assert metrics["off_policy/staleness_0/ratio_mean"] == pytest.approx(0.7)
    assert metrics["off_policy/staleness_2/ratio_mean"] == pytest.approx((4 + 1 + 0.1) / 3)
    assert not any("staleness_9" in name for name in metrics)


def test_metrics_count_what_the_correction_drops_and_what_it_changes() -> None:
    factors = torch.tensor([[0.5, 2.0, 1.0], [0.9, 0.0, 5.0]], dtype=torch.float64)
    metrics = off_policy_metrics(WEIGHTS.log(), torch.zeros_like(WEIGHTS), MASK, weights=factors)
    assert metrics["off_policy/masked_fraction"] == pytest.approx(0.2)
    assert metrics["off_policy/clipped_fraction"] == pytest.approx(0.2)


def test_metrics_of_no_tokens_are_none() -> None:
    assert off_policy_metrics(WEIGHTS, WEIGHTS, torch.zeros_like(MASK)) == {}


def test_one_token_that_carries_everything_is_one_effective_sample() -> None:
    weights = torch.tensor([[1e6, 0.0, 0.0, 0.0]])
    assert effective_sample_size(
        weights, torch.ones(1, 4, dtype=torch.bool)
    ).item() == pytest.approx(0.25)


def _stale(value: int) -> Tensor:
    return torch.full((6, 7), value)


def test_a_ratio_of_one_on_stale_tokens_is_a_warning() -> None:
    batch = random_batch()
    same, other = batch.proximal_logprobs, batch.behaviour_logprobs
    assert "exactly 1" in (stuck_ratio(same, same, batch.loss_mask, _stale(1)) or "")
    assert stuck_ratio(same, other, batch.loss_mask, _stale(1)) is None
    assert stuck_ratio(same, same, batch.loss_mask, _stale(0)) is None


def test_ratios_beyond_every_float_stay_finite() -> None:
    far = torch.tensor([[-1000.0]], dtype=torch.float32)
    metrics = off_policy_metrics(torch.zeros(1, 1), far, torch.ones(1, 1, dtype=torch.bool))
    assert all(math.isfinite(value) for value in metrics.values())


def test_the_gap_is_of_tokens_that_the_trainers_own_version_sampled() -> None:
    drift = torch.zeros(2, 80, dtype=torch.float64)
    drift[:, :16], drift[0, 20], drift[1] = 0.25, -0.5, 7.0
    mask, staleness = torch.ones(2, 80, dtype=torch.bool), torch.zeros(2, 80, dtype=torch.long)
    mask[0, 79], drift[0, 79], staleness[1] = False, 9.0, 1
    found = gap_metrics(drift, torch.zeros_like(drift), mask, staleness)
    k3 = 16 * (math.exp(0.25) - 1.25) + (math.exp(-0.5) - 0.5)
    assert found == {
        "gap/mean": pytest.approx(4.5 / 79),
        "gap/max": 0.5,
        "gap/k3": pytest.approx(k3 / 79),
        "gap/from_0": 0.25,
        "gap/from_16": pytest.approx(0.5 / 48),
        "gap/from_64": 0.0,
    }
    assert gap_metrics(drift, torch.zeros_like(drift), mask, staleness + 1) == {}


def test_the_gap_by_position_counts_loss_tokens_alone() -> None:
    drift = torch.zeros(2, 80)
    drift[:, 20:36], drift[:, 36:] = -1.0, 3.0  # the first 20 are a prompt
    mask = torch.ones(2, 80, dtype=torch.bool)
    mask[:, :20] = False
    mask[1, 30:] = False
    found = off_policy_metrics(drift, torch.zeros(2, 80), mask)
    assert {k: v for k, v in found.items() if "from_" in k} == {
        "off_policy/from_0/abs_log_ratio": 1.0,
        "off_policy/from_16/abs_log_ratio": 3.0,
    }
    assert not any(
        "from_" in name
        for name in off_policy_metrics(drift[:, :30], torch.zeros(2, 30), mask[:, :30])
    )


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("least", [0.3, 0.5, 0.9])
def test_weights_are_smoothed_as_little_as_their_effective_sample_size_needs(
    spread: float, least: float
) -> None:
    weights = (
        spread
        * torch.randn(50, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ).exp()
    mask = torch.ones_like(weights, dtype=torch.bool)
    exponent = smoothing_exponent(weights, least)
    reached = float(effective_sample_size(weights.pow(exponent), mask))
    if float(effective_sample_size(weights, mask)) >= least:
        assert exponent == 1.0
    else:
        assert reached == pytest.approx(least, abs=1e-3) and reached >= least - 1e-9
        log_normal = (
            math.sqrt(-math.log(least)) / spread
        )  # the effective sample size is exp(-(exponent spread)^2)
        assert exponent == pytest.approx(log_normal, rel=0.15 if spread < 2 else 0.5)


def test_equal_or_no_weights_are_not_smoothed() -> None:
    assert smoothing_exponent(torch.ones(3), 0.5) == smoothing_exponent(torch.ones(0), 0.5) == 1.0
