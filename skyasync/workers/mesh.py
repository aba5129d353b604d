"""The mesh of a model's ranks: which of them shard weights among each other, split sequences, split matrices.

Invariant: there is one mesh, and every process group comes from it. All ranks of the default process group make it
together. Weights are sharded (FSDP2) over the ranks that differ in rows or in their part of a sequence, so that the
gradient's sum over these is the reduction that FSDP2 makes anyway; a matrix that is split is split over ``tensor``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from skyasync.workers.axes import Axes
from skyasync.workers.replicas import shard_mesh

DATA, CONTEXT, TENSOR, SHARD = "data", "context", "tensor", "shard"


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
            mesh = shard_mesh(device_type, axes.ranks, fsdp_size)
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
