"""Distance of the trained policy from the policy that sampled: metrics, by staleness.

Also a warning if the ratio is always 1, and the proximal policy between the two
(``approximate_proximal``).

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


# Powers of 4: the difference of two engines grows slowly along a row.
POSITIONS = (0, 16, 64, 256, 1024, 4096)


def effective_sample_size(weights: Tensor, mask: Tensor) -> Tensor:
    """``(mean w)^2 / mean(w^2)`` over the mask, a scalar.

    It is 1 if all weights are equal, and 1/n if one token carries everything.
    """
    mean_square = masked_mean(weights.square(), mask)
    return masked_mean(weights, mask).square() / mean_square.clamp(min=1e-12)


def smoothing_exponent(weights: Tensor, min_size: float) -> float:
    """The largest exponent, at most 1, that leaves an effective sample size of ``min_size``.

    Args:
        weights: positive, of any shape. The effective sample size of their powers falls as the
            exponent rises.
        min_size: as a share of the weights.

    Source: exponents below 1 exchange variance for bias, as Hachiya et al. 2009 (flattening) and
    Aouali et al. 2023 (2305.15877, exponential smoothing); to choose one by the effective sample
    size is Jasra et al. 2011.
    """
    log_w = weights.double().log().flatten()
    mask = torch.ones_like(log_w, dtype=torch.bool)

    def is_enough(exponent: float) -> bool:
        powers = (exponent * log_w).exp()
        return bool(effective_sample_size(powers, mask) >= min_size)

    if not len(log_w) or is_enough(1.0):
        return 1.0
    low = 0.0
    high = 1.0
    for _ in range(20):  # bisection: to one part in a million
        middle = (low + high) / 2
        if is_enough(middle):
            low = middle
        else:
            high = middle
    return low


def off_policy_metrics(
    current_or_proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    staleness: Tensor | None = None,
    weights: Tensor | None = None,
) -> dict[str, float]:
    """Metrics of an off-policy batch: keys "off_policy/...".

    Those of staleness s are "off_policy/staleness_s/...".

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
    ratio = importance_weights(current_or_proximal, behaviour, mask)  # [batch, length]
    # Unbounded, unlike the ratio: its mean absolute value is a metric.
    drift = torch.where(mask, current_or_proximal - behaviour, 0).detach()
    metrics = _metrics("off_policy/", ratio, drift, mask, weights)
    if staleness is not None:
        for s in staleness[mask].unique().tolist():
            prefix = f"off_policy/staleness_{int(s)}/"
            metrics |= _metrics(prefix, ratio, drift, mask & (staleness == s), weights)
    return metrics | _by_position("off_policy/from_{}/abs_log_ratio", drift, mask, mask)


def gap_metrics(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    staleness: Tensor,
) -> dict[str, float]:
    """The log-probability difference of trainer and engine under the same weights.

    These are the tokens of staleness 0.

    Args:
        proximal: log-probabilities ``[batch, length]`` by the policy as it was before the first
            update.

    Returns:
        Of d = proximal - behaviour: the mean and the largest of abs(d), ``k3`` = mean of
        exp(d) - 1 - d, and where rows are long enough the mean by position: "gap/from_n". Empty if
        no token is of staleness 0.
    """
    is_fresh = mask & (staleness == 0)  # [batch, length]
    if not is_fresh.any():
        return {}
    drift = torch.where(mask, proximal - behaviour, 0).detach()  # [batch, length]
    fresh_drift = drift[is_fresh].double()  # [fresh tokens]
    bounded_drift = fresh_drift.clamp(-EXPONENT_BOUND, EXPONENT_BOUND)
    metrics = {
        "gap/mean": float(fresh_drift.abs().mean()),
        "gap/max": float(fresh_drift.abs().max()),
        "gap/k3": float((bounded_drift.expm1() - bounded_drift).mean()),
    }
    return metrics | _by_position("gap/from_{}", drift, mask, is_fresh)


class Drift(NamedTuple):
    """Distance of the trained policy from the one that sampled some tokens.

    Args:
        kl: nats per token.
    """

    tokens: int
    kl: float


def drift_by_staleness(batches: Sequence[Sampled], version: int) -> dict[int, Drift]:
    """The tokens of each staleness, and their KL divergence of behaviour to proximal policy.

    It is the k3 estimate.

    Args:
        batches: trained together; log-probabilities that are missing give a divergence of NaN.
        version: of the proximal policy.
    """
    stalenesses = []
    log_ratios = []
    for batch in batches:
        behaviour = batch.behaviour_logprobs  # [batch, length]
        log_ratio = torch.full_like(behaviour, torch.nan)
        if batch.proximal_logprobs is not None:
            log_ratio = batch.proximal_logprobs - behaviour
        stalenesses.append((version - batch.versions)[batch.loss_mask])
        log_ratios.append(log_ratio[batch.loss_mask])
    staleness = torch.cat(stalenesses)  # [tokens]
    log_w = torch.cat(log_ratios).double().clamp(-EXPONENT_BOUND, EXPONENT_BOUND)
    kl = log_w.expm1() - log_w
    result = {}
    for s in staleness.unique():
        is_of_staleness = staleness == s
        tokens = int(is_of_staleness.sum())
        result[int(s)] = Drift(tokens, float(kl[is_of_staleness].mean()))
    return result


def stuck_ratio(proximal: Tensor, behaviour: Tensor, mask: Tensor, staleness: Tensor) -> str | None:
    """A warning if stale tokens have a ratio of exactly 1.

    Then the behaviour log-probabilities are not the engine's.
    """
    is_stale = mask & (staleness > 0)  # [batch, length]
    if not is_stale.any() or bool((proximal != behaviour)[is_stale].any()):
        return None
    return (
        f"the ratio of proximal to behaviour policy is exactly 1 on all {int(is_stale.sum())} stale tokens: the behaviour "
        "log-probabilities seem to be recomputed by the trainer, so the off-policy correction does nothing"
    )


def _by_position(name: str, drift: Tensor, mask: Tensor, is_counted: Tensor) -> dict[str, float]:
    """Mean |log w| of counted tokens, by their positions among a row's loss tokens.

    Empty if all rows are short.
    """
    position = mask.cumsum(1) - 1  # [batch, length]: among the row's loss tokens
    if not mask.any() or int(position.max()) < POSITIONS[1]:
        return {}
    edges = torch.tensor(POSITIONS[1:], device=mask.device)
    bucket = torch.bucketize(position[is_counted], edges, right=True)  # [counted tokens]
    distance = drift[is_counted].double().abs()
    metrics = {}
    for number, start in enumerate(POSITIONS):
        in_bucket = bucket == number
        if in_bucket.any():
            metrics[name.format(start)] = float(distance[in_bucket].mean())
    return metrics


def _metrics(
    prefix: str,
    ratio: Tensor,
    drift: Tensor,
    mask: Tensor,
    weights: Tensor | None,
) -> dict[str, float]:
    if not mask.any():
        return {}
    ratios = ratio[mask].double()  # [tokens]
    log_w = drift[mask].double()
    bounded_log_w = log_w.clamp(-EXPONENT_BOUND, EXPONENT_BOUND)  # as the ratio is
    metrics = {
        "ratio_mean": ratios.mean(),
        "ratio_max": ratios.max(),
        "ratio_min": ratios.min(),
        "effective_sample_size": effective_sample_size(ratio.double(), mask),
        "kl": (ratios - 1 - bounded_log_w).mean(),
        "abs_log_ratio": log_w.abs().mean(),
    }
    if weights is not None:
        factors = weights[mask]
        is_masked = factors == 0
        is_clipped = ~is_masked & (factors.double() != ratios)
        metrics["masked_fraction"] = is_masked.double().mean()
        metrics["clipped_fraction"] = is_clipped.double().mean()
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
    staleness = (current_version - versions).to(current.dtype)  # [batch, length]
    is_sampled = (staleness > 0) & (versions >= 0)
    alpha = torch.where(is_sampled, (staleness - 1) / staleness.clamp(min=1), 0).clamp(0, 1)
    current = current.detach()
    behaviour = behaviour.detach()
    if method == "loglinear":
        return behaviour + alpha * (current - behaviour)
    if method == "linear":  # the small number keeps the logarithm finite
        return ((1 - alpha) * behaviour.exp() + alpha * current.exp() + 1e-10).log()
    if method == "rollout":
        return behaviour
    raise ValueError(f"unknown method {method!r}: loglinear, linear or rollout")
