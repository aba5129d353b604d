"""Values and returns: sums of rewards along a sequence, the critic's loss, and how well it predicts
returns.

Invariant: tokens outside the mask (padding, tool outputs between turns) are skipped: the running
value is carried over them unchanged, and what stands there (rewards, values) has no influence. The
loss of a token depends on that token alone; reduce it with the same weights as the policy loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyasync.algorithms.masked import masked_mean
from skyasync.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """``G_t = r_t + gamma G_next``, next being the next token of the mask; ``[batch, length]``, 0
    outside the mask."""
    return gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lambd=1.0)[0]


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lambd: float = 1.0,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``A_t = delta_t + gamma lambd A_next``, ``delta_t = r_t + gamma V_next - V_t``; returns
    ``A + V``.

    Args:
        rewards, values: ``[batch, length]``; V_next after the last token of the mask is
            ``bootstrap``.
        bootstrap: ``[batch]``, the value of the state after the end (for truncated episodes); 0 by
            default.

    Returns:
        advantages and returns, ``[batch, length]``, 0 outside the mask; not whitened.

    Source: Schulman et al. 2016; skipping as in verl and AReaL.
    """
    if bootstrap is None:
        next_value = torch.zeros_like(values[:, 0])
    else:
        next_value = bootstrap
    running = torch.zeros_like(values[:, 0])
    columns = []
    for reward, value, valid in zip(
        *(t.unbind(1)[::-1] for t in (rewards, values, mask)), strict=True
    ):
        step = reward + gamma * (next_value + lambd * running) - value
        running = torch.where(valid, step, running)
        next_value = torch.where(valid, value, next_value)
        columns.append(running)
    advantages = torch.where(mask, torch.stack(columns[::-1], 1), 0)
    return advantages, torch.where(mask, advantages + values, 0)


def turn_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    turn_ids: Tensor,
    *,
    gamma: float = 1.0,
    lambd: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """GAE whose steps are turns: a turn's reward is the sum of its tokens', its value that of its
    first token.

    Args:
        turn_ids: int ``[batch, length]``, the same for all tokens of a turn.

    Returns:
        advantages and returns, ``[batch, length]``: each token has those of its turn. Source:
        AReaL.
    """
    same = mask.unsqueeze(1) & mask.unsqueeze(2) & (turn_ids.unsqueeze(1) == turn_ids.unsqueeze(2))
    first = same.int().argmax(
        2
    )  # [batch, length]: position of the first token of this token's turn
    starts = mask & (first == torch.arange(mask.shape[1], device=mask.device))
    totals = (same * torch.where(mask, rewards, 0).unsqueeze(1)).sum(2)
    advantages, returns = gae(totals, values, starts, gamma=gamma, lambd=lambd)
    return torch.where(mask, advantages.gather(1, first), 0), torch.where(
        mask, returns.gather(1, first), 0
    )


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float = 0.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """``max((V - R)^2, (V_old + clamp(V - V_old, ±clip) - R)^2) / 2`` per token, and where the
    clipped term is larger.

    Source: Schulman et al. 2017 (PPO's reference code); OpenRLHF, SkyRL, AReaL, verl.
    """
    moved = values - old_values
    clipped = old_values + moved.clamp(-clip, clip)
    plain = (values - returns).square()
    bounded = (clipped - returns).square()
    # Inside the range the two differ by rounding alone.
    return torch.maximum(plain, bounded) / 2, {
        "value_clip_fraction": (moved.abs() > clip) & (bounded > plain)
    }


def value_metrics(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, float]:
    """Means over the tokens of ``mask``, and the share of the returns' variance that the values
    explain.

    ``1 - Var(R - V) / Var(R)``: 1 is foreseen exactly, 0 no better than a constant, less is worse
    than one. 0 where the returns do not differ.
    """
    variance = _variance(returns, mask)
    if variance > 0:
        explained = 1.0 - _variance(returns - values, mask) / variance
    else:
        explained = 0.0
    return {
        "explained_variance": explained,
        "values_mean": float(masked_mean(values, mask)),
        "returns_mean": float(masked_mean(returns, mask)),
    }


def _variance(values: Tensor, mask: Tensor) -> float:
    return float(masked_mean((values.double() - masked_mean(values.double(), mask)).square(), mask))
