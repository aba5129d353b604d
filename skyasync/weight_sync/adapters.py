"""The adapters encoding: LoRA adapters alone, for engines that have the frozen weights.

Invariant: ``with_added`` is the one formula by which trainer and engine merge an adapter, so that
in one dtype both get identical weights. What is sent carries the digests of its tensors and
identifies the frozen weights that it is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from skyasync.weight_sync.delta import Encoded, ReceivedWeights, WeightsHeader, content_of
from skyasync.weight_sync.tensors import digest, digests_of, refuse
from skyasync.weight_sync.transfers.file import read_file

PREFIX = "base_model.model."  # of the names in peft's folders
_FIRST = ".lora_A.weight"
_SECOND = ".lora_B.weight"


class Adapter(NamedTuple):
    """Args:
    weights: by the names of peft's folders.
    config: of peft's, as much as engines read.
    scale: alpha / rank.
    transposed: layers whose weight is ``[in, out]``.
    base: dtype and content of the frozen weights (``frozen_weights_id``).
    """

    weights: Mapping[str, Tensor]
    config: dict[str, Any]
    scale: float
    transposed: list[str]
    base: str

    def layers(self) -> dict[str, tuple[Tensor, Tensor]]:
        """A ``[rank, in]`` and B ``[out, rank]`` by the layer's name."""
        names = [
            name.removeprefix(PREFIX).removesuffix(_FIRST)
            for name in self.weights
            if name.endswith(_FIRST)
        ]
        return {
            name: (self.weights[PREFIX + name + _FIRST], self.weights[PREFIX + name + _SECOND])
            for name in names
        }

    def encode(self) -> Encoded:
        about = {
            "config": self.config,
            "scale": self.scale,
            "transposed": self.transposed,
            "base": self.base,
        }
        size = sum(tensor.nbytes for tensor in self.weights.values())
        return Encoded(
            self.weights,
            digests_of(self.weights),
            WeightsHeader(adapter=about),
            {"sync/bytes": float(size)},
        )

    @classmethod
    def decode(cls, received: ReceivedWeights) -> Adapter:
        """Raises WeightSyncError naming a tensor that is not what was sent."""
        wrong = [
            name
            for name, sent in received.digests.items()
            if digest(received.weights[name]) != sent
        ]
        refuse(wrong, "the file of adapters has")
        assert received.about.adapter is not None
        return cls(received.weights, **received.about.adapter)


def read_adapter(path: str) -> Adapter:
    return Adapter.decode(ReceivedWeights(*read_file(path)))


def with_added(
    weight: Tensor, halves: tuple[Tensor, Tensor], scale: float, *, transposed: bool
) -> Tensor:
    """W + scale * B A, rounded to W's dtype once."""
    first, second = halves
    added = second @ first
    return (weight + (added.T if transposed else added) * scale).to(weight.dtype)


def frozen_weights_id(dtype: object, digests: Mapping[str, str]) -> str:
    return f"{dtype} {content_of(digests)}"
