"""Adapters on their way to engines that have the frozen weights: one file, and what adding them to a weight means.

Invariant: ``with_added`` is the one formula by which a trainer merges and an engine does, so that in one dtype both
come to the same bits. A file carries the digests of its tensors, and a mark of the frozen weights that they are for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skyasync.weight_sync.changed_weights import Published, content_of, read_about
from skyasync.weight_sync.digests import digest, digests_of, refuse
from skyasync.weight_sync.shared_memory import ABOUT, read_digests, read_weights, write_weights

PREFIX = "base_model.model."  # of the names in peft's folders
_FIRST, _SECOND = ".lora_A.weight", ".lora_B.weight"


class Adapter(NamedTuple):
    """Args:
    weights: by the names of peft's folders.
    config: of peft's, as much as engines read.
    scale: alpha / rank.
    transposed: layers whose weight is ``[in, out]``.
    base: dtype and content of the frozen weights (``base_mark``).
    """

    weights: Mapping[str, Tensor]
    config: dict[str, Any]
    scale: float
    transposed: list[str]
    base: str

    def layers(self) -> dict[str, tuple[Tensor, Tensor]]:
        """A ``[rank, in]`` and B ``[out, rank]`` by the layer's name."""
        names = [name.removeprefix(PREFIX).removesuffix(_FIRST) for name in self.weights if name.endswith(_FIRST)]
        return {name: (self.weights[PREFIX + name + _FIRST], self.weights[PREFIX + name + _SECOND]) for name in names}


def with_added(weight: Tensor, halves: tuple[Tensor, Tensor], scale: float, *, transposed: bool) -> Tensor:
    """W + scale * B A, rounded to W's dtype once."""
    first, second = halves
    added = second @ first
    return (weight + (added.T if transposed else added) * scale).to(weight.dtype)


def base_mark(dtype: torch.dtype, digests: Mapping[str, str]) -> str:
    return f"{dtype} {content_of(digests)}"


def write_adapter(adapter: Adapter, folder: str = "") -> Published:
    about = {"config": adapter.config, "scale": adapter.scale, "transposed": adapter.transposed, "base": adapter.base}
    digests = digests_of(adapter.weights)
    path = write_weights(adapter.weights, folder, digests | {ABOUT: json.dumps({"adapter": about})})
    size = sum(tensor.nbytes for tensor in adapter.weights.values())
    return Published(path, content_of(digests), "", {"sync/bytes": float(size)})


def read_adapter(path: str) -> Adapter:
    """Raises WeightSyncError naming a tensor that is not what was written."""
    weights, digests = read_weights(path), read_digests(path)
    refuse([name for name, sent in digests.items() if digest(weights[name]) != sent], "the file of adapters has")
    about = read_about(path).adapter
    assert about is not None
    return Adapter(weights, **about)
