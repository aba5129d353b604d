"""Both ends of all weight transfers: ``WeightSender`` of a policy rank, ``WeightReader`` of an engine.

Invariant: all ways iterate over ``FullTensors``, so no rank has a second copy of all weights in
memory of its own. The exceptions are the copy that a delta is computed against, and shared memory
that engines have mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """The senders of all transfers on one rank of the policy.

    Args:
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
        self._weights = weights
        self._rank = rank

    def call(self, sender: str, method: str, *args: object) -> Any:  # noqa: ANN401  (what the method returns)
        if sender not in vars(self):
            # of a transfer that a user has registered
            setattr(self, sender, TRANSFERS.find(sender).new_sender(self._weights, self._rank))
        return getattr(getattr(self, sender), method)(*args)


class WeightReader:
    """One per process that has a model; for all ways but CUDA IPC."""

    def __init__(self, device: torch.device) -> None:
        self.buffers = BufferReader()
        self.broadcast = BroadcastReader(device)

    def read(self, info: Mapping[str, Any]) -> ReceivedWeights:
        """Read the weights of an update.

        Raises:
            TransferInterruptedError: if another member of a broadcast fails.
        """
        # The keys say which transfer has published the update.
        if "rendezvous" in info:
            weights = self.broadcast.read(info)
            header = WeightsHeader(**info.get("about", {}))
            return ReceivedWeights(weights, info.get("digests", {}), header, stays=True)
        if "specs" in info:
            weights = self.buffers.read(info)
            digests = info["digests"]
            if info.get("late"):
                # The buffer was proven when it was written, some time before: compare all tensors.
                return ReceivedWeights(weights, digests, stays=True)
            return ReceivedWeights(weights, digests, in_place=self.buffers.is_in_place, stays=True)
        return ReceivedWeights(*read_file(info["path"]))
