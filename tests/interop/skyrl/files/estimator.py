"""Advantage estimators: a mean over the batch, and a baseline per prompt by the prompts' index."""

import torch

from skyasync.interop.skyrl import AdvantageEstimatorRegistry, register_advantage_estimator


@register_advantage_estimator("peers_batch_mean")
def batch_mean(token_level_rewards, response_mask, index, **kwargs):
    with torch.no_grad():
        rewards = (token_level_rewards * response_mask).sum(dim=-1, keepdim=True)
        advantages = (rewards - rewards.mean()) * response_mask
        return advantages, advantages.clone()


def per_prompt(token_level_rewards, response_mask, index, config, gamma, **kwargs):
    assert gamma == config.gamma
    rewards = token_level_rewards.sum(-1)
    found = {}
    for row, prompt in enumerate(index):
        found.setdefault(prompt, []).append(rewards[row])
    baseline = torch.stack([torch.stack(found[prompt]).mean() for prompt in index])
    advantages = (rewards - baseline).unsqueeze(-1) * response_mask
    return advantages, advantages


AdvantageEstimatorRegistry.register("peers_per_prompt", per_prompt)
