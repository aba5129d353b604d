"""The end of every weight transfer on one rank of the policy.

Invariant: all ways iterate over ``FullTensors``, so no rank has a second copy of all weights in memory of its own,
except for a reason: the copy that a delta is computed against, and shared memory that engines have mapped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from skyasync.weight_sync.adapters import Adapter
from skyasync.weight_sync.full_tensors import FullTensors
from skyasync.weight_sync.transfers.broadcast import BroadcastSender
from skyasync.weight_sync.transfers.cuda_ipc import CudaIPCSender
from skyasync.weight_sync.transfers.file import FileSender
from skyasync.weight_sync.transfers.remote import RemoteSender
from skyasync.weight_sync.transfers.shared_memory import SharedMemorySender


@dataclass
class WeightSender:
    """Args:
    weights: makes a new pass over the full weights. All ranks make and iterate them alike.
    adapter: the LoRA adapters alone, on rank 0; all ranks call it.
    folder: for files; empty is shared memory of this machine.
    two_buffers: engines compute on the shared memory; else they copy from it.
    """

    weights: Callable[[], FullTensors]
    adapter: Callable[[], Adapter]
    rank: int
    device: torch.device
    folder: str = ""
    two_buffers: bool = False

    def call(self, sender: str, method: str, *args: object) -> Any:  # noqa: ANN401  (what the method returns)
        return getattr(getattr(self, sender), method)(*args)

    @cached_property
    def shared_memory(self) -> SharedMemorySender:
        return SharedMemorySender(self.weights, self.rank, two_buffers=self.two_buffers)

    @cached_property
    def file(self) -> FileSender:
        return FileSender(self.weights, self.adapter, self.rank, self.folder)

    @cached_property
    def broadcast(self) -> BroadcastSender:
        return BroadcastSender(self.weights, self.rank, self.device)

    @cached_property
    def remote(self) -> RemoteSender:
        return RemoteSender(self.weights, self.rank, torch.device("cpu"))

    @cached_property
    def cuda_ipc(self) -> CudaIPCSender:
        return CudaIPCSender(self.weights, self.rank, self.device)
