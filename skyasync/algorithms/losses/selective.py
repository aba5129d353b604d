"""Losses that choose tokens by comparing them with the whole mini-batch.

Invariant: the choice is made once, on the whole mini-batch and before it is split
(``Objective.prepare``). The loss takes it as ``selection`` ``[batch, length]``: micro-batches and
ranks cannot change it. It is made from the proximal policy: before the first optimizer step on a
batch that is the current policy exactly, afterwards it is the policy at the batch's beginning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from skyasync.algorithms import POLICY_LOSSES
from skyasync.algorithms.binding import configured
from skyasync.algorithms.losses.clipped import Statistics, clipped_surrogate
from skyasync.algorithms.masked import log_ratio, masked_mean
from skyasync.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

F = TypeVar("F", bound=Callable[..., object])


def prepared_by(select: Callable[..., Tensor]) -> Callable[[F], F]:
    """Make ``select`` the function that chooses this loss's tokens.

    It is bound to the configuration as losses are.
    """

    def mark(loss: F) -> F:
        loss.select = select  # type: ignore[attr-defined]
        return loss

    return mark


def covariance(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """``(A - mean A) (log pi - mean log pi)`` per token, means over the mask.

    Source: Cui et al. 2025.
    """
    centred_advantages = advantages - masked_mean(advantages, mask)  # [batch, length]
    return centred_advantages * (logprobs - masked_mean(logprobs, mask))


@configured(share="clip_cov.clip_ratio", low="clip_cov.clip_cov_lb", high="clip_cov.clip_cov_ub")
def mid_covariance(
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    eligible: Tensor | None = None,
) -> Tensor:
    """Draw tokens (bool) at random among those with ``low < covariance < high``.

    Their number is ``share`` of the mask, at least 1.

    Args:
        eligible: bool ``[batch, length]``; only these can be drawn (verl, SkyRL: those that PPO
            does not clip).
    """
    score = covariance(proximal, advantages, mask)
    candidates = mask & (score > low) & (score < high)
    if eligible is not None:
        candidates &= eligible
    # The largest of random numbers are a random choice.
    return _largest(torch.rand_like(score), candidates, _count(share, mask))


@configured(share="kl_cov.kl_cov_frac")
def top_covariance(
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    share: float = 0.2,
) -> Tensor:
    """The tokens (bool) with the largest covariance: ``share`` of the mask, at least 1."""
    score = covariance(proximal, advantages, mask)  # [batch, length]
    return _largest(score, mask, _count(share, mask))


@configured(threshold="m2po_threshold")
def small_second_moment(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    *,
    threshold: float = 0.04,
) -> Tensor:
    """All tokens (bool) without the fewest that bring the second moment below ``threshold``.

    The moment is the mean of ``(proximal - behaviour)^2``; the largest are left out. One token
    always stays. Source: Zheng et al. 2025 (M2PO).
    """
    # Infinite outside the mask, so that the mask's tokens come first in the order.
    squares = torch.where(mask, (proximal - behaviour).square(), torch.inf)
    moment, order = squares.flatten().sort()
    total = int(mask.sum())
    # The mean of the smallest ones grows with their number.
    running_mean = moment[:total].cumsum(0) / torch.arange(1, total + 1, device=mask.device)
    count = 0
    if total:
        count = max(1, int((running_mean < threshold).sum()))
    selection = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    selection[order[:count]] = True
    return selection.view_as(mask)


@POLICY_LOSSES.register("clip_cov")
@prepared_by(mid_covariance)
@configured(eps_low="eps_clip_low", eps_high="eps_clip_high")
def clip_cov(
    current: Tensor,
    anchor: Tensor,
    advantages: Tensor,
    selection: Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> tuple[Tensor, Statistics]:
    """PPO without the tokens of ``selection``: they would lower the entropy most.

    Source: Cui et al. 2025 (the entropy mechanism); ``clip_fraction`` marks the selected tokens.
    """
    ratio = log_ratio(current, anchor).exp()
    loss, statistics = clipped_surrogate(ratio, advantages, eps_low, eps_high)
    is_selected = selection.bool()
    statistics["clip_fraction"] = is_selected
    return torch.where(is_selected, 0, loss), statistics


@POLICY_LOSSES.register("kl_cov")
@prepared_by(top_covariance)
@configured(coef="kl_cov.ppo_kl_coef")
def kl_cov(
    current: Tensor,
    anchor: Tensor,
    advantages: Tensor,
    selection: Tensor,
    *,
    coef: float = 1.0,
) -> Tensor:
    """``-r A``, and on the tokens of ``selection`` a penalty ``coef |current - anchor|``.

    Source: Cui et al. 2025.
    """
    x = log_ratio(current, anchor)  # [batch, length]
    penalty = torch.where(selection.bool(), coef * x.abs(), 0)
    return -x.exp() * advantages + penalty


@POLICY_LOSSES.register("m2po")
@prepared_by(small_second_moment)
@configured(eps_low="eps_clip_low", eps_high="eps_clip_high")
def m2po(
    current: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    selection: Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> tuple[Tensor, Statistics]:
    """PPO on the tokens of ``selection`` only, 0 on the others.

    The reduction's denominator still counts all tokens; AReaL divides by the kept ones (multiply
    the mask that the reduction sees by the selection for that). Source: Zheng et al. 2025 (M2PO).
    """
    ratio = log_ratio(current, proximal).exp()
    loss, statistics = clipped_surrogate(ratio, advantages, eps_low, eps_high)
    is_selected = selection.bool()
    statistics["correction_weight"] = is_selected
    return torch.where(is_selected, loss, 0), statistics


def _count(share: float, mask: Tensor) -> int:
    return max(1, int(share * int(mask.sum())))


def _largest(score: Tensor, candidates: Tensor, count: int) -> Tensor:
    """The ``count`` candidates (bool) with the largest score, or all of them if they are fewer."""
    count = min(count, int(candidates.sum()))
    selection = torch.zeros(score.numel(), dtype=torch.bool, device=score.device)
    if count:
        candidate_scores = torch.where(candidates, score, -torch.inf).flatten()
        selection[candidate_scores.topk(count).indices] = True
    return selection.view_as(candidates)
