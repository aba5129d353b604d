"""The mesh of a model's ranks: which of them shard weights among each other, split sequences, split matrices.

Invariant: there is one mesh, and every process group comes from it. All ranks of the default process group make it
together. Weights are sharded (FSDP2) over the ranks that differ in rows or in their part of a sequence, so that the
gradient's sum over these is the reduction that FSDP2 makes anyway; a matrix that is split is split over ``tensor``.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from skyasync.models import Axes

DATA, CONTEXT, TENSOR, REPLICA, SHARD = "data", "context", "tensor", "replica", "shard"

OPTIMIZER, PARAMETERS = "optimizer", "parameters"
"""What ``cpu_offload`` keeps in host memory: the optimizer state between steps, or all that is sharded, always."""

HOST, LOOPBACK = torch.device("cpu"), "127.0.0.1"


@dataclass(frozen=True)
class Mesh:
    """The mesh of one model. A group is None where its axis has one rank."""

    axes: Axes
    shard: DeviceMesh
    tensor: DeviceMesh | None = None
    data_group: dist.ProcessGroup | None = None
    context_group: dist.ProcessGroup | None = None
    tensor_group: dist.ProcessGroup | None = None

    @classmethod
    def make(cls, device_type: str, axes: Axes, fsdp_size: int = 0) -> Mesh:
        if axes.sharing == 1:
            if fsdp_size in (0, axes.ranks):
                mesh = init_device_mesh(device_type, (axes.ranks,))
            else:  # HSDP: neighbours shard, so that gathers stay in a machine; gradients travel among replicas
                shape = (axes.ranks // fsdp_size, fsdp_size)
                mesh = init_device_mesh(device_type, shape, mesh_dim_names=(REPLICA, SHARD))
            return cls(axes, mesh, data_group=dist.group.WORLD if axes.ranks > 1 else None)
        mesh = init_device_mesh(
            device_type, (axes.data, axes.context, axes.tensor), mesh_dim_names=(DATA, CONTEXT, TENSOR)
        )
        # Of gathering what both axes have cut: a line for every kind of parameter, that it takes two collectives.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        shard = mesh[DATA, CONTEXT]._flatten(SHARD)

        def group(name: str, size: int) -> dist.ProcessGroup | None:
            return mesh[name].get_group() if size > 1 else None

        return cls(
            axes,
            shard,
            mesh[TENSOR] if axes.tensor > 1 else None,
            group(DATA, axes.data),
            group(CONTEXT, axes.context),
            group(TENSOR, axes.tensor),
        )


def shard_placement(shards: int) -> Callable[[nn.Parameter], Shard | None]:
    """How FSDP2 cuts a parameter: by rows, but stacked experts that are fewer than the shards within each of them.

    By rows every rank would hold as much as the one with most: of 8 experts over 32 ranks, four times what there is.
    """

    def place(parameter: nn.Parameter) -> Shard | None:
        few = parameter.dim() == 3 and parameter.shape[0] < shards
        return Shard(1) if few and parameter.shape[1] % shards == 0 else None

    return place


def local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_part(parameter: DTensor, whole: Tensor) -> Tensor:
    """This rank's part of a tensor, laid out as ``parameter`` is."""
    part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    assert isinstance(part, DTensor)
    return part.to_local()


def process_group_backend(device_type: str, cpu_offload: str, *, colocated: bool = False) -> str:
    """NCCL takes tensors of GPUs alone; weights that lie on the host are gathered by gloo.

    Args:
        colocated: weights lie on the host while engines have the GPUs, and an engine may join late.
    """
    if device_type != "cuda":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if cpu_offload == PARAMETERS or colocated else "nccl"


def loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return "lo" if "lo" in names else "lo0"


def offload_policy(kind: str, device: torch.device) -> OffloadPolicy:
    """FSDP2's, of weights that are computed with on ``device``."""
    return CPUOffloadPolicy(pin_memory=device.type == "cuda") if kind == PARAMETERS else OffloadPolicy()


def place(model: nn.Module, kind: str, device: torch.device) -> None:
    """Everything where a call finds it: on the device, or all but the weights, which FSDP2 brings from the host."""
    if kind != PARAMETERS:
        model.to(device)
        return
    model.to(HOST)
    move_buffers(model, device)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved(buffer, device)


def move_weights(model: nn.Module, device: torch.device) -> None:
    """Parameters, buffers and gradients. FSDP2 frees gathered parameters first, and registers its shards again."""
    model._apply(lambda tensor: moved(tensor, device))


def move_moments(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """All of the optimizer's state, steps included: the fused AdamW wants them where the parameters are."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = moved(value, device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device already: the tensor itself."""
    return tensor.to(device)
