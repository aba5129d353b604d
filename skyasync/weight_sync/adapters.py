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
_LORA_A = ".lora_A.weight"
_LORA_B = ".lora_B.weight"


class Adapter(NamedTuple):
    """A LoRA adapter as it is sent.

    Args:
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
        layers = {}
        for name, lora_a in self.weights.items():
            if name.endswith(_LORA_A):
                layer = name.removeprefix(PREFIX).removesuffix(_LORA_A)
                layers[layer] = (lora_a, self.weights[PREFIX + layer + _LORA_B])
        return layers

    def encode(self) -> Encoded:
        header = {
            "config": self.config,
            "scale": self.scale,
            "transposed": self.transposed,
            "base": self.base,
        }
        size = sum(tensor.nbytes for tensor in self.weights.values())
        return Encoded(
            self.weights,
            digests_of(self.weights),
            WeightsHeader(adapter=header),
            {"sync/bytes": float(size)},
        )

    @classmethod
    def decode(cls, received: ReceivedWeights) -> Adapter:
        """Raises WeightSyncError naming a tensor that is not what was sent."""
        differing = [
            name
            for name, sent in received.digests.items()
            if digest(received.weights[name]) != sent
        ]
        refuse(differing, "the file of adapters has")
        assert received.header.adapter is not None
        return cls(received.weights, **received.header.adapter)


def read_adapter(path: str) -> Adapter:
    return Adapter.decode(ReceivedWeights(*read_file(path)))


def with_added(
    weight: Tensor, halves: tuple[Tensor, Tensor], scale: float, *, transposed: bool
) -> Tensor:
    """W + scale * B A, rounded to W's dtype once."""
    lora_a, lora_b = halves
    product = lora_b @ lora_a  # [out, in]
    if transposed:
        product = product.T
    return (weight + product * scale).to(weight.dtype)


def frozen_weights_id(dtype: object, digests: Mapping[str, str]) -> str:
    return f"{dtype} {content_of(digests)}"
