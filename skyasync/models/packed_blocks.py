"""Blocks of a packed sequence: rows of similar length, which attention pads to a rectangle.

This module imports no model library: the controller's process, which has no model, packs batches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

SIMILAR = 16
"""A row joins a block if its padding is at most one part in this many of the block's width."""

SHORT = 16
"""Or this many tokens: a call costs more than so little attention."""

NO_END = torch.iinfo(torch.int32).max
"""The end of padding: only padding sees it."""


@dataclass(frozen=True)
class PackedBlock:
    """The attention of some rows of a packed sequence, in one call.

    Args:
        queries: int64 ``[rows, width]``: the rows' own tokens, in padding the last of the row.
        tokens: int64 ``[n]``: those that are not padding.
        cells: int64 ``[n]``: where they stand in the flattened rectangle; None: it has no padding.
        keys: int64 ``[rows, length]``: all tokens of the rows, in padding the last; None: the
            queries.
        prefixes: int64 ``[rows]``: how many of the keys come before a row's own.
    """

    queries: Tensor
    tokens: Tensor
    cells: Tensor | None
    keys: Tensor | None = None
    prefixes: Tensor | None = None

    def to(self, device: torch.device) -> PackedBlock:
        tensors = {}
        for name, value in vars(self).items():
            if value is not None:
                tensors[name] = value.to(device)
        return replace(self, **tensors)

    def mask(self) -> Tensor | None:
        """Which keys each query sees, bool ``[rows, 1, width, length]``; None: those up to it."""
        if self.keys is None or self.prefixes is None:
            return None
        device = self.keys.device
        query = torch.arange(self.queries.shape[1], device=device)
        key = torch.arange(self.keys.shape[1], device=device)
        query_positions = self.prefixes[:, None] + query  # [rows, width]: in the row
        visible = key <= query_positions[:, :, None]  # [rows, width, length]
        return visible[:, None]  # a dimension for the heads


def blocks_of(lengths: Tensor, prefixes: Tensor, indices: Tensor) -> tuple[PackedBlock, ...]:
    """Divide rows that are a packed sequence into blocks.

    Args:
        lengths: tokens of each row, int64 ``[rows]``.
        prefixes: how many of them are another row's own.
        indices: int64 ``[rows, length]``: where the tokens are in the sequence.
    """
    query_counts = lengths - prefixes  # [rows]: a row's own tokens
    has_queries = query_counts > 0  # a row that adds nothing to others needs no attention
    has_prefix = prefixes > 0

    def rectangle(rows: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
        """Indices of so many tokens of each row from its start on, ``[rows, width]``.

        Padding repeats the row's last token: its result is not used.
        """
        offset = torch.arange(int(counts.max()))  # [width]
        offset = torch.minimum(offset, counts[:, None] - 1)  # [rows, width]
        return indices[rows[:, None], starts[:, None] + offset]

    def block(rows: Tensor, *, with_keys: bool) -> PackedBlock:
        counts = query_counts[rows]
        queries = rectangle(rows, prefixes[rows], counts)  # [rows, width]
        width = queries.shape[1]
        tokens = queries.flatten()
        cells = None
        if bool((counts < width).any()):
            is_token = torch.arange(width) < counts[:, None]  # [rows, width]
            cells = is_token.flatten().nonzero().squeeze(1)
            tokens = tokens[cells]
        if not with_keys:
            return PackedBlock(queries, tokens, cells)
        keys = rectangle(rows, torch.zeros_like(rows), lengths[rows])  # [rows, length]
        return PackedBlock(queries, tokens, cells, keys, prefixes[rows])

    blocks = []
    # Whole rows attend by causality alone, without a mask: they are blocks of their own.
    whole_rows = (has_queries & ~has_prefix).nonzero().squeeze(1)
    for rows in _similar(whole_rows, query_counts):
        blocks.append(block(rows, with_keys=False))
    # With a prefix both sides of the rectangle are padded: both must be similar.
    continued_rows = (has_queries & has_prefix).nonzero().squeeze(1)
    for similar_rows in _similar(continued_rows, query_counts):
        for rows in _similar(similar_rows, lengths):
            blocks.append(block(rows, with_keys=True))
    return tuple(blocks)


def _similar(rows: Tensor, sizes: Tensor) -> list[Tensor]:
    """Group rows of similar sizes, the largest first."""
    rows = rows[torch.argsort(sizes[rows], descending=True, stable=True)]
    sorted_sizes = sizes[rows].tolist()
    groups = []
    start = 0
    for end, size in enumerate(sorted_sizes):
        largest = sorted_sizes[start]
        if largest - size > max(largest // SIMILAR, SHORT):
            groups.append(rows[start:end])
            start = end
    if len(rows):
        groups.append(rows[start:])
    return groups
