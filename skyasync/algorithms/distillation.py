"""On-policy distillation: a teacher says of each token that the policy sampled how it would rather have had it.

Invariant: per token that was sampled, so neither groups, nor micro-batches, nor ranks change it.

The reverse KL of policy p to teacher t on the policy's own samples has the gradient E[(log p - log t) grad log p]: that
of a policy gradient whose advantage is log t - log p, detached. Sources: Lu and Thinking Machines Lab 2025, "On-Policy
Distillation" (discount 0: a token is judged by itself); Gu et al. 2024 (MiniLLM); Agarwal et al. 2024 (GKD).
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 1e-7
"""What is left of a distribution beside its likeliest tokens is taken to be at least this much."""


def top_k_reverse_kl(logprobs: Tensor, teacher: Tensor) -> Tensor:
    """KL(p || t) of distributions over k tokens and all others as one more, ``[...]``; differentiable in p.

    It is the whole vocabulary's where k is that, and else never more. Source: Tail-Aware Top-k On-Policy Distillation
    (arXiv 2608.14728); with p and t scaled to 1 over the k tokens instead, what p gives to others would cost nothing.

    Args:
        logprobs: of k tokens under the policy, ``[..., k]``.
        teacher: of the same tokens under the teacher.
    """
    rest, teachers_rest = _log_rest(logprobs), _log_rest(teacher)
    among = (logprobs.exp() * (logprobs - teacher)).sum(-1)
    return among + rest.exp() * (rest - teachers_rest)


def _log_rest(logprobs: Tensor) -> Tensor:
    return (1.0 - logprobs.exp().sum(-1)).clamp(min=LEAST).log()


def teacher_advantages(logprobs: Tensor, teacher: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """What the teacher adds to each token's advantage, and the mean reverse KL per token that it stands for.

    Args:
        logprobs: of the sampled tokens under the policy before the update, ``[batch, length]``.
        teacher: the same under the teacher.

    Returns:
        ``log t - log p``, ``[batch, length]``, 0 outside the mask; and a scalar, the k1 estimate of KL(p || t).
    """
    gap = torch.where(mask, teacher - logprobs, 0.0).detach()
    return gap, -gap.sum(dtype=torch.float64) / mask.sum().clamp(min=1)
