"""Linear layers split over the tensor axis, whose parts are added up before they are rounded.

Invariant: what a layer answers, and the gradient of its input, are the whole layer's in the dtype that is computed in,
up to the order of a float32 sum. A split product is a sum over ranks; transformers' styles round each rank's part to
bfloat16 and add up what is left, here the parts travel as float32 and their sum is rounded once, as one rank does.

    columns: y = x W' + b by this rank's rows of W;  dx = round(sum over ranks of dy W)
    rows:    y = round(sum over ranks of x W' + b) by its columns;  dx = dy W
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, ColwiseParallel, RowwiseParallel

COLUMNS, ROWS = "skyasync_columns", "skyasync_rows"


class _Summed:
    """Before a style of transformers': its linear layers compute by ``product``."""

    product: type[Function]

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            return super().install_forward(module, mesh)  # type: ignore[misc]
        group = mesh.get_group()

        def forward(states: Tensor) -> Tensor:
            found: Tensor = self.product.apply(states, _local(module.weight), _local(module.bias), group)
            return found

        module.forward = forward  # type: ignore[method-assign, assignment]
        return module


def _local(parameter: Tensor | None) -> Tensor | None:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _Columns(Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(states, weight)
        ctx.group = group
        return F.linear(states, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        states, weight = ctx.saved_tensors
        own = gradients[0].flatten(0, -2)
        of_states = _summed(_wide(own, weight), ctx.group).to(states.dtype) if ctx.needs_input_grad[0] else None
        return (None if of_states is None else of_states.view(states.shape), *_of_parameters(ctx, own, states), None)


class _Rows(Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(states, weight)
        whole = _summed(_wide(states.flatten(0, -2), weight.t()), group)
        if bias is not None:
            whole += bias
        return whole.to(states.dtype).view(*states.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        states, weight = ctx.saved_tensors
        own = gradients[0].flatten(0, -2)
        of_states = (own @ weight).view(states.shape) if ctx.needs_input_grad[0] else None
        return (of_states, *_of_parameters(ctx, own, states), None)


def _of_parameters(ctx: Any, gradient: Tensor, states: Tensor) -> tuple[Tensor | None, Tensor | None]:  # noqa: ANN401
    """Of the weight and of the bias, which each rank finds for its part, or for a bias that all have."""
    of_weight = gradient.t() @ states.flatten(0, -2) if ctx.needs_input_grad[1] else None
    return of_weight, gradient.sum(0) if ctx.needs_input_grad[2] else None


def _wide(left: Tensor, right: Tensor) -> Tensor:
    """Their product in float32 at least, in which kernels add up anyway."""
    if left.dtype not in (torch.bfloat16, torch.float16):
        return left @ right
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _summed(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = part.clone()  # what was multiplied may be kept for the backward pass
    dist.all_reduce(whole, group=group)
    return whole


class Columns(_Summed, ColwiseParallel):
    """Each rank has some of the outputs."""

    product = _Columns


class Rows(_Summed, RowwiseParallel):
    """Each rank has some of the inputs, and all of the bias."""

    product = _Rows


for _name, _style in (
    (COLUMNS, Columns(input_layouts=Replicate(), output_layouts=Shard(-1))),
    (ROWS, Rows(input_layouts=Shard(-1), output_layouts=Replicate())),
):
    ALL_PARALLEL_STYLES.register(_name, _style)  # type: ignore[arg-type]
