"""Losses: one that clips as PPO does, one with the rollout's log-probabilities, and one that is only an average."""

import torch

from skyasync.interop.skyrl import PolicyLossRegistry, register_policy_loss


@register_policy_loss("peers_clipped")
def clipped(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    ratio = (log_probs - old_log_probs).exp()
    bounded = ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high)
    loss = -torch.min(ratio * advantages, bounded * advantages)
    outside = ((ratio - bounded).abs() > 0).float()
    return (loss * loss_mask).sum(), {"clip_ratio": (outside * loss_mask).sum().item() / loss_mask.sum().item()}


@register_policy_loss("peers_rollout")
def weighted(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    weight = (old_log_probs - rollout_logprobs).exp().clamp(max=2.0)
    return -(weight * log_probs * advantages * loss_mask).sum(), {"weight": weight.mean().item()}


def average(log_probs, old_log_probs, advantages, config, loss_mask=None):
    return (-log_probs * advantages).mean(), {"clip_ratio": 0.0}


PolicyLossRegistry.register("peers_average", average)
