"""The norm of a gradient whose parts lie on meshes of one and of two axes.

Invariant: every number of the gradient is counted once, and the norm is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from skyasync.workers.mesh import Mesh


def total_norm(gradients: Sequence[Tensor], mesh: Mesh) -> Tensor:
    """Of all ranks' shards; what the tensor axis has whole counts on its first rank."""
    assert mesh.tensor is not None
    first = mesh.tensor.get_local_rank() == 0
    counted = [local(g) for g in gradients if first or _split(g)]
    device = local(gradients[0]).device
    squares = torch.zeros((), dtype=torch.float64, device=device)
    if counted:
        squares += torch.stack(torch._foreach_norm(counted)).double().square().sum()
    dist.all_reduce(squares)
    return squares.sqrt()


def local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _split(gradient: Tensor) -> bool:
    """Whether the tensor axis has it in parts: its mesh is then that of shards and that axis."""
    return (
        isinstance(gradient, DTensor) and gradient.device_mesh.ndim > 1 and not gradient.placements[-1].is_replicate()
    )
