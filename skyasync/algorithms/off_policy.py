"""How far training is from the policy that sampled: metrics, by staleness, and a warning if the
ratio is always 1.

Also the proximal policy between the two (``approximate_proximal``).

Invariant: metrics are means over the mask's tokens of the tensors given; call them on a whole
batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from skyasync.algorithms.corrections import importance_weights
from skyasync.algorithms.masked import EXPONENT_BOUND, masked_mean


class Sampled(Protocol):
    """A batch whose tokens have a policy version each; ``[batch, length]``."""

    @property
    def proximal_logprobs(self) -> Tensor | None: ...
    @property
    def behaviour_logprobs(self) -> Tensor: ...
    @property
    def versions(self) -> Tensor: ...
    @property
    def loss_mask(self) -> Tensor: ...


POSITIONS = (0, 16, 64, 256, 1024, 4096)


def effective_sample_size(weights: Tensor, mask: Tensor) -> Tensor:
    """``(mean w)^2 / mean(w^2)`` over the mask: 1 when all weights are equal, 1/n when one token
    carries everything."""
    return masked_mean(weights, mask).square() / masked_mean(weights.square(), mask).clamp(
        min=1e-12
    )


def smoothing_exponent(weights: Tensor, least: float) -> float:
    """The largest exponent, at most 1, with which the effective sample size of these weights is at
    least ``least``.

    Args:
        weights: positive, of any shape. The effective sample size of their powers falls as the
            exponent rises.

    Source: exponents below 1 exchange variance for bias, as Hachiya et al. 2009 (flattening) and
    Aouali et al. 2023 (2305.15877, exponential smoothing); to choose one by the effective sample
    size is Jasra et al. 2011.
    """
    log_w = weights.double().log().flatten()

    def enough(exponent: float) -> bool:
        powers = (exponent * log_w).exp()
        return bool(
            effective_sample_size(powers, torch.ones_like(powers, dtype=torch.bool)) >= least
        )

    if not len(log_w) or enough(1.0):
        return 1.0
    low = 0.0
    high = 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if enough(middle) else (low, middle)
    return low


def off_policy_metrics(
    current_or_proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    staleness: Tensor | None = None,
    weights: Tensor | None = None,
) -> dict[str, float]:
    """What an off-policy batch looks like: keys "off_policy/...", those of staleness s
    "off_policy/staleness_s/...".

    Args:
        current_or_proximal, behaviour: log-probabilities ``[batch, length]``.
        staleness: int ``[batch, length]``, versions between sampling and training; adds the same
            metrics for the tokens of each staleness that occurs.
        weights: the correction's factors ``[batch, length]``; adds the share of tokens it drops and
            changes.

    Returns:
        ``ratio_mean``, ``ratio_max``, ``ratio_min`` of w = exp(proximal - behaviour), their
        ``effective_sample_size`` (as a share of the tokens), ``kl`` (k3 estimate of KL(behaviour ||
        proximal)), ``abs_log_ratio`` and, with ``weights``, ``masked_fraction`` (factor 0) and
        ``clipped_fraction`` (neither 0 nor w). Where rows are long enough, ``abs_log_ratio`` by the
        tokens' positions too: "off_policy/from_n/...".
    """
    ratio = importance_weights(current_or_proximal, behaviour, mask)
    drift = torch.where(mask, current_or_proximal - behaviour, 0).detach()
    metrics = _metrics("off_policy/", ratio, drift, mask, weights)
    if staleness is not None:
        for s in staleness[mask].unique().tolist():
            metrics |= _metrics(
                f"off_policy/staleness_{int(s)}/", ratio, drift, mask & (staleness == s), weights
            )
    return metrics | _by_position("off_policy/from_{}/abs_log_ratio", drift, mask, mask)


def gap_metrics(
    proximal: Tensor, behaviour: Tensor, mask: Tensor, staleness: Tensor
) -> dict[str, float]:
    """The log-probability difference of trainer and engine under the same weights: of tokens of
    staleness 0.

    Args:
        proximal: log-probabilities ``[batch, length]`` by the policy as it was before the first
            update.

    Returns:
        Of d = proximal - behaviour: the mean and the largest of abs(d), ``k3`` = mean of exp(d) - 1
        - d, and where rows
        are long enough the mean by position: "gap/from_n". Empty if no token is of staleness 0.
    """
    fresh = mask & (staleness == 0)
    if not fresh.any():
        return {}
    drift = torch.where(mask, proximal - behaviour, 0).detach()
    chosen = drift[fresh].double()
    near = chosen.clamp(-20, 20)
    values = {
        "mean": chosen.abs().mean(),
        "max": chosen.abs().max(),
        "k3": (near.expm1() - near).mean(),
    }
    return {f"gap/{name}": float(v) for name, v in values.items()} | _by_position(
        "gap/from_{}", drift, mask, fresh
    )


class Drift(NamedTuple):
    """How far the trained policy is from the one that sampled some tokens: ``kl`` in nats per
    token."""

    tokens: int
    kl: float


def drift_by_staleness(batches: Sequence[Sampled], version: int) -> dict[int, Drift]:
    """The tokens of each staleness, and their KL divergence of behaviour to proximal policy (k3
    estimate).

    Args:
        batches: what is trained together; log-probabilities that are missing give a divergence of
            NaN.
        version: of the proximal policy.
    """
    staleness = torch.cat([(version - batch.versions)[batch.loss_mask] for batch in batches])
    log_ratios = []
    for batch in batches:
        behaviour = batch.behaviour_logprobs
        proximal = batch.proximal_logprobs
        if proximal is None:
            ratios = torch.full_like(behaviour, torch.nan)
        else:
            ratios = proximal - behaviour
        log_ratios.append(ratios[batch.loss_mask])
    log_w = torch.cat(log_ratios).double().clamp(-EXPONENT_BOUND, EXPONENT_BOUND)
    kl = log_w.expm1() - log_w
    return {
        int(s): Drift(int((staleness == s).sum()), float(kl[staleness == s].mean()))
        for s in staleness.unique()
    }


def stuck_ratio(proximal: Tensor, behaviour: Tensor, mask: Tensor, staleness: Tensor) -> str | None:
    """A warning if stale tokens have a ratio of exactly 1: the behaviour log-probabilities are not
    the engine's."""
    stale = mask & (staleness > 0)
    if not stale.any() or bool((proximal != behaviour)[stale].any()):
        return None
    return (
        f"the ratio of proximal to behaviour policy is exactly 1 on all {int(stale.sum())} stale tokens: the behaviour "
        "log-probabilities seem to be recomputed by the trainer, so the off-policy correction does nothing"
    )


def _by_position(name: str, drift: Tensor, mask: Tensor, chosen: Tensor) -> dict[str, float]:
    """Mean |log w| of ``chosen`` from each of ``POSITIONS`` of a row's loss tokens to the next;
    none of short rows."""
    position = mask.cumsum(1) - 1
    if not mask.any() or int(position.max()) < POSITIONS[1]:
        return {}
    edges = torch.tensor(POSITIONS[1:], device=mask.device)
    which = torch.bucketize(position[chosen], edges, right=True)
    distance = drift[chosen].double().abs()
    return {
        name.format(first): float(distance[which == number].mean())
        for number, first in enumerate(POSITIONS)
        if bool((which == number).any())
    }


def _metrics(
    prefix: str, ratio: Tensor, drift: Tensor, mask: Tensor, weights: Tensor | None
) -> dict[str, float]:
    if not mask.any():
        return {}
    chosen = ratio[mask].double()
    log_w = drift[mask].double()
    metrics = {
        "ratio_mean": chosen.mean(),
        "ratio_max": chosen.max(),
        "ratio_min": chosen.min(),
        "effective_sample_size": effective_sample_size(ratio.double(), mask),
        "kl": (chosen - 1 - log_w.clamp(-20, 20)).mean(),
        "abs_log_ratio": log_w.abs().mean(),
    }
    if weights is not None:
        factor = weights[mask]
        metrics["masked_fraction"] = (factor == 0).double().mean()
        metrics["clipped_fraction"] = ((factor != 0) & (factor.double() != chosen)).double().mean()
    return {prefix + name: float(value) for name, value in metrics.items()}


def approximate_proximal(
    current: Tensor,
    behaviour: Tensor,
    versions: Tensor,
    current_version: int,
    *,
    method: str = "loglinear",
) -> Tensor:
    """Log-probabilities ``[batch, length]`` of the policy just before this update, interpolated.

    With ``alpha = (v_prox - v) / (current_version - v)`` in [0, 1] and
    ``v_prox = current_version - 1``: "loglinear" is ``behaviour + alpha (current - behaviour)``;
    "linear" interpolates the probabilities; "rollout" is ``behaviour``. Tokens of the newest
    version (``v_prox``) get the behaviour policy itself. The result is detached.

    Args:
        versions: int ``[batch, length]``, the policy version of each token; negative (prompt) gives
            alpha 0.
        current_version: the version that this update makes.

    Source: AReaL ``prox_logp_method``.
    """
    staleness = (current_version - versions).to(current.dtype)
    alpha = torch.where(
        (staleness > 0) & (versions >= 0), (staleness - 1) / staleness.clamp(min=1), 0
    ).clamp(0, 1)
    current = current.detach()
    behaviour = behaviour.detach()
    if method == "loglinear":
        return behaviour + alpha * (current - behaviour)
    if method == "linear":
        return ((1 - alpha) * behaviour.exp() + alpha * current.exp() + 1e-10).log()
    if method == "rollout":
        return behaviour
    raise ValueError(f"unknown method {method!r}: loglinear, linear or rollout")
