"""What happens to rewards before they become advantages: truncation, length penalties, scale, clip,
normalisation; and which groups are worth training on.

Invariant: a change is put on the last loss token of its sample, so that a sample's score is the
shaped reward and discounting sees it at the end. Shaping sees what the environment gave: a KL
penalty is subtracted after it. A filter looks at the rewards of one group (a sequence of floats)
and answers yes or no. Importing this imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from skyasync.algorithms.advantages import normalize
from skyasync.algorithms.binding import setting
from skyasync.algorithms.masked import JoinedRows
from skyasync.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


def shape_rewards(
    cfg: object,
    rewards: Tensor,
    mask: Tensor,
    *,
    truncated: Tensor | None = None,
    group_ids: Tensor | None = None,
    trajectory_ids: Tensor | None = None,
) -> Tensor:
    """Token rewards ``[batch, length]`` with every sample's score shaped; the very same tensor if
    nothing is asked for.

    In this order: ``truncated_responses=zero`` or ``stop_properly_penalty_coef``,
    ``overlong_buffer``, ``reward_bias``, ``reward_scale``, ``reward_clip``,
    ``reward_normalization``.

    Args:
        mask: loss tokens; their number is a sample's length.
        truncated: bool ``[batch]``, the response did not end by itself; needed by the first two.
        group_ids: ``[batch]``, needed by the last.
        trajectory_ids: ``[batch]``; rows that share one are one sample.
    """
    if trajectory_ids is not None:
        samples = JoinedRows(trajectory_ids)
        per_sample = [None if x is None else samples.first(x) for x in (truncated, group_ids)]
        shaped = shape_rewards(
            cfg,
            samples.join(rewards),
            samples.join(mask),
            truncated=per_sample[0],
            group_ids=per_sample[1],
        )
        return samples.split(shaped)
    score = rewards.sum(1)
    shaped = _score(cfg, score, mask.sum(1), truncated, group_ids)
    if shaped is score:
        return rewards
    return add_at_end(rewards, shaped - score, mask)


def _score(
    cfg: object, score: Tensor, lengths: Tensor, truncated: Tensor | None, group_ids: Tensor | None
) -> Tensor:
    """The shaped scores ``[batch]``; ``score`` itself where nothing is asked for."""
    if setting(cfg, "truncated_responses", "train") == "zero":
        coef = 0.0
    else:
        coef = None
    if coef is None:
        coef = setting(cfg, "stop_properly_penalty_coef", 1.0)
    else:
        coef = coef
    if coef != 1.0 and truncated is not None:
        score = stop_properly_penalty(score, truncated, coef)
    buffer = setting(cfg, "overlong_buffer.len", 0)
    if buffer:
        factor = setting(cfg, "overlong_buffer.penalty_factor", 1.0)
        score = score + overlong_penalty(
            lengths, setting(cfg, "overlong_buffer.max_len", 0), buffer, factor=factor
        )
    bias, scale, clip = (
        setting(cfg, f"reward_{k}", d) for k, d in (("bias", 0.0), ("scale", 1.0), ("clip", 0.0))
    )
    if (bias, scale, clip) != (0.0, 1.0, 0.0):
        score = scale_and_clip(score, bias=bias, scale=scale, clip=clip)
    pool = setting(cfg, "reward_normalization", "none")
    if pool != "none" and group_ids is not None:
        score = normalize(score, group_ids, mean=pool, std=pool)
    return score


def scale_and_clip(
    scores: Tensor, *, bias: float = 0.0, scale: float = 1.0, clip: float = 0.0
) -> Tensor:
    """``(score + bias) * scale``, clamped to ± ``clip`` unless that is 0. Source: AReaL's reward
    settings."""
    shaped = (scores + bias) * scale
    if clip:
        return shaped.clamp(-clip, clip)
    return shaped


def add_at_end(rewards: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
    """Token rewards ``[batch, length]`` with ``scores [batch]`` added on each row's last token of
    the mask.

    A row without such a token gets it in column 0, where no loss token ever stands.
    """
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, 0).amax(1, keepdim=True)
    return rewards.scatter_add(1, last, scores.unsqueeze(1).to(rewards.dtype))


def overlong_penalty(
    lengths: Tensor, max_length: int, buffer: int, *, factor: float = 1.0, capped: bool = True
) -> Tensor:
    """0 up to ``max_length - buffer`` tokens, then falling linearly to ``-factor`` at
    ``max_length``; ``[batch]``.

    Args:
        capped: never below ``-factor`` (OpenRLHF, TRL); verl and AReaL go on falling.

    Source: Yu et al. 2025 (DAPO), soft overlong punishment.
    """
    excess = (lengths - (max_length - buffer)).clamp(min=0).double()
    return -(excess.clamp(max=buffer) if capped else excess) / buffer * factor


def stop_properly_penalty(scores: Tensor, truncated: Tensor, coef: float) -> Tensor:
    """Truncated samples: score times ``coef`` if that is not negative, else ``coef`` in its place.
    Source: OpenRLHF.

    A negative score times a coefficient below 1 is *less* negative: use it with scores that are not
    negative.
    """
    return torch.where(
        truncated, scores * coef if coef >= 0 else torch.full_like(scores, coef), scores
    )


def overlong_filter(mask: Tensor, stop_reasons: Sequence[str] | Tensor) -> Tensor:
    """The mask without samples that did not stop by themselves. Source: DAPO; SkyRL
    ``apply_overlong_filtering``.

    Args:
        stop_reasons: one per row, or bool ``[batch]``: it was truncated.
    """
    if not isinstance(stop_reasons, torch.Tensor):
        stop_reasons = torch.tensor(
            [reason != "stop" for reason in stop_reasons], device=mask.device
        )
    return mask & ~stop_reasons.unsqueeze(1)


def high_entropy_mask(entropies: Tensor, mask: Tensor, quantile: float) -> Tensor:
    """Bool ``[batch, length]``: mask tokens whose entropy is at least the given quantile (linear)
    of the mask's.

    The quantile is that of the tensors given: call it on the whole batch. Source: Wang et al. 2025
    (the 80/20 rule).
    """
    return mask & (entropies >= torch.quantile(entropies[mask], quantile))


def mean_inside(rewards: Sequence[float], low: float = 0.0, high: float = 1.0) -> bool:
    """``low < mean < high``, both strict: neither solved by all nor by none.

    Source: DAPO's dynamic sampling; OpenRLHF ``dynamic_filtering``, ROLL ``mean_filter`` and
    ``difficulty_mask``. A group of equal partial scores passes: use ``has_variance`` to drop it.
    """
    return low < fmean(rewards) < high


def cannot_be_inside(
    rewards: Sequence[float], samples: int, *, low: float, high: float, least: float, most: float
) -> bool:
    """Whether ``mean_inside`` is false for any rewards, each within ``[least, most]``, of the rest
    of ``samples``."""
    total = sum(rewards)
    left = samples - len(rewards)
    return (total + left * most) / samples <= low or (total + left * least) / samples >= high


def has_variance(
    rewards: Sequence[float], tolerance: float = 0.0, keep_singletons: bool = True
) -> bool:
    """Some reward differs from another by more than ``tolerance``: the group has a gradient.

    Args:
        keep_singletons: a group of one passes, there being nothing to compare (verl; SkyRL's
            zero-variance filter).

    Source: DAPO; SkyRL and verl ask for a standard deviation above 0, which is the same for
    ``tolerance=0``.
    """
    if len(rewards) <= 1:
        return keep_singletons
    return max(rewards) - min(rewards) > tolerance


def group_filter(cfg: object) -> Callable[[Sequence[float]], bool]:
    """The filter that ``dynamic_sampling`` in the configuration asks for: rewards of a group ->
    keep it?"""
    kind = setting(cfg, "dynamic_sampling.type", "none")
    if kind == "mean":
        low = setting(cfg, "dynamic_sampling.low", 0.0)
        high = setting(cfg, "dynamic_sampling.high", 1.0)
        return lambda rewards: mean_inside(rewards, low, high)
    if kind == "variance":
        tolerance = setting(cfg, "dynamic_sampling.tolerance", 0.0)
        return lambda rewards: has_variance(rewards, tolerance)
    return lambda rewards: True
