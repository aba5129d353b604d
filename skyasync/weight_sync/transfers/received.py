"""An engine's end of all ways but CUDA IPC: the weights of an update, wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skyasync.weight_sync.delta import About
from skyasync.weight_sync.transfers.broadcast import BroadcastReader
from skyasync.weight_sync.transfers.file import read_file
from skyasync.weight_sync.transfers.shared_memory import BufferReader


def never(_name: str, _tensor: Tensor) -> bool:
    return False


class ReceivedWeights(NamedTuple):
    """Args:
    weights: full tensors by name, or what ``about`` says.
    digests: of what the engine must have afterwards; empty for a broadcast that has only checked the bytes.
    in_place: whether a tensor of this name is the very one whose bytes its writer has proven.
    stays: the tensors will not change or disappear: an engine may compute on them where they are.
    """

    weights: Mapping[str, Tensor]
    digests: Mapping[str, str]
    about: About = About()
    in_place: Callable[[str, Tensor], bool] = never
    stays: bool = False


class WeightReader:
    """One per process that has a model."""

    def __init__(self, device: torch.device) -> None:
        self.buffers = BufferReader()
        self.broadcast = BroadcastReader(device)

    def read(self, info: Mapping[str, Any]) -> ReceivedWeights:
        """Raises TransferInterruptedError if another member of a broadcast fails."""
        if "rendezvous" in info:
            weights, about = self.broadcast.read(info), About(**info.get("about", {}))
            return ReceivedWeights(weights, info.get("digests", {}), about, stays=True)
        if "specs" in info:
            weights = self.buffers.read(info)
            in_place = never if info.get("late") else self.buffers.lies_there
            return ReceivedWeights(weights, info["digests"], in_place=in_place, stays=True)
        return ReceivedWeights(*read_file(info["path"]))

    def close(self) -> None:
        self.broadcast.close()
