"""The mesh of a model's ranks: which of them shard weights, split sequences, split matrices.

Invariant: there is one mesh, and every process group comes from it. All ranks of the default
process group make it together. Weights are sharded (FSDP2) over the ranks that differ in rows or in
their slice of a sequence: FSDP2's reduction is then the sum of the gradient over these ranks. A
matrix that is split is split over ``tensor``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from skyasync.models import MeshShape
from skyasync.weight_sync.full_tensors import Quantized

PIPELINE = "pipeline"
DATA = "data"
CONTEXT = "context"
TENSOR = "tensor"
EXPERT = "expert"
REPLICA = "replica"
SHARD = "shard"

OPTIMIZER = "optimizer"
PARAMETERS = "parameters"
"""Values of ``cpu_offload``: host memory has the optimizer state between steps, or all shards."""

HOST = torch.device("cpu")

T = TypeVar("T")


@dataclass(frozen=True)
class PipelineGroups:
    """Ranks of one pipeline, one per stage, in the order of the stages.

    They have one coordinate in all other dimensions.

    States and gradients travel in groups of their own. NCCL runs what a group sends in the order of
    the calls. A stage that waits for a gradient must not hold up the states that the next stage
    needs first.
    """

    ranks: tuple[int, ...]
    states: dist.ProcessGroup
    gradients: dist.ProcessGroup
    first_and_last: dist.ProcessGroup

    @classmethod
    def of(cls, mesh: DeviceMesh) -> PipelineGroups:
        """Make the groups of all pipelines, and return this rank's. All ranks call it.

        torch makes a group by a call of all ranks, also of those that are not in it.
        """
        result: PipelineGroups | None = None
        for ranks in mesh.mesh.flatten(1).T.tolist():  # [pipelines, stages]
            groups = cls(
                ranks=tuple(ranks),
                states=dist.new_group(ranks),
                gradients=dist.new_group(ranks),
                first_and_last=dist.new_group([ranks[0], ranks[-1]]),
            )
            if mesh.get_rank() in ranks:
                result = groups
        assert result
        return result

    def from_last(self, value: T) -> T:
        """The last stage's value, on all stages; all of them call it."""
        box = [value]  # torch replaces the objects of a list
        dist.broadcast_object_list(box, src=self.ranks[-1], group=self.states)
        return box[0]


@dataclass(frozen=True)
class Mesh:
    """The mesh of one model. The group of a dimension with one rank is None."""

    shape: MeshShape
    shard: DeviceMesh
    tensor: DeviceMesh | None = None
    data_group: dist.ProcessGroup | None = None
    context_group: dist.ProcessGroup | None = None
    tensor_group: dist.ProcessGroup | None = None
    pipeline: PipelineGroups | None = None
    expert: DeviceMesh | None = None  # of the ranks that divide experts
    expert_shard: DeviceMesh | None = None  # of the ranks that shard the same experts

    @classmethod
    def make(cls, device_type: str, shape: MeshShape, fsdp_size: int = 0) -> Mesh:
        """Make the mesh of all ranks of the default process group. All of them call it.

        Args:
            fsdp_size: ranks that shard weights among each other; 0: all.
        """
        if shape.expert > 1:
            # All but the experts is sharded over all ranks, as without expert parallelism.
            rank_mesh = init_device_mesh(device_type, (shape.ranks,))
            mesh = init_device_mesh(
                device_type,
                (shape.data // shape.expert, shape.expert),
                mesh_dim_names=(SHARD, EXPERT),
            )
            silence_mesh_warning()
            return cls(
                shape,
                rank_mesh,
                data_group=dist.group.WORLD,
                expert=mesh[EXPERT],
                expert_shard=mesh[SHARD],
            )
        if shape.non_data == shape.pipeline == 1:
            if fsdp_size in (0, shape.ranks):
                mesh = init_device_mesh(device_type, (shape.ranks,))
            else:
                # HSDP: neighbours shard, so that gathers stay in a machine; gradients travel among
                # replicas.
                replicas = shape.ranks // fsdp_size
                mesh = init_device_mesh(
                    device_type, (replicas, fsdp_size), mesh_dim_names=(REPLICA, SHARD)
                )
            return cls(shape, mesh, data_group=dist.group.WORLD if shape.ranks > 1 else None)
        sizes = {DATA: shape.data, CONTEXT: shape.context, TENSOR: shape.tensor}
        if shape.pipeline > 1:
            sizes = {PIPELINE: shape.pipeline, **sizes}  # outermost: its ranks are farthest apart
        mesh = init_device_mesh(
            device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes.keys())
        )
        silence_mesh_warning()
        pipeline = None
        if shape.pipeline > 1:
            pipeline = PipelineGroups.of(mesh)
        return cls(
            shape,
            # Weights are sharded over both: FSDP2's sum of gradients then covers slices of a row.
            shard=mesh[DATA, CONTEXT]._flatten(SHARD),
            tensor=mesh[TENSOR] if shape.tensor > 1 else None,
            data_group=mesh[DATA].get_group() if shape.data > 1 else None,
            context_group=mesh[CONTEXT].get_group() if shape.context > 1 else None,
            tensor_group=mesh[TENSOR].get_group() if shape.tensor > 1 else None,
            pipeline=pipeline,
        )


def silence_mesh_warning() -> None:
    """Silence torch's warning of parameters that two dimensions shard.

    It says that gathering them takes two collectives, which is so by design.
    """
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def shard_placement(shards: int) -> Callable[[nn.Parameter], Shard | None]:
    """How FSDP2 cuts a parameter: by rows, except stacked experts that are fewer than the shards.

    These are cut within each expert.

    By rows every rank would hold as much as the one with most: of 8 experts over 32 ranks, four
    times what there is. The last dimension comes first: matrices of the files that are joined along
    the other one can be read in slices.
    """

    def place(parameter: nn.Parameter) -> Shard | None:
        if parameter.dim() != 3 or parameter.shape[0] >= shards:  # [experts, rows, columns]
            return None
        for dim in (2, 1):
            if parameter.shape[dim] % shards == 0:
                return Shard(dim)
        return None

    return place


def local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def process_group_backend(device_type: str, cpu_offload: str, *, colocated: bool = False) -> str:
    """The backend of torch's process groups, by the devices that tensors are on.

    NCCL takes tensors of GPUs alone; weights in host memory are gathered by gloo.

    Args:
        colocated: weights are in host memory while engines use the GPUs, and an engine may join
            late.
    """
    if device_type != "cuda":
        return "gloo"
    if cpu_offload == PARAMETERS or colocated:
        return "cpu:gloo,cuda:nccl"
    return "nccl"


class OffloadBuffers:
    """Host memory that every offload uses again: pages are pinned and faulted in once.

    Copies are queued on the device's stream: the caller synchronizes it.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, ...], Tensor] = {}

    def move_model_buffers(self, model: nn.Module, device: torch.device) -> None:
        for module_name, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self.moved(buffer, device, (module_name, name))

    def move_weights(self, model: nn.Module, device: torch.device) -> None:
        """Move parameters and buffers.

        FSDP2 frees gathered parameters first, and registers its shards again.
        """
        numbers = count()  # the order of _apply is the same in every offload

        def move(tensor: Tensor) -> Tensor:
            return self.moved(tensor, device, ("weights", next(numbers)))

        model._apply(move)

    def move_optimizer_state(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        """Move all of the optimizer's state.

        Steps too: the fused AdamW needs them on the parameters' device.
        """
        for number, state in enumerate(optimizer.state.values()):
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = self.moved(value, device, (id(optimizer), number, name))

    def moved(self, tensor: Tensor, device: torch.device, place: tuple[object, ...]) -> Tensor:
        """The tensor on the device; it is not copied if it is there already.

        Args:
            place: names the tensor in every offload.
        """
        if tensor.device.type == device.type:
            return tensor
        # A quantized weight is codes and scales: a buffer of its shape would hold numbers.
        if device.type != HOST.type or isinstance(local(tensor), Quantized):
            return tensor.to(device, non_blocking=True)
        return self.on_host(tensor, place)

    def on_host(self, tensor: Tensor, place: tuple[object, ...]) -> Tensor:
        """A copy of the tensor in the buffer of its place."""
        source = local(tensor).detach()
        buffer = self._buffers.get(place)
        if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
            buffer = torch.empty_like(source, device=HOST, pin_memory=source.is_cuda)
            self._buffers[place] = buffer
        buffer.copy_(source, non_blocking=True)
        if isinstance(tensor, DTensor):
            # Not ``from_local``, which would copy it to the mesh's device.
            return DTensor(buffer, tensor._spec, requires_grad=False)
        return buffer
