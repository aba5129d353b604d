"""KL divergence to a reference policy or a teacher, in the loss, reward or advantages.

It is estimated from the sampled tokens.

Invariant: ``[batch, length]`` in, ``[batch, length]`` out, token by token. p is the policy that
sampled (with gradient in a loss), q the other one. k1 is unbiased with a high variance, k3 unbiased
and never negative; k2 and abs are biased.

As a *loss* the gradient is what counts, and there k1's has mean 0 while k2's is that of the KL
divergence: ``k1_straight_through`` and ``k3_straight_through`` have the value of k1 and k3 and the
gradient of k2 (verl ``k1+``, ``k3+``; Tang and Munos 2025, Liu et al. 2025). Off policy all of them
need the ratio as a factor: ``kl_importance_weighted``.

On-policy distillation: a teacher says of each token that the policy sampled how likely it should
have been. The reverse KL of policy p to teacher t on the policy's own samples has the gradient
E[(log p - log t) grad log p]: that of a policy gradient whose advantage is log t - log p, detached.
Neither groups, nor micro-batches, nor ranks change it. Sources: Lu and Thinking Machines Lab 2025,
"On-Policy Distillation" (discount 0: a token is judged by itself); Gu et al. 2024 (MiniLLM);
Agarwal et al. 2024 (GKD).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skyasync.algorithms import KL_CONTROLLERS, KL_ESTIMATORS
from skyasync.algorithms.binding import bind, configured, setting
from skyasync.algorithms.masked import log_ratio, masked_mean, row_mean
from skyasync.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST_REST = 1e-7
"""Smallest probability of all tokens outside the top k: rounding may give 0, whose log is -inf."""


@KL_ESTIMATORS.register("k1")
def k1(current: Tensor, reference: Tensor) -> Tensor:
    """``log p - log q``. Source: Schulman, "Approximating KL divergence", 2020, as k2 and k3."""
    return current - reference


@KL_ESTIMATORS.register("abs")
def absolute(current: Tensor, reference: Tensor) -> Tensor:
    """``|log p - log q|``."""
    return (current - reference).abs()


@KL_ESTIMATORS.register("k2")
def k2(current: Tensor, reference: Tensor) -> Tensor:
    """``(log p - log q)^2 / 2``; on policy its gradient is that of KL(p || q)."""
    return (current - reference).square() / 2


@KL_ESTIMATORS.register("k3")
def k3(current: Tensor, reference: Tensor) -> Tensor:
    """``q / p - 1 - log(q / p)``, the log-ratio bounded to ±20."""
    x = log_ratio(reference, current)  # log(q / p)
    return x.exp() - 1 - x


@KL_ESTIMATORS.register("k1_straight_through")
def k1_straight_through(current: Tensor, reference: Tensor) -> Tensor:
    """Value of k1, gradient of k2."""
    return straight_through(k1(current, reference), current, reference)


@KL_ESTIMATORS.register("k3_straight_through")
def k3_straight_through(current: Tensor, reference: Tensor) -> Tensor:
    """Value of k3, gradient of k2."""
    return straight_through(k3(current, reference), current, reference)


def straight_through(value: Tensor, current: Tensor, reference: Tensor) -> Tensor:
    """``value``, with the gradient of k2."""
    gradient = k2(current, reference)
    # The last two terms are 0 together, and have the gradient of the first of them.
    return value.detach() + gradient - gradient.detach()


def kl_estimate(
    current: Tensor,
    reference: Tensor,
    estimator: str = "k3",
    *,
    bound: float = 0.0,
    weight: Tensor | None = None,
) -> Tensor:
    """The named estimate per token, ``[batch, length]``.

    Args:
        bound: clamp the value to ± this (gradient 0 beyond); 0 is off. Other frameworks use 10:
            OpenRLHF and AReaL on all estimators, SkyRL, verl and ROLL on k3. It biases the
            estimate.
        weight: the ratio current / (policy that sampled), with gradient: the product then estimates
            KL and its gradient without bias although the samples are another policy's
            (DeepSeek-V3.2; TRL ``use_bias_correction_kl``).
    """
    value = KL_ESTIMATORS[estimator](current, reference)
    if bound:
        clamped_value = value.clamp(-bound, bound)
        if estimator.endswith("_straight_through"):
            # The gradient is not the value's: clamping the value must not stop it.
            value = value + (clamped_value - value).detach()
        else:
            value = clamped_value
    if weight is None:
        return value
    return value * weight


def bernoulli_kl(logprobs_p: Tensor, logprobs_q: Tensor, eps: float = 1e-8) -> Tensor:
    """KL(p || q) of "this token or another", from log-probabilities.

    Args:
        eps: p and q are clamped to ``[eps, 1 - eps]``, where the logarithms are finite.
    """
    p = logprobs_p.exp().clamp(eps, 1 - eps)
    q = logprobs_q.exp().clamp(eps, 1 - eps)
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def penalize_rewards(
    rewards: Tensor,
    policy: Tensor,
    reference: Tensor,
    mask: Tensor,
    *,
    coef: float,
    estimator: str = "k3",
    bound: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Subtract ``coef`` times the KL estimate from token rewards, on the mask's tokens.

    Args:
        policy: proximal log-probabilities.

    Returns:
        rewards ``[batch, length]``, and a scalar: the mean over sequences of their mean KL (what
        the controller sees).
    """
    kl = kl_estimate(policy, reference, estimator, bound=bound)
    kl = torch.where(mask, kl, 0)  # [batch, length]
    mean_kl = masked_mean(row_mean(kl, mask), mask.any(1, keepdim=True))  # over [batch, 1]
    return rewards - coef * kl, mean_kl


@dataclass
class KLController:
    """The coefficient of the KL penalty in the reward.

    A subclass of the user's is made with its first value.

    Args:
        value: the coefficient; ``kl_loss_coef`` at first. Checkpoints have it, and nothing else of
            a controller.
    """

    value: float

    def update(self, kl: float, samples: int) -> None:
        """Change ``value`` after a batch.

        Args:
            kl: mean KL of the batch, in nats per token; may be infinite or NaN.
            samples: how many trajectories the batch has.
        """
        raise NotImplementedError


@KL_CONTROLLERS.register("fixed")
@dataclass
class FixedKLController(KLController):
    """A constant coefficient."""

    def update(self, kl: float, samples: int) -> None:
        """Do nothing."""


@KL_CONTROLLERS.register("adaptive")
@configured(target="kl_ctrl.kl_target", horizon="kl_ctrl.horizon")
@dataclass
class AdaptiveKLController(KLController):
    """A coefficient that moves in proportion to how far the KL is from ``target``.

    ``value *= 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon``. Source: Ziegler et al.
    2019, section 2.2.
    """

    target: float = field(default=0.1, kw_only=True)
    horizon: int = field(default=10000, kw_only=True)

    def update(self, kl: float, samples: int) -> None:
        """Move the coefficient towards the target; by nothing if ``kl`` is not finite."""
        if not math.isfinite(kl):
            return
        # The paper's limits: one batch moves it by a fifth of its horizon's step at most.
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * samples / self.horizon


def kl_controller(cfg: object) -> KLController:
    """The controller that ``kl_ctrl.type`` names, starting at ``kl_loss_coef``."""
    controller: type[KLController] = KL_CONTROLLERS[setting(cfg, "kl_ctrl.type", "fixed")]
    return bind(controller, cfg)({"value": setting(cfg, "kl_loss_coef", 0.001)})


# ---------------------------------------------------------------- teachers


def top_k_reverse_kl(logprobs: Tensor, teacher: Tensor) -> Tensor:
    """KL(p || t) of distributions over k tokens, and all others as one more; ``[...]``.

    Differentiable in p. It is the whole vocabulary's where k is that, and else never more. With p
    and t scaled to 1 over the k tokens instead, what p gives to others would cost nothing.

    Source: Tail-Aware Top-k On-Policy Distillation (arXiv 2608.14728).

    Args:
        logprobs: of k tokens under the policy, ``[..., k]``.
        teacher: of the same tokens under the teacher.
    """
    log_rest = _log_rest(logprobs)  # [...]
    teacher_log_rest = _log_rest(teacher)
    top_k_kl = (logprobs.exp() * (logprobs - teacher)).sum(-1)
    return top_k_kl + log_rest.exp() * (log_rest - teacher_log_rest)


def _log_rest(logprobs: Tensor) -> Tensor:
    """The log-probability of all other tokens, ``[...]``, of ``[..., k]``."""
    return (1.0 - logprobs.exp().sum(-1)).clamp(min=SMALLEST_REST).log()


def teacher_advantages(logprobs: Tensor, teacher: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The teacher's part of each token's advantage, and the mean reverse KL per token.

    Args:
        logprobs: of the sampled tokens under the policy before the update, ``[batch, length]``.
        teacher: the same under the teacher.

    Returns:
        ``log t - log p``, ``[batch, length]``, 0 outside the mask; and a scalar, the k1 estimate of
        KL(p || t).
    """
    gap = torch.where(mask, teacher - logprobs, 0.0).detach()
    return gap, -gap.sum(dtype=torch.float64) / mask.sum().clamp(min=1)
