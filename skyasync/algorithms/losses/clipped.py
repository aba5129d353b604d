"""Losses that bound or damp the importance ratio token by token: PPO and its relatives.

Invariant: the gradient goes through the ratio; each token's loss depends on that token alone
(``sapo`` at sequence level: on its row).

Losses with one ratio per sequence stand below: a row's loss depends on that row alone, so a batch
may be split between rows, never within one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

from skyasync.algorithms import POLICY_LOSSES
from skyasync.algorithms.binding import configured
from skyasync.algorithms.corrections import truncate, zero_outside
from skyasync.algorithms.kl import bernoulli_kl
from skyasync.algorithms.masked import EXPONENT_BOUND, by_sign, log_ratio, row_mean, row_sum
from skyasync.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

Statistics: TypeAlias = "dict[str, Tensor]"


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    eps_low: float,
    eps_high: float,
    dual_clip: float = 0.0,
) -> tuple[Tensor, Statistics]:
    """``-min(r A, clamp(r, 1 - eps_low, 1 + eps_high) A)``.

    For A < 0 it is at most ``-dual_clip A`` where that is set.

    Statistics: ``ratio``, and ``clip_fraction``: the tokens on which the clipped term is strictly
    the smaller one, before any dual clip. The terms that bound are constants where they win, so
    they are made without a graph: that is half of the backward pass.
    """
    # All tensors are [batch, length], or [batch, 1] with one ratio per sequence.
    surrogate = ratio * advantages
    with torch.no_grad():
        bound = ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
        is_clipped = bound < surrogate
    surrogate = torch.where(is_clipped, bound, surrogate)
    if dual_clip:
        with torch.no_grad():
            floor = torch.where(advantages < 0, dual_clip * advantages, -torch.inf)
            is_below = surrogate < floor
        surrogate = torch.where(is_below, floor, surrogate)
    return -surrogate, {"clip_fraction": is_clipped, "ratio": ratio.detach()}


@POLICY_LOSSES.register("ppo")
@configured(eps_low="eps_clip_low", eps_high="eps_clip_high")
def ppo(
    current: Tensor,
    anchor: Tensor,
    advantages: Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> tuple[Tensor, Statistics]:
    """Clipped surrogate with an asymmetric range, ``r = exp(current - anchor)``.

    Source: Schulman et al. 2017 (PPO); the asymmetric range ("clip higher") Yu et al. 2025 (DAPO).
    """
    return clipped_surrogate(log_ratio(current, anchor).exp(), advantages, eps_low, eps_high)


@POLICY_LOSSES.register("dual_clip")
@configured(eps_low="eps_clip_low", eps_high="eps_clip_high", dual_clip="clip_ratio_c")
def dual_clip(
    current: Tensor,
    anchor: Tensor,
    advantages: Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float = 3.0,
) -> tuple[Tensor, Statistics]:
    """PPO whose loss for A < 0 is bounded by ``-dual_clip A`` (gradient 0 beyond).

    Source: Ye et al. 2020. verl's "vanilla" loss is this one; ROLL fixes the constant at 1 + 2 eps;
    TRL's ``delta`` caps the ratio of the unclipped term, which is the same for delta > 1 +
    eps_high.
    """
    ratio = log_ratio(current, anchor).exp()
    return clipped_surrogate(ratio, advantages, eps_low, eps_high, dual_clip)


@POLICY_LOSSES.register("decoupled_ppo")
@configured(eps_low="eps_clip_low", eps_high="eps_clip_high", cap="behave_imp_weight_cap")
def decoupled_ppo(
    current: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float = 0.0,
    cap: float = 5.0,
    truncated: bool = False,
) -> tuple[Tensor, Statistics]:
    """PPO around the proximal policy, times the detached weight ``w = exp(proximal - behaviour)``.

    Args:
        cap: tokens with ``w > cap`` are dropped (weight 0), or keep the weight ``cap`` if
            ``truncated``; 0 is no cap.

    Source: Hilton et al. 2022 (decoupled objective), Fu et al. 2025 (AReaL,
    ``behave_imp_weight_cap``). The same as ``ppo`` with the correction ``icepop`` (low 0), or
    ``token_tis`` if ``truncated``.
    """
    ratio = log_ratio(current, proximal).exp()
    loss, statistics = clipped_surrogate(ratio, advantages, eps_low, eps_high, dual_clip)
    weight = log_ratio(proximal, behaviour).exp().detach()
    if cap:
        limit = truncate if truncated else zero_outside
        weight = limit(weight, 0.0, cap)
    statistics["correction_weight"] = weight
    return loss * weight, statistics


@POLICY_LOSSES.register("importance_sampling")
def importance_sampling(current: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    """``-r A`` without any clip, ``r = exp(current - anchor)``.

    Source: Tinker's ``importance_sampling`` loss.
    """
    return -log_ratio(current, anchor).exp() * advantages


@POLICY_LOSSES.register("sapo")
@configured(tau_pos="sapo.tau_pos", tau_neg="sapo.tau_neg")
def sapo(
    current: Tensor,
    anchor: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    sequence_level: bool = False,
) -> Tensor:
    """``-4 / tau sigmoid(tau (r - 1)) A``: a soft gate in place of the clip; tau by the sign of A.

    Args:
        sequence_level: one geometric-mean ratio and one mean advantage per row (AReaL's variant).

    Source: Gao et al. 2025 (SAPO). Its paper takes the sequence mean.
    """
    log_r = log_ratio(current, anchor)
    if sequence_level:
        log_r = row_mean(log_r, mask).expand_as(log_r)
        advantages = row_mean(advantages, mask).expand_as(advantages)
    tau = by_sign(advantages > 0, tau_pos, tau_neg, like=current)
    # 4 / tau makes the gradient at r = 1 that of the plain policy gradient.
    return -torch.sigmoid(tau * (log_r.exp() - 1)) * (4 / tau) * advantages


@POLICY_LOSSES.register("dppo")
@configured(divergence="dppo.divergence", delta_low="dppo.delta_low", delta_high="dppo.delta_high")
def dppo(
    current: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    divergence: str = "tv",
    delta_low: float = 0.15,
    delta_high: float = 0.15,
    ratio_cap: float | None = None,
) -> tuple[Tensor, Statistics]:
    """``-r A``, but 0 on tokens whose probability moved too far in the advantage's direction.

    The move from behaviour mu to current p is measured on the two-way choice "this token or
    another": total variation ``|p - mu|`` ("tv") or the Bernoulli KL(mu || p) ("kl"); up to
    ``delta_high`` is allowed upwards (A > 0), up to ``delta_low`` downwards (A < 0).

    Args:
        ratio_cap: None lets the gradient through the ratio (SkyRL); a number detaches the ratio,
            capped to it, and multiplies log p (verl). The gradients agree where the cap does not
            bind.

    Source: Qi et al. 2026 (divergence PPO).
    """
    # Which tokens count is no function of the gradient: p is detached.
    p = current.detach().exp()
    mu = behaviour.exp()
    change = p - mu
    if divergence == "tv":
        distance = change.abs()
    else:
        distance = bernoulli_kl(behaviour, current.detach())
    too_far = torch.where(
        advantages > 0,
        (change > 0) & (distance > delta_high),
        (advantages < 0) & (change < 0) & (distance > delta_low),
    )
    if ratio_cap is None:
        gain = log_ratio(current, behaviour).exp()
    else:
        gain = log_ratio(current.detach(), behaviour).exp().clamp(max=ratio_cap) * current
    return torch.where(too_far, 0, -gain * advantages), {"clip_fraction": too_far}


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
    """PPO's surrogate with the sequence ratio ``s = exp(mean_t(current - anchor))``.

    Each token has it. Use it with the reduction ``sequence_mean``; with ``sequence_token_sum`` it
    is LUSPO (TRL).

    Args:
        token_gradient: GSPO-token (SkyRL, verl): each token's gradient goes through its own
            log-probability only. The same values; the gradients differ once advantages vary inside
            a sequence.
        mean_advantage: replace the advantages by their mean over the row (AReaL).
        product: the product of the token ratios in place of their geometric mean (TRL's RLOO loss).

    Source: Zheng et al. 2025 (GSPO). The paper's clip range is narrow: 3e-4 below, 4e-4 above.
    """
    if token_gradient:
        mean = row_mean(current.detach() - anchor, mask)  # [batch, 1]
        # Adds 0 with a gradient: [batch, length], with equal values in a row.
        log_s = (mean + current - current.detach()).clamp(max=EXPONENT_BOUND)
    else:
        summary = row_sum if product else row_mean
        log_s = summary(current - anchor, mask)  # [batch, 1]
        log_s = log_s.clamp(-EXPONENT_BOUND, EXPONENT_BOUND)
    if mean_advantage:
        advantages = row_mean(advantages, mask)
    loss, statistics = clipped_surrogate(log_s.exp(), advantages, eps_low, eps_high)
    # Each token has its row's loss: the reduction's weights are per token.
    for name, value in statistics.items():
        statistics[name] = value.expand_as(current)
    return loss.expand_as(current), statistics


@POLICY_LOSSES.register("gmpo")
@configured(eps_low="eps_clip_low", eps_high="eps_clip_high")
def gmpo(
    current: Tensor,
    anchor: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_low: float = 0.4,
    eps_high: float = 0.4,
) -> tuple[Tensor, Statistics]:
    """``-A exp(mean_t y)`` with a clipped log-ratio y.

    It is clipped to [-eps_low, eps_high] where that lowers ``A y``. Use it with the reduction
    ``sequence_mean``. Source: Zhao et al. 2025 (geometric-mean policy optimisation).
    """
    x = log_ratio(current, anchor)  # [batch, length]
    with torch.no_grad():
        is_clipped = torch.where(advantages > 0, x > eps_high, x < -eps_low)
        bound = by_sign(advantages > 0, eps_high, -eps_low, like=x)
    y = torch.where(is_clipped, bound, x)
    loss = -row_mean(advantages, mask) * row_mean(y, mask).exp()  # [batch, 1]
    return loss.expand_as(current), {"clip_fraction": is_clipped}


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
    """``-sg[phi] A log pi`` with ``phi = w^k exp(lambda (1 - w))``.

    w is the product of the row's token ratios, k and lambda by the sign of A (A >= 0 is positive).
    Source: Shen et al. 2026 (VESPO); TRL ``loss_type=vespo``.
    """
    log_w = row_sum(log_ratio(current.detach(), anchor), mask)  # [batch, 1]
    # Below 1e-8 a weight is 0 in effect, and its power would underflow.
    log_w = log_w.clamp(math.log(1e-8), EXPONENT_BOUND)
    positive = advantages >= 0
    k = by_sign(positive, k_pos, k_neg, current)
    lam = by_sign(positive, lambda_pos, lambda_neg, current)
    return -(lam + k * log_w - lam * log_w.exp()).exp() * advantages * current
