"""What happens to rewards before they become advantages: scale, clip, length penalties.

Invariant: a penalty is put on the last loss token of its sample, so that a sample's score is the shaped reward and
discounting sees it at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from skyasync.algorithms.binding import setting


def shape_rewards(cfg: Any, rewards: Tensor, mask: Tensor) -> Tensor:
    """Apply ``overlong_buffer``, ``reward_bias``, ``reward_scale`` and ``reward_clip`` to token rewards, in that order.

    Scale, bias and clip act on a sample's score; the difference is put on its last loss token.
    """
    buffer = setting(cfg, "overlong_buffer.len", 0)
    change = torch.zeros_like(rewards[:, 0])
    if buffer:
        factor = setting(cfg, "overlong_buffer.penalty_factor", 1.0)
        change = overlong_penalty(mask.sum(1), setting(cfg, "overlong_buffer.max_len", 0), buffer, factor=factor)
    bias, scale, clip = (setting(cfg, f"reward_{k}", d) for k, d in (("bias", 0.0), ("scale", 1.0), ("clip", 0.0)))
    score = rewards.sum(1)
    shaped = scale_and_clip(score + change, bias=bias, scale=scale, clip=clip)
    if not buffer and (bias, scale, clip) == (0.0, 1.0, 0.0):
        return rewards
    return add_at_end(rewards, shaped - score, mask)


def scale_and_clip(scores: Tensor, *, bias: float = 0.0, scale: float = 1.0, clip: float = 0.0) -> Tensor:
    """``(score + bias) * scale``, clamped to ± ``clip`` unless that is 0. Source: AReaL's reward settings."""
    shaped = (scores + bias) * scale
    return shaped.clamp(-clip, clip) if clip else shaped


def add_at_end(rewards: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
    """Token rewards ``[batch, length]`` with ``scores [batch]`` added on each row's last token of the mask.

    A row without such a token gets it in column 0, where no loss token ever stands.
    """
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, 0).amax(1, keepdim=True)
    return rewards.scatter_add(1, last, scores.unsqueeze(1).to(rewards.dtype))


def overlong_penalty(
    lengths: Tensor, max_length: int, buffer: int, *, factor: float = 1.0, capped: bool = True
) -> Tensor:
    """0 up to ``max_length - buffer`` tokens, then falling linearly to ``-factor`` at ``max_length``; ``[batch]``.

    Args:
        capped: never below ``-factor`` (OpenRLHF, TRL); verl and AReaL go on falling.

    Source: Yu et al. 2025 (DAPO), soft overlong punishment.
    """
    excess = (lengths - (max_length - buffer)).clamp(min=0).double()
    return -(excess.clamp(max=buffer) if capped else excess) / buffer * factor


def stop_properly_penalty(scores: Tensor, truncated: Tensor, coef: float) -> Tensor:
    """Truncated samples: score times ``coef`` if that is not negative, else ``coef`` in its place. Source: OpenRLHF.

    A negative score times a coefficient below 1 is *less* negative: use it with scores that are not negative.
    """
    return torch.where(truncated, scores * coef if coef >= 0 else torch.full_like(scores, coef), scores)


def overlong_filter(mask: Tensor, stop_reasons: Sequence[str]) -> Tensor:
    """The mask without samples that did not stop by themselves. Source: DAPO; SkyRL ``apply_overlong_filtering``."""
    stopped = torch.tensor([reason == "stop" for reason in stop_reasons], device=mask.device)
    return mask & stopped.unsqueeze(1)


def high_entropy_mask(entropies: Tensor, mask: Tensor, quantile: float) -> Tensor:
    """Bool ``[batch, length]``: mask tokens whose entropy is at least the given quantile (linear) of the mask's.

    The quantile is that of the tensors given: call it on the whole batch. Source: Wang et al. 2025 (the 80/20 rule).
    """
    return mask & (entropies >= torch.quantile(entropies[mask], quantile))
