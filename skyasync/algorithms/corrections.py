"""Weights for samples of an older, or numerically slightly different, policy.

Invariant: a correction is a detached factor of each token's loss, ``[batch, length]`` or, for one
number per sequence, ``[batch, 1]``. It is made of proximal and behaviour log-probabilities only
(``negative_mask``: and of advantages). It multiplies the policy loss and leaves the loss weights
alone, so a dropped token still counts in the denominator (OpenRLHF, SkyRL, TRL, AReaL; verl's
rejection shrinks it). Where behaviour and proximal policy are equal, every correction is 1. A
sequence-level one depends on its row alone.

``w = exp(proximal - behaviour)``. Levels: ``token``; ``sequence`` (product of the row's ratios),
``geometric`` (their geometric mean), ``segment`` (geometric mean of each contiguous run of mask
tokens: a turn), ``max`` and ``min``.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from skyasync.algorithms import CORRECTIONS
from skyasync.algorithms.binding import configured
from skyasync.algorithms.kl import kl_estimate
from skyasync.algorithms.masked import (
    EXPONENT_BOUND,
    log_ratio,
    masked_mean,
    row_mean,
    row_sum,
    segment_mean,
)
from skyasync.errors import UserError, unknown
from skyasync.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


LEVELS = ("token", "sequence", "geometric", "segment", "max", "min")


def truncate(weights: Tensor, low: float, high: float) -> Tensor:
    """Clamp to ``[low, high]``: truncated importance sampling."""
    return weights.clamp(low, high)


def zero_outside(weights: Tensor, low: float, high: float) -> Tensor:
    """The weight inside ``[low, high]``, 0 outside: IcePop."""
    return torch.where((weights >= low) & (weights <= high), weights, 0)


def inside(weights: Tensor, low: float, high: float) -> Tensor:
    """1 inside ``[low, high]``, 0 outside: a mask without a weight."""
    return ((weights >= low) & (weights <= high)).to(weights.dtype)


def summarize(values: Tensor, mask: Tensor, level: str) -> Tensor:
    """Summarize values at a level.

    What stands outside the mask has no influence; there the result is 0 where it is per token.

    Returns:
        Each token's value or its segment's mean, ``[batch, length]``; its row's sum, mean or
        extreme, ``[batch, 1]``.

    Raises:
        UserError: for an unknown level.
    """
    if level == "token":
        return torch.where(mask, values, 0)
    if level == "sequence":
        return row_sum(values, mask)
    if level == "geometric":  # a mean of logarithms
        return row_mean(values, mask)
    if level == "segment":
        return segment_mean(values, mask)
    if level == "max":
        return torch.where(mask, values, -inf).amax(1, keepdim=True)
    if level == "min":
        return torch.where(mask, values, inf).amin(1, keepdim=True)
    raise UserError(unknown("level", level, LEVELS))


def importance_weights(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    level: str = "token",
) -> Tensor:
    """``w`` at the given level, detached; 1 outside the mask. Shapes as of ``summarize``."""
    log_w = proximal.detach() - behaviour.detach()  # [batch, length]
    # Summarized as logarithms: a product of ratios over a long row would overflow.
    return _exp(summarize(log_w, mask, level))


def _exp(log_weights: Tensor) -> Tensor:
    # Bounded after the sum over a row, so that opposite ratios may cancel.
    return log_weights.clamp(-EXPONENT_BOUND, EXPONENT_BOUND).exp()


def normalize_weights(weights: Tensor, mask: Tensor, *, per_sequence: bool = False) -> Tensor:
    """Divide by the mean weight: self-normalised importance sampling.

    It is the mean over tokens, or ``per_sequence`` over the rows' mean weights. The mean is that of
    the tensors given: call it on the whole batch. Source: verl ``rollout_is_batch_normalize``.
    """
    if not per_sequence:
        return weights / masked_mean(weights, mask)
    rows = mask.any(1, keepdim=True)  # [batch, 1]: those with loss tokens
    return weights / masked_mean(row_mean(weights, mask), rows)


@CORRECTIONS.register("none")
def none(mask: Tensor) -> Tensor:
    """No correction: weight 1.

    An asynchronous plan rejects it unless ``trainer.allow_uncorrected=true``.
    """
    return torch.ones_like(mask, dtype=torch.float32)


@CORRECTIONS.register("auto")
@CORRECTIONS.register("token_tis")
@configured(low="token_tis_ratio_clip_low", high="token_tis_ratio_clip_high")
def token_tis(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    *,
    low: float = 0.0,
    high: float = 2.0,
) -> Tensor:
    """``clamp(w, low, high)`` per token: truncated importance sampling. Source: Yao et al. 2025.

    "auto" is this one for a loss that does not use the behaviour policy itself, and "none" for one
    that does.
    """
    return truncate(importance_weights(proximal, behaviour, mask), low, high)


@CORRECTIONS.register("sequence_tis")
@configured(high="sequence_tis_ratio_clip_high")
def sequence_tis(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    *,
    low: float = 0.0,
    high: float = 5.0,
) -> Tensor:
    """``clamp(prod_t w, low, high)``: one weight per sequence, unbiased before the truncation."""
    return truncate(importance_weights(proximal, behaviour, mask, "sequence"), low, high)


@CORRECTIONS.register("geometric_tis")
@configured(high="geometric_tis_ratio_clip_high")
def geometric_tis(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    *,
    low: float = 0.0,
    high: float = 2.0,
) -> Tensor:
    """The sequence's geometric mean of w, truncated.

    Source: ROLL ``geometric``; AReaL's sequence level.
    """
    return truncate(importance_weights(proximal, behaviour, mask, "geometric"), low, high)


@CORRECTIONS.register("segment_tis")
@configured(high="geometric_tis_ratio_clip_high")
def segment_tis(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    *,
    low: float = 0.0,
    high: float = 2.0,
) -> Tensor:
    """The geometric mean of w over each contiguous run of loss tokens (a turn), truncated.

    Source: ROLL ``segment``.
    """
    return truncate(importance_weights(proximal, behaviour, mask, "segment"), low, high)


@CORRECTIONS.register("icepop")
@configured(low="icepop_low", high="icepop_high")
def icepop(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    *,
    low: float = 0.5,
    high: float = 5.0,
) -> Tensor:
    """w where ``low <= w <= high``, else 0: outliers are dropped, not truncated.

    Source: Ling team 2025.
    """
    return zero_outside(importance_weights(proximal, behaviour, mask), low, high)


@CORRECTIONS.register("sequence_icepop")
@configured(low="product_mask_low", high="product_mask_high")
def sequence_icepop(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    *,
    low: float = 0.5,
    high: float = 2.0,
    level: str = "sequence",
) -> Tensor:
    """The sequence's weight where it lies in ``[low, high]``, else 0.

    Args:
        level: "sequence" (product) or "geometric" (AReaL's sequence-level rejection).

    Source: TRL ``sequence_mask``, verl.
    """
    return zero_outside(importance_weights(proximal, behaviour, mask, level), low, high)


@CORRECTIONS.register("sequence_mask_tis")
@configured(low="geo_mask_low", high="geo_mask_high", cap="token_tis_ratio_clip_high")
def sequence_mask_tis(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    *,
    low: float = 0.99,
    high: float = 1.01,
    cap: float = 2.0,
) -> Tensor:
    """``min(w, cap)`` per token in sequences whose geometric mean lies in ``[low, high]``, else 0.

    Source: OpenRLHF ``seq-mask-tis``, which documents the truncated weight but multiplies the raw
    one.
    """
    log_w = torch.where(mask, proximal.detach() - behaviour.detach(), 0)  # [batch, length]
    in_range = inside(_exp(row_mean(log_w, mask)), low, high)  # [batch, 1]
    return in_range * truncate(_exp(log_w), 0.0, cap)


@CORRECTIONS.register("token_mask")
@configured(low="token_mask_is_threshold_low", high="token_mask_is_threshold_high")
def token_mask(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    *,
    low: float = 0.5,
    high: float = 2.0,
) -> Tensor:
    """1 where ``low <= w <= high``, else 0: IcePop's choice without its weight."""
    return inside(importance_weights(proximal, behaviour, mask), low, high)


@CORRECTIONS.register("sequence_mask")
@configured(low="product_mask_low", high="product_mask_high")
def sequence_mask(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    *,
    low: float = 0.5,
    high: float = 2.0,
) -> Tensor:
    """1 for sequences with ``low <= prod_t w <= high``, else 0.

    Source: SkyRL ``sequence_mask_metric=product``.
    """
    return inside(importance_weights(proximal, behaviour, mask, "sequence"), low, high)


@CORRECTIONS.register("geometric_mask")
@configured(low="geo_mask_low", high="geo_mask_high")
def geometric_mask(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    *,
    low: float = 0.99,
    high: float = 1.01,
) -> Tensor:
    """1 for sequences whose geometric mean of w lies in ``[low, high]``, else 0.

    Unlike a product, a mean does not grow with the length.
    """
    return inside(importance_weights(proximal, behaviour, mask, "geometric"), low, high)


@CORRECTIONS.register("outlier_mask")
@configured(low="outlier_token_is_threshold_low", high="outlier_token_is_threshold_high")
def outlier_mask(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    *,
    low: float = 1e-4,
    high: float = 100.0,
) -> Tensor:
    """0 for sequences in which any token has w outside ``[low, high]``, else 1. Source: SkyRL."""
    is_inside = inside(importance_weights(proximal, behaviour, mask), low, high)
    # The minimum over no tokens is infinite: a row without loss tokens gets 1.
    return summarize(is_inside, mask, "min").clamp(max=1.0)


@CORRECTIONS.register("difference_mask")
def difference_mask(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    *,
    low: float = -0.2,
    high: float = 0.2,
) -> Tensor:
    """1 where ``low <= exp(proximal) - exp(behaviour) <= high``, a difference of probabilities.

    Source: ROLL.
    """
    difference = torch.where(mask, proximal.exp() - behaviour.exp(), 0)
    return inside(difference.detach(), low, high)


@CORRECTIONS.register("kl_mask")
@configured(high="kl_mask_high")
def kl_mask(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    *,
    estimator: str = "k3",
    level: str = "geometric",
    low: float = -inf,
    high: float = 0.1,
) -> Tensor:
    """1 where the KL estimate of behaviour from proximal policy lies in ``[low, high]``, else 0.

    The estimate is that of ``kl_estimate(behaviour, proximal)``: the samples are the behaviour
    policy's. ``level`` says over what it is taken: "token", "sequence" (sum), "geometric" (mean),
    "max". AReaL measures in the other direction: exchange the two policies.

    Source: verl ``rollout_rs`` (whose k1 bounds are logarithms of bounds on behaviour / proximal),
    AReaL ``RejectionSamplingConfig``.
    """
    kl = kl_estimate(behaviour.detach(), proximal.detach(), estimator)  # [batch, length]
    return inside(summarize(kl, mask, level), low, high)


@CORRECTIONS.register("negative_mask")
@configured(threshold="negative_mask_threshold")
def negative_mask(
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    threshold: float = 0.1,
) -> Tensor:
    """0 on tokens with A < 0 in sequences that the policy would hardly sample, else 1.

    These are sequences whose mean ``behaviour - proximal`` exceeds ``threshold``. Bad samples that
    the policy would hardly write any more teach nothing. Source: DeepSeek-V3.2 (2025); TRL
    ``opsm``.
    """
    drift = row_mean(log_ratio(behaviour, proximal), mask).detach()  # [batch, 1]
    return ((advantages >= 0) | (drift <= threshold)).to(proximal.dtype)
