"""Blocks of a packed sequence: rows of similar length in one rectangle, in which attention pads
them.

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
        return replace(
            self, **{n: value.to(device) for n, value in vars(self).items() if value is not None}
        )

    def mask(self) -> Tensor | None:
        """Bool ``[rows, 1, width, length]``: which keys each query sees; None: those up to
        itself."""
        if self.keys is None or self.prefixes is None:
            return None
        width = self.queries.shape[1]
        length = self.keys.shape[1]
        index = torch.arange(max(width, length), device=self.keys.device)
        return (index[:length] <= self.prefixes[:, None, None] + index[:width, None])[:, None]


def blocks_of(lengths: Tensor, prefixes: Tensor, indices: Tensor) -> tuple[PackedBlock, ...]:
    """The blocks of rows that are a packed sequence.

    Args:
        lengths: tokens of each row, int64 ``[rows]``.
        prefixes: how many of them are another row's own.
        indices: int64 ``[rows, length]``: where the tokens are in the sequence.
    """
    own = lengths - prefixes

    def rectangle(rows: Tensor, first: Tensor, counts: Tensor) -> Tensor:
        """The indices of so many tokens of each row from the ``first`` on."""
        index = torch.minimum(torch.arange(int(counts.max())), counts[:, None] - 1)
        return indices[rows[:, None], first[:, None] + index]

    blocks: list[PackedBlock] = []
    for shares in (False, True):
        chosen = ((own > 0) & ((prefixes > 0) == shares)).nonzero().squeeze(1)
        for similar in _similar(chosen, own):
            for rows in _similar(similar, lengths) if shares else [similar]:
                queries = rectangle(rows, prefixes[rows], own[rows])
                width = queries.shape[1]
                cells = None
                if bool((own[rows] < width).any()):
                    cells = (torch.arange(width) < own[rows, None]).flatten().nonzero().squeeze(1)
                if cells is None:
                    tokens = queries.flatten()
                else:
                    tokens = queries.flatten()[cells]
                if shares:
                    keys = rectangle(rows, torch.zeros_like(rows), lengths[rows])
                else:
                    keys = None
                blocks.append(
                    PackedBlock(queries, tokens, cells, keys, prefixes[rows] if shares else None)
                )
    return tuple(blocks)


def _similar(rows: Tensor, sizes: Tensor) -> list[Tensor]:
    """Rows in groups of similar sizes, the largest first."""
    rows = rows[torch.argsort(sizes[rows], descending=True, stable=True)]
    ordered = sizes[rows].tolist()
    groups = []
    first = 0
    for last in range(1, len(ordered) + 1):
        if last == len(ordered) or ordered[first] - ordered[last] > max(
            ordered[first] // SIMILAR, SHORT
        ):
            groups.append(rows[first:last])
            first = last
    return groups
