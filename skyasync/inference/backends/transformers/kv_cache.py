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
        _, heads, _, head_dim = like.shape
        self.keys = like.new_zeros(0, heads, 0, head_dim)
        self.values = self.keys
        self.is_initialized = True
        self.columns = torch.empty(0, dtype=torch.int64)  # where each slot's next token goes, [n]
        self.width = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the constructor has made the tensors."""

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Write one token per running slot.

        Args:
            key_states: ``[n, heads, 1, head_dim]``, as ``value_states``.

        Returns:
            Keys and values that attention reads, ``[n, heads, width, head_dim]``.
        """
        n = len(self.columns)
        slots = torch.arange(n, device=self.columns.device)
        self.keys[slots, :, self.columns] = key_states[:, :, 0]
        self.values[slots, :, self.columns] = value_states[:, :, 0]
        keys = self.keys[:n, :, : self.width]
        values = self.values[:n, :, : self.width]
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.width, 0

    def get_seq_length(self) -> int:
        return self.width

    def get_max_length(self) -> int:
        return self.keys.shape[2]


class SlotCache(Cache):
    """All layers.

    Args:
        prefixes: any prompt's cache, which has the shapes of the layers.
        budget: the most bytes that the cache may take.
    """

    def __init__(self, prefixes: Cache, budget: int) -> None:
        layers: Sequence[Any] = prefixes.layers
        self.slot_layers = [SlotLayer(layer.keys) for layer in layers]
        super().__init__(layers=list(self.slot_layers))
        self.budget = budget
        self.bytes_per_token = 0
        for layer in self.slot_layers:
            _, heads, _, head_dim = layer.keys.shape
            # Keys and values.
            self.bytes_per_token += 2 * heads * head_dim * layer.keys.element_size()

    @property
    def slots(self) -> int:
        return self.slot_layers[0].keys.shape[0]

    @property
    def columns(self) -> int:
        return self.slot_layers[0].keys.shape[2]

    def fits(self, slots: int, columns: int) -> bool:
        return slots * columns * self.bytes_per_token <= self.budget

    def reserve(self, slots: int, columns: int) -> None:
        """Allocate for ``slots`` requests, running ones included, of up to ``columns`` tokens."""
        if slots <= self.slots and columns <= self.columns:
            return
        # Growth copies the cache. Powers of 2 and multiples of 64, if they fit, make it rare.
        bits = max(2, (slots - 1).bit_length())
        more_slots = max(self.slots, 1 << bits)
        more_columns = max(self.columns, -(-columns // 64) * 64)
        if self.fits(more_slots, more_columns):
            slots = more_slots
            columns = more_columns
        for layer in self.slot_layers:
            layer.keys = _resized(layer.keys, slots, columns)
            layer.values = _resized(layer.values, slots, columns)

    def fill(self, first_slot: int, prefixes: Cache, index: Tensor) -> None:
        """Copy prompt ``index[i]`` of ``prefixes`` into slot ``first_slot + i``.

        Args:
            prefixes: keys and values ``[prompts, heads, padded length, head_dim]`` of each layer.
            index: ``[new slots]``; samples of a prompt have the same number.
        """
        slots = slice(first_slot, first_slot + len(index))
        layers: Sequence[Any] = prefixes.layers
        for layer, prefix in zip(self.slot_layers, layers, strict=True):
            # Columns of padding may be more than the cache has.
            length = min(prefix.keys.shape[2], self.columns)
            # [new slots, heads, length, head_dim]
            layer.keys[slots, :, :length] = prefix.keys[index, :, :length]
            layer.values[slots, :, :length] = prefix.values[index, :, :length]

    def move(self, sources: Sequence[int], targets: Sequence[int], width: int) -> None:
        """Copy the first ``width`` columns of slots ``sources`` to slots ``targets`` (disjoint)."""
        for layer in self.slot_layers:
            for tensor in (layer.keys, layer.values):
                for source, target in zip(sources, targets, strict=True):
                    tensor[target, :, :width] = tensor[source, :, :width]

    def at(self, columns: Tensor, width: int) -> SlotCache:
        """Set the columns of the next tokens; returns the cache itself.

        Args:
            columns: ``[n]``, of each running slot.
            width: how many columns attention reads.
        """
        for layer in self.slot_layers:
            layer.columns = columns
            layer.width = width
        return self


def _resized(tensor: Tensor, slots: int, columns: int) -> Tensor:
    """A tensor ``[slots, heads, columns, head_dim]`` with the old content, else zero."""
    n, heads, width, head_dim = tensor.shape
    # The system hands out pages of zeros when they are touched: unused slots take no memory.
    new_tensor = tensor.new_zeros(slots, heads, columns, head_dim)
    n = min(n, slots)
    width = min(width, columns)
    new_tensor[:n, :, :width] = tensor[:n, :, :width]
    return new_tensor
