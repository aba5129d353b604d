"""Log-probabilities of several tokens each, of logits over a large vocabulary.

Invariant: they and their gradient are those of ``logits.gather(1, targets) - logits.logsumexp(-1)``, to the bit where
no token stands three times in a row; but at most two tensors of the logits' size exist at once, not four.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx


def chosen_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """``[n, m]``, of the ``targets`` (int64 ``[n, m]``) by ``logits`` ``[n, vocabulary]``."""
    found: Tensor = _Chosen.apply(logits, targets)
    return found


class _Kept(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]


class _Chosen(Function):
    @staticmethod
    def forward(ctx: _Kept, logits: Tensor, targets: Tensor) -> Tensor:
        normalizer = logits.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(logits, targets, normalizer)
        return logits.gather(1, targets) - normalizer

    @staticmethod
    def backward(ctx: _Kept, *gradients: Tensor) -> tuple[Tensor, None]:
        logits, targets, normalizer = ctx.saved_tensors
        (gradient,) = gradients
        whole = (logits - normalizer).exp_().mul_(-gradient.sum(-1, keepdim=True))
        same = targets[:, :, None] == targets[:, None, :]  # what stands twice gets the sum, first
        own = torch.where(same, gradient[:, None, :], 0.0).sum(-1)
        return whole.scatter_(1, targets, whole.gather(1, targets) + own), None
