"""Sums over ranks that autograd knows of, for ranks that compute the same loss.

Invariant: the loss, and the gradient of whatever all ranks hold alike, are the same on each of them. A sum of parts
hands the same gradient to each part; what each rank uses in a part of the work gets the sum of the parts' gradients.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx


class _Summed(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = tensor.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Spread(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        whole = gradients[0].clone()
        dist.all_reduce(whole, group=ctx.group)  # type: ignore[attr-defined]
        return whole, None


def summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks of what each has a part of; the gradient of a part is that of the sum."""
    whole: Tensor = _Summed.apply(tensor, group)
    return whole


def spread(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What all ranks have alike and each uses in its part of the work: the gradient is the sum of the parts'."""
    same: Tensor = _Spread.apply(tensor, group)
    return same
