"""The norm of a gradient, wherever its parts lie, clipping by it, and whether copies of it agree.

Invariant: every number of the gradient is counted once, and the norm is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from skyasync.errors import UserError
from skyasync.workers.mesh import Mesh
from skyasync.workers.model import Wrapped

_ROUNDING = 1e-3
"""Of a gradient's norm: kernels that add up in no fixed order differ by far less."""


def total_norm(gradients: Sequence[Tensor], mesh: Mesh | None) -> Tensor:
    """Of all ranks' shards; what a tensor axis has whole counts on its first rank."""
    if mesh is not None and mesh.tensor is not None:
        return _over_two_axes(gradients, first=mesh.tensor.get_local_rank() == 0)
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _over_two_axes(gradients: Sequence[Tensor], *, first: bool) -> Tensor:
    """The library's takes tensors of one mesh."""
    counted = [local(g) for g in gradients if first or split_over_tensor(g)]
    squares = torch.zeros((), dtype=torch.float64, device=local(gradients[0]).device)
    if counted:
        squares += torch.stack(torch._foreach_norm(counted)).double().square().sum()
    dist.all_reduce(squares)
    return squares.sqrt().float()


def clip(gradients: Sequence[Tensor], norm: Tensor, limit: float) -> None:
    """As torch's ``clip_grads_with_norm_``, which takes tensors of one mesh."""
    if gradients:
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([local(gradient) for gradient in gradients], factor)


def are_alike(model: Wrapped, mesh: Mesh | None) -> bool:
    """True: what all ranks of the tensor axis hold whole has one gradient.

    A plan that forgets a parameter which works on a part of the heads is found out before a weight changes; the ranks'
    copies would drift apart in silence.

    Raises:
        UserError: on all ranks of the axis, naming a parameter whose gradients differ.
    """
    named = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    whole = [(name, local(grad)) for name, grad in named if not split_over_tensor(grad)]
    if mesh is None or mesh.tensor is None or not whole:
        return True
    seen = torch.stack([torch.stack([grad.norm(), grad.sum()]) for _, grad in whole]).double()
    most, least = seen.clone(), seen.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh.tensor_group)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.tensor_group)
    apart = ((most - least).amax(1) > _ROUNDING * most[:, 0]).nonzero().flatten().tolist()
    if apart:
        family, name = type(model.model).__name__, whole[apart[0]][0]
        raise UserError(
            f"trainer.parallel.tensor={mesh.axes.tensor}: the ranks found different gradients for {name}, which all "
            f"hold whole: transformers' plan for {family} splits what it works on and does not say so: set "
            f"trainer.parallel.tensor=1"
        )
    return True


def local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def split_over_tensor(gradient: Tensor) -> bool:
    """Whether the tensor axis has it in parts: its mesh is then that of shards and that axis."""
    if not isinstance(gradient, DTensor) or gradient.device_mesh.ndim == 1:
        return False
    return not gradient.placements[-1].is_replicate()
