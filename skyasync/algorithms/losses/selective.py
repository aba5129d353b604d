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
    """Make ``select`` the function that chooses this loss's tokens; bound to the configuration as
    losses are."""

    def mark(loss: F) -> F:
        loss.select = select  # type: ignore[attr-defined]
        return loss

    return mark


def covariance(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """``(A - mean A) (log pi - mean log pi)`` per token, means over the mask. Source: Cui et al.
    2025."""
    return (advantages - masked_mean(advantages, mask)) * (logprobs - masked_mean(logprobs, mask))


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
    """Tokens (bool) drawn at random among those with ``low < covariance < high``: ``share`` of the
    mask, at least 1.

    Args:
        eligible: bool ``[batch, length]``; only these can be drawn (verl, SkyRL: those that PPO
            does not clip).
    """
    score = covariance(proximal, advantages, mask)
    candidates = mask & (score > low) & (score < high)
    if eligible is not None:
        candidates &= eligible
    count = max(1, int(share * int(mask.sum())))
    return _largest(torch.rand_like(score), candidates, count)


@configured(share="kl_cov.kl_cov_frac")
def top_covariance(
    proximal: Tensor, advantages: Tensor, mask: Tensor, *, share: float = 0.2
) -> Tensor:
    """The tokens (bool) with the largest covariance: ``share`` of the mask, at least 1."""
    return _largest(
        covariance(proximal, advantages, mask), mask, max(1, int(share * int(mask.sum())))
    )


@configured(threshold="m2po_threshold")
def small_second_moment(
    proximal: Tensor, behaviour: Tensor, mask: Tensor, *, threshold: float = 0.04
) -> Tensor:
    """All tokens (bool) but the fewest with the largest ``(proximal - behaviour)^2`` that bring its
    mean below ``threshold``; one token always stays. Source: Zheng et al. 2025 (M2PO)."""
    moment, order = torch.where(mask, (proximal - behaviour).square(), torch.inf).flatten().sort()
    total = int(mask.sum())
    running_mean = moment[:total].cumsum(0) / torch.arange(1, total + 1, device=mask.device)
    if total:
        count = max(1, int((running_mean < threshold).sum()))
    else:
        count = 0
    keep = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    keep[order[:count]] = True
    return keep.view_as(mask)


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
    loss, statistics = clipped_surrogate(
        log_ratio(current, anchor).exp(), advantages, eps_low, eps_high
    )
    chosen = selection.bool()
    return torch.where(chosen, 0, loss), {**statistics, "clip_fraction": chosen}


@POLICY_LOSSES.register("kl_cov")
@prepared_by(top_covariance)
@configured(coef="kl_cov.ppo_kl_coef")
def kl_cov(
    current: Tensor, anchor: Tensor, advantages: Tensor, selection: Tensor, *, coef: float = 1.0
) -> Tensor:
    """``-r A``, and on the tokens of ``selection`` a penalty ``coef |current - anchor|``. Source:
    Cui et al. 2025."""
    x = log_ratio(current, anchor)
    return -x.exp() * advantages + torch.where(selection.bool(), coef * x.abs(), 0)


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
    loss, statistics = clipped_surrogate(
        log_ratio(current, proximal).exp(), advantages, eps_low, eps_high
    )
    keep = selection.bool()
    return torch.where(keep, loss, 0), {**statistics, "correction_weight": keep}


def _largest(score: Tensor, candidates: Tensor, count: int) -> Tensor:
    """The ``count`` candidates (bool) with the largest score, or all of them if they are fewer."""
    count = min(count, int(candidates.sum()))
    chosen = torch.zeros(score.numel(), dtype=torch.bool, device=score.device)
    if count:
        chosen[torch.where(candidates, score, -torch.inf).flatten().topk(count).indices] = True
    return chosen.view_as(candidates)
