"""Both ends of every weight transfer: ``WeightSender`` on one rank of the policy, ``WeightReader``
in an engine.

Invariant: all ways iterate over ``FullTensors``, so no rank has a second copy of all weights in
memory of its own. The exceptions are the copy that a delta is computed against, and shared memory
that engines have mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import methodcaller
from typing import Any

import torch

from skyasync.weight_sync.adapters import Adapter
from skyasync.weight_sync.delta import ReceivedWeights, WeightsHeader
from skyasync.weight_sync.full_tensors import FullTensors
from skyasync.weight_sync.transfers import TRANSFERS
from skyasync.weight_sync.transfers.broadcast import BroadcastReader, BroadcastSender
from skyasync.weight_sync.transfers.cuda_ipc import CudaIPCSender
from skyasync.weight_sync.transfers.file import FileSender, read_file
from skyasync.weight_sync.transfers.remote import RemoteSender
from skyasync.weight_sync.transfers.shared_memory import BufferReader, SharedMemorySender


class WeightSender:
    """Args:
    weights: makes a new pass over the full weights. All ranks make and iterate them alike.
    adapter: the LoRA adapters alone, on rank 0; all ranks call it.
    folder: for files; empty is shared memory of this machine.
    two_buffers: engines compute on the shared memory; else they copy from it.
    """

    def __init__(
        self,
        weights: Callable[[], FullTensors],
        adapter: Callable[[], Adapter],
        rank: int,
        device: torch.device,
        folder: str = "",
        two_buffers: bool = False,
    ) -> None:
        self.shared_memory = SharedMemorySender(weights, rank, two_buffers=two_buffers)
        self.file = FileSender(weights, adapter, rank, folder)
        self.broadcast = BroadcastSender(weights, rank, device)
        self.remote = RemoteSender(weights, rank, torch.device("cpu"))
        self.cuda_ipc = CudaIPCSender(weights, rank, device)

        self._new_sender = lambda name: TRANSFERS.find(name).new_sender(weights, rank)

    def call(self, sender: str, method: str, *args: object) -> Any:  # noqa: ANN401  (what the method returns)
        if sender not in vars(self):
            vars(self)[sender] = self._new_sender(sender)
        return methodcaller(method, *args)(vars(self)[sender])


class WeightReader:
    """One per process that has a model; for all ways but CUDA IPC."""

    def __init__(self, device: torch.device) -> None:
        self.buffers = BufferReader()
        self.broadcast = BroadcastReader(device)

    def read(self, info: Mapping[str, Any]) -> ReceivedWeights:
        """The weights of an update. Raises TransferInterruptedError if another member of a
        broadcast fails."""
        if "rendezvous" in info:
            weights = self.broadcast.read(info)
            about = WeightsHeader(**info.get("about", {}))
            return ReceivedWeights(weights, info.get("digests", {}), about, stays=True)
        if "specs" in info:
            weights = self.buffers.read(info)
            digests = info["digests"]
            if info.get("late"):
                return ReceivedWeights(weights, digests, stays=True)
            return ReceivedWeights(weights, digests, in_place=self.buffers.is_in_place, stays=True)
        return ReceivedWeights(*read_file(info["path"]))
