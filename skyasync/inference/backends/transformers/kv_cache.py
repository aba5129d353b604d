"""A key-value cache with one slot per running request, allocated ahead.

Invariant: the running requests occupy slots 0 to n-1, so that a step reads plain views and copies
nothing; columns beyond a request's own length hold finite numbers (zeros or leftovers) that the
mask hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, ``[slots, heads, columns, head_dim]``.

    ``update`` writes one token per slot at that slot's own column: a batch needs no common padding.
    """

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.keys = like.new_zeros(0, like.shape[1], 0, like.shape[3])
        self.values = self.keys
        self.is_initialized = True
        self.columns = torch.empty(0, dtype=torch.int64)  # where each slot's next token goes, [n]
        self.width = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the constructor has done it."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        n = len(self.columns)
        slots = torch.arange(n, device=self.columns.device)
        self.keys[slots, :, self.columns] = key_states[:, :, 0]
        self.values[slots, :, self.columns] = value_states[:, :, 0]
        return self.keys[:n, :, : self.width], self.values[:n, :, : self.width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.width, 0

    def get_seq_length(self) -> int:
        return self.width

    def get_max_length(self) -> int:
        return self.keys.shape[2]


class SlotCache(Cache):
    """All layers. ``budget`` is the most bytes it may take; ``prefixes`` (any prompt's cache) gives
    the shapes."""

    def __init__(self, prefixes: Cache, budget: int) -> None:
        layers: Sequence[Any] = prefixes.layers
        self.slot_layers = [SlotLayer(layer.keys) for layer in layers]
        super().__init__(layers=list(self.slot_layers))
        self.budget = budget
        keys = [layer.keys for layer in layers]
        self.bytes_per_token = sum(2 * k.shape[1] * k.shape[3] * k.element_size() for k in keys)

    @property
    def slots(self) -> int:
        return self.slot_layers[0].keys.shape[0]

    @property
    def columns(self) -> int:
        return self.slot_layers[0].keys.shape[2]

    def fits(self, slots: int, columns: int) -> bool:
        return slots * columns * self.bytes_per_token <= self.budget

    def reserve(self, slots: int, columns: int) -> None:
        """Allocate for ``slots`` requests of up to ``columns`` tokens, those already running
        included."""
        have_slots, _, have_columns, _ = self.slot_layers[0].keys.shape
        if slots <= have_slots and columns <= have_columns:
            return
        generous = (
            max(have_slots, 1 << max(2, (slots - 1).bit_length())),
            max(have_columns, -(-columns // 64) * 64),
        )
        new_slots, new_columns = generous if self.fits(*generous) else (slots, columns)
        for layer in self.slot_layers:
            layer.keys = _resized(layer.keys, new_slots, new_columns)
            layer.values = _resized(layer.values, new_slots, new_columns)

    def fill(self, first_slot: int, prefixes: Cache, index: Tensor) -> None:
        """Put prompt ``index[i]`` of ``prefixes`` into slot ``first_slot + i``; samples of a prompt
        share it."""
        layers: Sequence[Any] = prefixes.layers
        for layer, prefix in zip(self.slot_layers, layers, strict=True):
            slots = slice(first_slot, first_slot + len(index))
            length = min(prefix.keys.shape[2], self.columns)
            layer.keys[slots, :, :length] = prefix.keys[index, :, :length]
            layer.values[slots, :, :length] = prefix.values[index, :, :length]

    def move(self, sources: Sequence[int], targets: Sequence[int], width: int) -> None:
        """Copy the first ``width`` columns of slots ``sources`` to slots ``targets`` (disjoint)."""
        for layer in self.slot_layers:
            for tensor in (layer.keys, layer.values):
                for source, target in zip(sources, targets, strict=True):
                    tensor[target, :, :width] = tensor[source, :, :width]

    def at(self, columns: Tensor, width: int) -> SlotCache:
        """Set where the next token of each running slot goes, and how many columns attention
        reads."""
        for layer in self.slot_layers:
            layer.columns = columns
            layer.width = width
        return self


def _resized(tensor: Tensor, slots: int, columns: int) -> Tensor:
    """A zeroed tensor (the system hands out its pages when they are touched) with the old
    content."""
    new = tensor.new_zeros(slots, tensor.shape[1], columns, tensor.shape[3])
    n = min(slots, tensor.shape[0])
    width = min(columns, tensor.shape[2])
    new[:n, :, :width] = tensor[:n, :, :width]
    return new
