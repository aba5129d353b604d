"""The norm of a gradient, wherever its parts lie, and clipping by it.

Invariant: every number of the gradient is counted once, and the norm is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from skyasync.workers.mesh import Mesh


def total_norm(gradients: Sequence[Tensor], mesh: Mesh | None) -> Tensor:
    """Of all ranks' shards; what a tensor axis has whole counts on its first rank."""
    if mesh is not None and mesh.tensor is not None:
        return _over_two_axes(gradients, first=mesh.tensor.get_local_rank() == 0)
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _over_two_axes(gradients: Sequence[Tensor], *, first: bool) -> Tensor:
    """The library's takes tensors of one mesh."""
    counted = [local(g) for g in gradients if first or _split(g)]
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


def local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _split(gradient: Tensor) -> bool:
    """Whether the tensor axis has it in parts: its mesh is then that of shards and that axis."""
    if not isinstance(gradient, DTensor) or gradient.device_mesh.ndim == 1:
        return False
    return not gradient.placements[-1].is_replicate()
