"""What is known of tensors before they are there: dtype and shape, by name."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

Kind = tuple[torch.dtype, tuple[int, ...]]
Kinds = Mapping[str, Kind]


def kinds_of(tensors: Mapping[str, Tensor]) -> Kinds:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def bytes_of(kind: Kind) -> int:
    dtype, shape = kind
    return prod(shape) * dtype.itemsize


def empty(kinds: Kinds) -> dict[str, Tensor]:
    """Tensors without memory."""
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in kinds.items()}
