"""vLLM's side of the weight sync by CUDA IPC: its own transfer engine, told in words where the memory is.

Invariant: nothing that came by a message is unpickled or looked up by name: of a handle only bytes and numbers are
taken, and torch's classes are put in here. Between two messages the model is either whole, or a part of an update has
been loaded and the next message is the next part, or says that there is none (``BROKEN_OFF``).

What comes in parts is loaded as vLLM loads it; see ``skyasync.weight_sync.cuda_ipc`` for who keeps the memory alive. An
engine that comes late is given all weights by the host's memory, as engines of that backend are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.ipc_engine import (
    IPCWeightTransferEngine,
    IPCWeightTransferInitInfo,
    IPCWeightTransferUpdateInfo,
)

from skyasync.weight_sync.cuda_ipc import Handle, sum_of
from skyasync.weight_sync.digests import refuse
from skyasync.weight_sync.update import WeightSyncError
from skyasync.weight_sync.vllm_shared_memory import SharedMemoryTransferEngine, SharedMemoryUpdateInfo, retie

if TYPE_CHECKING:
    from vllm.config import VllmConfig, WeightTransferConfig


@dataclass
class PartInfo(SharedMemoryUpdateInfo):
    """What ``own_part`` says; ``path`` is of no meaning."""

    path: str = ""
    part: int = 0
    last: bool = False
    names: list[str] | None = None
    dtype_names: list[str] | None = None
    shapes: list[list[int]] | None = None
    sizes: list[int] | None = None
    handle: Handle | None = None
    sums: list[int] | None = None
    broken_off: bool = False


class CudaIPCTransferEngine(SharedMemoryTransferEngine):
    """Hands parts on to vLLM's engine for them, whose model adds up what it is given."""

    update_info_cls = PartInfo

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._ipc = IPCWeightTransferEngine(config, vllm_config, device, model)
        self._ipc.init_transfer_engine(IPCWeightTransferInitInfo(packed=True))
        self._loaded = 0  # parts of an update that is not whole yet

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        assert isinstance(update_info, PartInfo)
        if update_info.broken_off:
            self._break_off()
        elif update_info.path:
            super().receive_weights(update_info)
        else:
            self._receive_part(update_info)

    def _receive_part(self, part: PartInfo) -> None:
        if part.part != self._loaded:
            raise WeightSyncError(f"weight sync: received part {part.part}, expected part {self._loaded}")
        told = as_vllms(part)
        check_gpu(part.handle or {}, self.device)
        if part.part == 0:
            self._ipc.start_weight_update()
        self._loaded += 1
        loading: Any = AddedUp(self.model, part.names or [], part.sums or [])
        self._ipc.model = loading
        try:
            self._ipc.receive_weights(told)
        finally:
            self._ipc.model = self.model
        if part.last:
            self._loaded = 0
            self._ipc.finish_weight_update()
            for head, embedding in self._tied:
                retie(head, embedding)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # for the cache, which has no memory yet

    def _break_off(self) -> None:
        """Put the layers together as far as they came: the next update brings all of them."""
        if self._loaded:
            self._loaded = 0
            self._ipc.finish_weight_update()

    def shutdown(self) -> None:
        self._ipc.shutdown()


class AddedUp:
    """In the model's place while a part is loaded: raises WeightSyncError where its tensors are not what was sent."""

    def __init__(self, model: torch.nn.Module, names: list[str], sums: list[int]) -> None:
        self._model, self._sums = model, dict(zip(names, sums, strict=True))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> object:
        weights = list(weights)
        found = torch.stack([sum_of(tensor) for _, tensor in weights]).tolist()
        wrong = [name for (name, _), there in zip(weights, found, strict=True) if self._sums[name] != there]
        refuse(wrong, "the vLLM engine received")
        model: Any = self._model
        return model.load_weights(weights)


def as_vllms(part: PartInfo) -> IPCWeightTransferUpdateInfo:
    """The same for vLLM, with the arguments of torch's ``rebuild_cuda_tensor``."""
    assert part.handle and part.names and part.dtype_names and part.shapes and part.sizes
    told, size = part.handle, int(part.handle["size"])
    arguments = (
        torch.Tensor, (size,), (1,), 0, torch.storage.TypedStorage, torch.uint8,
        0,  # the device, which vLLM puts in
        bytes(told["handle"]), size, int(told["offset"]), False,
        bytes(told["counter"]), int(told["counter_offset"]), bytes(told["event"]), bool(told["wait"]),
    )  # fmt: skip
    return IPCWeightTransferUpdateInfo(
        names=part.names,
        dtype_names=part.dtype_names,
        shapes=part.shapes,
        ipc_handles={str(told["gpu"]): arguments},
        tensor_sizes=part.sizes,
    )


def check_gpu(handle: Handle, device: torch.device) -> None:
    """Raises WeightSyncError if the memory is another GPU's; nothing has been done then."""
    own = str(torch.cuda.get_device_properties(device.index).uuid)
    if handle["gpu"] != own:
        raise WeightSyncError(
            f"the vLLM engine computes on GPU {own}, and the weights lie on GPU {handle['gpu']}: "
            f"generator.weight_sync_backend=cuda_ipc needs both on one, use shared_memory"
        )
