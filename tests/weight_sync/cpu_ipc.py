"""In place of CUDA IPC: host memory that torch shares by name and another process opens.

The rest is the code for GPUs: packing by ranks, the parts of a handle, vLLM's messages, its transfer engine and its
layers. vLLM imports this module in its worker, for ``WorkerExtension``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from skyasync.weight_sync.transfers import cuda_ipc
from skyasync.weight_sync.transfers.cuda_ipc import Handle
from tests.workers.processes import Rank

GPU = "GPU-that-is-none"


def share(buffer: Tensor) -> Handle:
    """In place of ``handle_of``."""
    manager, name, size = buffer.untyped_storage()._share_filename_cpu_()
    return {"gpu": GPU, "handle": name, "size": size, "offset": 0, "counter": manager,
            "counter_offset": 0, "event": b"", "wait": False}  # fmt: skip


def opened(*arguments: Any) -> Tensor:
    """In place of torch's ``rebuild_cuda_tensor``."""
    (
        tensor_class,
        size,
        stride,
        place,
        storage_class,
        dtype,
        _,
        name,
        length,
        offset,
        gradient,
        manager,
        *_,
    ) = arguments
    assert (tensor_class, storage_class, offset, gradient) == (
        torch.Tensor,
        torch.storage.TypedStorage,
        0,
        False,
    )
    storage = torch.UntypedStorage._new_shared_filename_cpu(manager, name, length)
    return torch.empty(0, dtype=dtype).set_(storage, place, size, stride)


def in_rank(rank: Rank, chunk: int) -> None:
    """Set up a policy's rank, with small parts."""
    cuda_ipc.handle_of, cuda_ipc.PART_BYTES = share, chunk


def in_worker() -> None:
    from torch.multiprocessing import reductions

    reductions.rebuild_cuda_tensor = opened
    torch.cuda.get_device_properties = lambda _device: SimpleNamespace(uuid=GPU)  # type: ignore[assignment]


def __getattr__(name: str) -> Any:
    if name != "WorkerExtension":
        raise AttributeError(name)
    from skyasync.weight_sync.transfers.vllm_worker import WorkerExtension

    in_worker()
    return WorkerExtension
