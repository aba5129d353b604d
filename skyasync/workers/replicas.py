"""Which ranks shard a model's weights among each other, and which hold the same shards (HSDP).

Invariant: neighbours shard, so that what is gathered travels within a machine; ranks of one place in their groups are
replicas, and only gradients travel among them. Every rank knows its part without a message.

    fsdp_size 2 of 4 ranks:   ranks 0 1 │ 2 3 shard;   0 and 2, and 1 and 3, hold the same
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

REPLICA, SHARD = "replica", "shard"


def shard_mesh(device_type: str, ranks: int, fsdp_size: int = 0) -> DeviceMesh:
    """``[ranks]``, or ``[replicas, fsdp_size]`` where groups of so many shard the weights."""
    if fsdp_size in (0, ranks):
        return init_device_mesh(device_type, (ranks,))
    return init_device_mesh(device_type, (ranks // fsdp_size, fsdp_size), mesh_dim_names=(REPLICA, SHARD))


def shard_placement(shards: int) -> Callable[[nn.Parameter], Shard | None]:
    """How FSDP2 cuts a parameter: by rows, but stacked experts that are fewer than the shards within each of them.

    By rows every rank would hold as much as the one with most: of 8 experts over 32 ranks, four times what there is.
    """

    def place(parameter: nn.Parameter) -> Shard | None:
        few = parameter.dim() == 3 and parameter.shape[0] < shards
        return Shard(1) if few and parameter.shape[1] % shards == 0 else None

    return place


def own_part(parameter: DTensor, whole: Tensor) -> Tensor:
    """This rank's part of a tensor, laid out as ``parameter`` is."""
    part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    assert isinstance(part, DTensor)
    return part.to_local()
