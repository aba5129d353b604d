"""Values and returns: sums of rewards along a sequence, the critic's loss and its metrics.

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
    """``G_t = r_t + gamma G_next``, where next is the next token of the mask.

    Returns are ``[batch, length]``, 0 outside the mask.
    """
    # GAE without values and with lambd = 1 is the sum of discounted rewards.
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
    """``A_t = delta_t + gamma lambd A_next``, ``delta_t = r_t + gamma V_next - V_t``.

    Returns are ``A + V``.

    Args:
        rewards, values: ``[batch, length]``; V_next after the last token of the mask is
            ``bootstrap``.
        bootstrap: ``[batch]``, the value of the state after the end (for truncated episodes); 0 by
            default.

    Returns:
        advantages and returns, ``[batch, length]``, 0 outside the mask; not whitened.

    Source: Schulman et al. 2016; skipping as in verl and AReaL.
    """
    next_value = torch.zeros_like(values[:, 0]) if bootstrap is None else bootstrap  # [batch]
    advantage = torch.zeros_like(values[:, 0])  # [batch]: of the next token of the mask
    advantage_columns = []
    columns = zip(rewards.unbind(1), values.unbind(1), mask.unbind(1), strict=True)
    # From the last column to the first: an advantage needs the next one. [batch] each.
    for reward, value, is_token in reversed(list(columns)):
        step = reward + gamma * (next_value + lambd * advantage) - value
        # A column outside the mask carries both over unchanged.
        advantage = torch.where(is_token, step, advantage)
        next_value = torch.where(is_token, value, next_value)
        advantage_columns.append(advantage)
    advantages = torch.stack(advantage_columns[::-1], 1)  # [batch, length]
    advantages = torch.where(mask, advantages, 0)
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
    """GAE whose steps are turns.

    A turn's reward is the sum of its tokens', its value that of its first token.

    Args:
        turn_ids: int ``[batch, length]``, the same for all tokens of a turn.

    Returns:
        advantages and returns, ``[batch, length]``: each token has those of its turn.

    Source: AReaL.
    """
    both_tokens = mask.unsqueeze(1) & mask.unsqueeze(2)  # [batch, length, length]
    same_turn = both_tokens & (turn_ids.unsqueeze(1) == turn_ids.unsqueeze(2))
    # [batch, length]: the position of the first token of each token's turn
    turn_start = same_turn.int().argmax(2)
    is_start = mask & (turn_start == torch.arange(mask.shape[1], device=mask.device))
    totals = (same_turn * torch.where(mask, rewards, 0).unsqueeze(1)).sum(2)  # [batch, length]
    # With a mask of the first tokens alone, the next token is the next turn.
    advantages, returns = gae(totals, values, is_start, gamma=gamma, lambd=lambd)
    advantages = torch.where(mask, advantages.gather(1, turn_start), 0)
    returns = torch.where(mask, returns.gather(1, turn_start), 0)
    return advantages, returns


def clipped_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    clip: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``max((V - R)^2, (V_old + clamp(V - V_old, ±clip) - R)^2) / 2`` per token.

    The statistic is where the clipped term is larger.

    Source: Schulman et al. 2017 (PPO's reference code); OpenRLHF, SkyRL, AReaL, verl.
    """
    change = values - old_values
    clipped_values = old_values + change.clamp(-clip, clip)
    loss = (values - returns).square()
    clipped_loss = (clipped_values - returns).square()
    # Inside the range the two differ by rounding alone.
    is_clipped = (change.abs() > clip) & (clipped_loss > loss)
    return torch.maximum(loss, clipped_loss) / 2, {"value_clip_fraction": is_clipped}


def value_metrics(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, float]:
    """Means over the tokens of ``mask``, and the share of the variance that the values explain.

    ``1 - Var(R - V) / Var(R)``: 1 is foreseen exactly, 0 no better than a constant, less is worse
    than one. 0 where the returns do not differ.
    """
    variance = _variance(returns, mask)
    explained_variance = 0.0
    if variance > 0:
        explained_variance = 1.0 - _variance(returns - values, mask) / variance
    return {
        "explained_variance": explained_variance,
        "values_mean": float(masked_mean(values, mask)),
        "returns_mean": float(masked_mean(returns, mask)),
    }


def _variance(values: Tensor, mask: Tensor) -> float:
    exact = values.double()
    deviations = exact - masked_mean(exact, mask)
    return float(masked_mean(deviations.square(), mask))
