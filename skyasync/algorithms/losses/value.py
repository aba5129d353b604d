"""The critic's loss.

Invariant: each token's loss depends on that token alone; reduce it with the same weights as the policy loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyasync.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float = 0.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """``max((V - R)^2, (V_old + clamp(V - V_old, ±clip) - R)^2) / 2`` per token, and where the clipped term is larger.

    Source: Schulman et al. 2017 (PPO's reference code); OpenRLHF, SkyRL, AReaL, verl.
    """
    moved = values - old_values
    clipped = old_values + moved.clamp(-clip, clip)
    plain, bounded = (values - returns).square(), (clipped - returns).square()
    # Inside the range the two differ by rounding alone.
    return torch.maximum(plain, bounded) / 2, {"value_clip_fraction": (moved.abs() > clip) & (bounded > plain)}
