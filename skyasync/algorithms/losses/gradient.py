"""Policy-gradient losses: ``-w A log pi`` with a detached weight w.

No token's gradient is clipped away.

Invariant: each token's loss depends on that token alone, and the gradient goes through ``current``
only, never through the weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyasync.algorithms import POLICY_LOSSES
from skyasync.algorithms.binding import configured
from skyasync.algorithms.losses.clipped import Statistics
from skyasync.algorithms.masked import log_ratio
from skyasync.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


@POLICY_LOSSES.register("vanilla")
def vanilla(current: Tensor, advantages: Tensor) -> Tensor:
    """``-A log pi``: REINFORCE, with no ratio at all.

    Source: Williams 1992; verl calls it ``gpg``.
    """
    return -advantages * current


@POLICY_LOSSES.register("tis")
@configured(low="tis_low", high="tis_high")
def tis(
    current: Tensor,
    anchor: Tensor,
    advantages: Tensor,
    *,
    low: float = 0.0,
    high: float = 1.0,
) -> Tensor:
    """Truncated importance sampling: ``-sg[clamp(r, low, high)] A log pi``.

    ``r = exp(current - anchor)``. Source: ROLL ``pg_variant=tis`` (truncation at 1). Not the
    correction ``token_tis``, whose ratio is proximal / behaviour.
    """
    return -_ratio(current, anchor).clamp(low, high) * advantages * current


@POLICY_LOSSES.register("cispo")
@configured(eps_low="cispo.cispo_eps_clip_low", eps_high="cispo.cispo_eps_clip_high")
def cispo(
    current: Tensor,
    anchor: Tensor,
    advantages: Tensor,
    *,
    eps_low: float = 1.0,
    eps_high: float = 4.0,
    unified_mask: bool = False,
) -> tuple[Tensor, Statistics]:
    """``-sg[clamp(r, 1 - eps_low, 1 + eps_high)] A log pi``.

    The weight is clipped, the gradient is not.

    Args:
        eps_low: 1 or more is no lower clip, as in the paper. TRL's ``epsilon_high`` is 1 + this
            ``eps_high``.
        unified_mask: drop the tokens that PPO would clip (ratio above the band with A > 0, below it
            with A < 0); equation 7 of the paper.

    ``clip_fraction`` marks ratios outside the band. Source: MiniMax-M1 (2025).
    """
    ratio = _ratio(current, anchor)
    is_above = ratio > 1 + eps_high
    is_below = ratio < 1 - eps_low
    loss = -ratio.clamp(1 - eps_low, 1 + eps_high) * advantages * current
    if unified_mask:
        is_clipped_by_ppo = (is_above & (advantages > 0)) | (is_below & (advantages < 0))
        loss = torch.where(is_clipped_by_ppo, 0, loss)
    return loss, {"clip_fraction": is_above | is_below}


@POLICY_LOSSES.register("topr")
@configured(positive_weight="topr.positive_weight", negative_weight="topr.negative_weight")
def topr(
    current: Tensor,
    anchor: Tensor,
    advantages: Tensor,
    *,
    positive: Tensor | None = None,
    positive_weight: float = 1.0,
    negative_weight: float = 1.0,
) -> Tensor:
    """Tapered REINFORCE: the ratio weighs negative samples only.

    ``-A log pi`` on positive samples, ``-sg[clamp(r, 0, 1)] A log pi`` on negative ones.

    Args:
        positive: bool, broadcast to ``[batch, length]``: which samples are positive (ROLL: score >
            0). By default those with A > 0, which is the same for rewards of 0 and 1 with a group
            baseline.

    Source: Le Roux et al. 2025 (TOPR); the paper's ratio is the sequence's, here as in ROLL it is
    the token's.
    """
    if positive is None:
        positive = advantages > 0
    ratio = _ratio(current, anchor).clamp(max=1.0)
    weight = torch.where(positive, positive_weight, negative_weight * ratio)
    return -weight * advantages * current


@POLICY_LOSSES.register("kimi15")
@configured(tau="kimi15_tau")
def kimi15(current: Tensor, anchor: Tensor, advantages: Tensor, *, tau: float = 0.1) -> Tensor:
    """``-A log pi + tau / 2 (log pi - log anchor)^2``: a quadratic leash in place of a ratio.

    Source: Kimi k1.5 (2025), mirror descent; ROLL ``pg_variant=kimi15``; verl ``dro`` with tau =
    beta.
    """
    return -advantages * current + tau / 2 * (current - anchor).square()


@POLICY_LOSSES.register("rollout_is")
@configured(eps_low="eps_clip_low", eps_high="eps_clip_high")
def rollout_is(
    current: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> tuple[Tensor, Statistics]:
    """``-sg[r] A log pi`` where ``1 - eps_low < r < 1 + eps_high``, else 0.

    ``r = exp(current - behaviour)``. The ratio is taken straight from the behaviour policy, so no
    proximal log-probabilities are needed. Source: GLM-5 (2026); SkyRL ``rollout_is``.
    """
    ratio = _ratio(current, behaviour)
    in_range = (ratio > 1 - eps_low) & (ratio < 1 + eps_high)
    loss = torch.where(in_range, -ratio * advantages * current, 0)
    return loss, {"clip_fraction": ~in_range}


def _ratio(current: Tensor, anchor: Tensor) -> Tensor:
    """The importance ratio ``[batch, length]`` without gradient."""
    return log_ratio(current.detach(), anchor).exp()
