"""The head of a language model in float32, whatever the dtype of the model.

A head in bfloat16 rounds logits to three significant digits, which makes the log-probabilities of
an engine and of the trainer differ. Weights and states are those of the model: only products and
sums are float32. Source: ScaleRL (arXiv 2510.13786), section on the precision of the head; vLLM
computes the same with ``head_dtype=float32``.

Invariant: with a model in float32 nothing changes.
"""

from __future__ import annotations

from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from transformers import PreTrainedModel


def use_float32_head(model: PreTrainedModel) -> None:
    """Let the output layer of a causal language model compute in float32.

    The module stays, with its weights, names and hooks; a pipeline's ranks without a head, and
    value heads, are left as they are.
    """
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        head.forward = MethodType(_forward, head)  # type: ignore[method-assign]


def _forward(head: nn.Linear, states: Tensor) -> Tensor:
    """Logits ``[..., vocabulary]`` in float32 of states ``[..., hidden]``."""
    if states.is_cuda and states.dtype == torch.bfloat16:
        flat = states.reshape(-1, states.shape[-1])  # [n, hidden]
        logits: Tensor = _AccumulatedInFloat32.apply(flat, head.weight)
        logits = logits.reshape(*states.shape[:-1], -1)
        if head.bias is None:
            return logits
        return logits + head.bias.float()
    exact = torch.promote_types(states.dtype, torch.float32)
    bias = None if head.bias is None else head.bias.to(exact)
    return F.linear(states.to(exact), head.weight.to(exact), bias)


class _ProductContext(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]


class _AccumulatedInFloat32(Function):
    """``states @ weight.T`` of bfloat16 tensors in float32, without a float32 copy of the weight.

    Products of two bfloat16 numbers are exact in float32, so the result is that of the copy up to
    the order of sums. ``torch.mm(out_dtype=...)`` exists for CUDA and has no backward pass.
    """

    @staticmethod
    def forward(ctx: _ProductContext, states: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight)
        return torch.mm(states, weight.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: _ProductContext, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        states, weight = ctx.saved_tensors
        gradient = gradients[0].to(weight.dtype)  # [n, vocabulary]: rounded as in mixed precision
        return gradient @ weight, gradient.t() @ states
