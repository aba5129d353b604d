"""Losses with one importance ratio per sequence.

Invariant: a row's loss depends on that row alone, so a batch may be split between rows, never within one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from skyasync.algorithms import POLICY_LOSSES
from skyasync.algorithms.binding import configured
from skyasync.algorithms.losses.clipped import Statistics, clipped_surrogate
from skyasync.algorithms.masked import EXPONENT_BOUND, by_sign, log_ratio, row_mean, row_sum
from skyasync.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


@POLICY_LOSSES.register("gspo")
@configured(eps_low="eps_clip_low", eps_high="eps_clip_high")
def gspo(
    current: Tensor,
    anchor: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    token_gradient: bool = False,
    mean_advantage: bool = False,
    product: bool = False,
) -> tuple[Tensor, Statistics]:
    """PPO's surrogate with the sequence ratio ``s = exp(mean_t(current - anchor))`` on each of its tokens.

    Use it with the reduction ``sequence_mean``; with ``sequence_token_sum`` it is LUSPO (TRL).

    Args:
        token_gradient: GSPO-token (SkyRL, verl): each token's gradient goes through its own log-probability only.
            The same values; the gradients differ once advantages vary inside a sequence.
        mean_advantage: replace the advantages by their mean over the row (AReaL).
        product: the product of the token ratios in place of their geometric mean (TRL's RLOO loss).

    Source: Zheng et al. 2025 (GSPO). The paper's clip range is narrow: 3e-4 below, 4e-4 above.
    """
    if token_gradient:
        mean = row_mean(current.detach() - anchor, mask)
        log_s = (mean + current - current.detach()).clamp(max=EXPONENT_BOUND)
    else:
        summary = row_sum if product else row_mean
        log_s = summary(current - anchor, mask).clamp(-EXPONENT_BOUND, EXPONENT_BOUND)
    if mean_advantage:
        advantages = row_mean(advantages, mask)
    loss, statistics = clipped_surrogate(log_s.exp(), advantages, eps_low, eps_high)
    return loss.expand_as(current), {name: value.expand_as(current) for name, value in statistics.items()}


@POLICY_LOSSES.register("gmpo")
@configured(eps_low="eps_clip_low", eps_high="eps_clip_high")
def gmpo(
    current: Tensor, anchor: Tensor, advantages: Tensor, mask: Tensor, *, eps_low: float = 0.4, eps_high: float = 0.4
) -> tuple[Tensor, Statistics]:
    """``-A exp(mean_t y)``, y the log-ratio clipped to [-eps_low, eps_high] where that lowers ``A y``.

    Use it with the reduction ``sequence_mean``. Source: Zhao et al. 2025 (geometric-mean policy optimisation).
    """
    x = log_ratio(current, anchor)
    with torch.no_grad():
        frozen = torch.where(advantages > 0, x > eps_high, x < -eps_low)
        bound = by_sign(advantages > 0, eps_high, -eps_low, like=x)
    y = torch.where(frozen, bound, x)
    loss = -row_mean(advantages, mask) * row_mean(y, mask).exp()
    return loss.expand_as(current), {"clip_fraction": frozen}


@POLICY_LOSSES.register("vespo")
def vespo(
    current: Tensor,
    anchor: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Tensor:
    """``-sg[phi] A log pi`` with ``phi = w^k exp(lambda (1 - w))``, w the product of the row's token ratios.

    k and lambda by the sign of A (A >= 0 is positive). Source: Shen et al. 2026 (VESPO); TRL ``loss_type=vespo``.
    """
    log_w = row_sum(log_ratio(current.detach(), anchor), mask).clamp(math.log(1e-8), EXPONENT_BOUND)
    positive = advantages >= 0
    k, lam = by_sign(positive, k_pos, k_neg, current), by_sign(positive, lambda_pos, lambda_neg, current)
    return -(lam + k * log_w - lam * log_w.exp()).exp() * advantages * current
