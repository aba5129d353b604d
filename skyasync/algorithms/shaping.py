"""Reward shaping before advantages: truncation, length penalties, scale, clip, normalisation.

Also the filters that choose which groups are worth training on.

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
    """Shape every sample's score; token rewards are ``[batch, length]``.

    The result is the very same tensor if no setting changes it. In this order:
    ``truncated_responses=zero`` or ``stop_properly_penalty_coef``, ``overlong_buffer``,
    ``reward_bias``, ``reward_scale``, ``reward_clip``, ``reward_normalization``.

    Args:
        mask: loss tokens; their number is a sample's length.
        truncated: bool ``[batch]``, the response did not end by itself; needed by the first two.
        group_ids: ``[batch]``, needed by the last.
        trajectory_ids: ``[batch]``; rows that share one are one sample.
    """
    if trajectory_ids is not None:
        samples = JoinedRows(trajectory_ids)
        joined_rewards = shape_rewards(
            cfg,
            samples.join(rewards),
            samples.join(mask),
            truncated=None if truncated is None else samples.first(truncated),
            group_ids=None if group_ids is None else samples.first(group_ids),
        )
        return samples.split(joined_rewards)
    score = rewards.sum(1)  # [batch]
    new_score = _score(cfg, score, mask.sum(1), truncated, group_ids)
    if new_score is score:
        return rewards
    return add_at_end(rewards, new_score - score, mask)


def _score(
    cfg: object,
    score: Tensor,
    lengths: Tensor,
    truncated: Tensor | None,
    group_ids: Tensor | None,
) -> Tensor:
    """The shaped scores ``[batch]``; ``score`` itself if no setting changes it."""
    if setting(cfg, "truncated_responses", "train") == "zero":
        coef = 0.0
    else:
        coef = setting(cfg, "stop_properly_penalty_coef", 1.0)
    if coef != 1.0 and truncated is not None:
        score = stop_properly_penalty(score, truncated, coef)
    buffer = setting(cfg, "overlong_buffer.len", 0)
    if buffer:
        max_length = setting(cfg, "overlong_buffer.max_len", 0)
        factor = setting(cfg, "overlong_buffer.penalty_factor", 1.0)
        score = score + overlong_penalty(lengths, max_length, buffer, factor=factor)
    bias = setting(cfg, "reward_bias", 0.0)
    scale = setting(cfg, "reward_scale", 1.0)
    clip = setting(cfg, "reward_clip", 0.0)
    if (bias, scale, clip) != (0.0, 1.0, 0.0):
        score = scale_and_clip(score, bias=bias, scale=scale, clip=clip)
    pool = setting(cfg, "reward_normalization", "none")
    if pool != "none" and group_ids is not None:
        score = normalize(score, group_ids, mean=pool, std=pool)
    return score


def scale_and_clip(
    scores: Tensor,
    *,
    bias: float = 0.0,
    scale: float = 1.0,
    clip: float = 0.0,
) -> Tensor:
    """``(score + bias) * scale``, clamped to ± ``clip`` unless that is 0.

    Source: AReaL's reward settings.
    """
    scores = (scores + bias) * scale
    if clip:
        scores = scores.clamp(-clip, clip)
    return scores


def add_at_end(rewards: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
    """Add ``scores [batch]`` to token rewards ``[batch, length]``.

    They go to each row's last token of the mask. A row without such a token gets it in column 0,
    where no loss token ever stands.
    """
    positions = torch.arange(mask.shape[1], device=mask.device)  # [length]
    last_position = torch.where(mask, positions, 0).amax(1, keepdim=True)  # [batch, 1]
    return rewards.scatter_add(1, last_position, scores.unsqueeze(1).to(rewards.dtype))


def overlong_penalty(
    lengths: Tensor,
    max_length: int,
    buffer: int,
    *,
    factor: float = 1.0,
    capped: bool = True,
) -> Tensor:
    """A penalty ``[batch]`` that falls linearly to ``-factor`` at ``max_length``.

    It is 0 up to ``max_length - buffer`` tokens.

    Args:
        capped: never below ``-factor`` (OpenRLHF, TRL); verl and AReaL go on falling.

    Source: Yu et al. 2025 (DAPO), soft overlong punishment.
    """
    excess = (lengths - (max_length - buffer)).clamp(min=0).double()  # [batch], in tokens
    if capped:
        excess = excess.clamp(max=buffer)
    return -excess / buffer * factor


def stop_properly_penalty(scores: Tensor, truncated: Tensor, coef: float) -> Tensor:
    """Penalize truncated samples, of scores ``[batch]``.

    Their score is multiplied by ``coef`` if that is not negative; else ``coef`` replaces it. A
    negative score times a coefficient below 1 is *less* negative: use it with scores that are not
    negative.

    Source: OpenRLHF.
    """
    penalized_scores = scores * coef if coef >= 0 else torch.full_like(scores, coef)
    return torch.where(truncated, penalized_scores, scores)


def overlong_filter(mask: Tensor, stop_reasons: Sequence[str] | Tensor) -> Tensor:
    """The mask ``[batch, length]`` without samples that did not stop by themselves.

    Args:
        stop_reasons: one per row, or bool ``[batch]``: it was truncated.

    Source: DAPO; SkyRL ``apply_overlong_filtering``.
    """
    if isinstance(stop_reasons, torch.Tensor):
        is_truncated = stop_reasons
    else:
        reasons = [reason != "stop" for reason in stop_reasons]
        is_truncated = torch.tensor(reasons, device=mask.device)
    return mask & ~is_truncated.unsqueeze(1)


def high_entropy_mask(entropies: Tensor, mask: Tensor, quantile: float) -> Tensor:
    """Mask tokens whose entropy is at least the quantile (linear) of the mask's.

    The quantile is that of the tensors given: call it on the whole batch. Source: Wang et al. 2025
    (the 80/20 rule).
    """
    threshold = torch.quantile(entropies[mask], quantile)
    return mask & (entropies >= threshold)


def mean_inside(rewards: Sequence[float], low: float = 0.0, high: float = 1.0) -> bool:
    """Whether ``low < mean < high``, both strict: neither solved by all nor by none.

    Source: DAPO's dynamic sampling; OpenRLHF ``dynamic_filtering``, ROLL ``mean_filter`` and
    ``difficulty_mask``. A group of equal partial scores passes: use ``has_variance`` to drop it.
    """
    return low < fmean(rewards) < high


def cannot_be_inside(
    rewards: Sequence[float],
    samples: int,
    *,
    low: float,
    high: float,
    min_reward: float,
    max_reward: float,
) -> bool:
    """Whether ``mean_inside`` is false for any rewards of the rest of ``samples``.

    Each reward is within ``[min_reward, max_reward]``.
    """
    total = sum(rewards)
    remaining = samples - len(rewards)
    largest_mean = (total + remaining * max_reward) / samples
    smallest_mean = (total + remaining * min_reward) / samples
    return largest_mean <= low or smallest_mean >= high


def has_variance(
    rewards: Sequence[float],
    tolerance: float = 0.0,
    keep_singletons: bool = True,
) -> bool:
    """Whether rewards differ by more than ``tolerance``, so that the group has a gradient.

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
    """The filter of ``dynamic_sampling``: whether a group with these rewards is trained on."""
    kind = setting(cfg, "dynamic_sampling.type", "none")
    if kind == "mean":
        low = setting(cfg, "dynamic_sampling.low", 0.0)
        high = setting(cfg, "dynamic_sampling.high", 1.0)
        return lambda rewards: mean_inside(rewards, low, high)
    if kind == "variance":
        tolerance = setting(cfg, "dynamic_sampling.tolerance", 0.0)
        return lambda rewards: has_variance(rewards, tolerance)
    return lambda rewards: True
