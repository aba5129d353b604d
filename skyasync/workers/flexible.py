"""Attention on a GPU by FlexAttention: one kernel for rows end to end, prompts in common and sliding windows, and no
dense mask.

Invariant: a token sees what the rule in ``_sees`` says, on any device. Which squares of the mask are looked at is found
from what is in them, in memory that grows with the square of the number of squares, not of tokens; a square too many
costs time and changes nothing.

A CPU has no use for it: FlexAttention has no backward pass there, and sdpa takes rows block by block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.integrations.flex_attention import flex_attention_forward

SQUARE = 128
"""Tokens on a side of what the kernel takes or leaves as a whole."""


_KEEPS = "_skyasync_keeps_blocks"


def uses_flex(model: nn.Module, device: torch.device) -> bool:
    """The one place that says who attends so."""
    return device.type == "cuda" and not getattr(model, _KEEPS, False)


def keep_blocks(model: nn.Module) -> None:
    """This model attends as on a CPU: where the kernel could not be compiled it would make the whole mask."""
    for module in model.modules():
        setattr(module, _KEEPS, True)


class Sight:
    """Which tokens each token sees.

    Args:
        rows: int32 ``[batch, length]``: the row that a token stands in, in order.
        owners: int32 ``[batch, length]``, as in ``Layout``; None: each row is one sequence.
    """

    def __init__(self, rows: Tensor, owners: Tensor | None = None) -> None:
        self.rows, self.owners = rows, torch.ones_like(rows) if owners is None else owners
        self._masks: dict[int, BlockMask] = {}

    @classmethod
    def of_rows(cls, owners: Tensor) -> Sight:
        """Of rows one below the other."""
        return cls(torch.zeros_like(owners), owners)

    def mask(self, window: int = 0) -> BlockMask:
        """Causal, over the last ``window`` tokens (0: over all); made once, for all layers."""
        if window not in self._masks:
            self._masks[window] = _mask(self.rows, self.owners, window)
        return self._masks[window]


@lru_cache(maxsize=8)
def window_mask(length: int, window: int, device: torch.device) -> BlockMask:
    """Causal, over the last ``window`` tokens, of rows that are one sequence each."""
    rows = torch.zeros(1, length, dtype=torch.int32, device=device)
    return _mask(rows, rows, window, lambda b, h, q, k: (k <= q) & (q - k < window))


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    **options: Any,  # noqa: ANN401
) -> Tensor:
    """By transformers' call of it: ``[batch, heads, length, size]`` in, ``[batch, length, heads, size]`` out."""
    found: Tensor = flex_attention_forward(module, query, key, value, mask, **options)[0]
    return found


def _mask(
    rows: Tensor, owners: Tensor, window: int, sees: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
) -> BlockMask:
    length = rows.shape[1]
    some, every = (squares[:, None] for squares in looked_at(rows, owners, window))
    return BlockMask.from_kv_blocks(
        *_in_order(some & ~every),
        *_in_order(every),
        BLOCK_SIZE=SQUARE,
        mask_mod=sees or _sees(rows, owners, window or length),
        seq_lengths=(length, length),
    )


def _sees(rows: Tensor, owners: Tensor, window: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = (owners[b, q] == owners[b, k]) | (owners[b, k] == 0)
        return (k <= q) & (q - k < window) & (rows[b, q] == rows[b, k]) & own

    return sees


def looked_at(rows: Tensor, owners: Tensor, window: int = 0, square: int = SQUARE) -> tuple[Tensor, Tensor]:
    """Bool ``[batch, squares, squares]``: where a token may see one, and where all see all.

    By the least and the greatest row and owner among a square's tokens: where these ranges are apart, no two agree.
    """
    length = rows.shape[1]
    (low, high), (least, most) = _ranges(rows, square), _ranges(owners, square)
    begin = torch.arange(low.shape[1], device=rows.device) * square
    apart = begin[:, None] - begin[None, :]  # of the first tokens
    near, far = apart - square + 1, apart + square - 1
    alike = (low[:, :, None] <= high[:, None, :]) & (low[:, None, :] <= high[:, :, None])
    shared = (least[:, :, None] <= most[:, None, :]) & (least[:, None, :] <= most[:, :, None])
    shared |= ((least <= 0) & (most >= 0))[:, None, :]
    some = alike & shared & (apart >= 0) & (near < (window or length))
    whole_rows = (low == high)[:, :, None] & (low == high)[:, None, :] & (low[:, :, None] == low[:, None, :])
    one = least == most
    agree = one[:, None, :] & ((one[:, :, None] & (least[:, :, None] == least[:, None, :])) | (least == 0)[:, None, :])
    within = (begin + square <= length)[:, None] & (apart > 0) & (far < (window or length + square))
    return some, some & whole_rows & agree & within


def _ranges(values: Tensor, square: int) -> tuple[Tensor, Tensor]:
    """``[batch, squares]``: the least and the greatest value in each; the last may have fewer."""
    missing = -values.shape[1] % square
    ends = values[:, -1:].expand(-1, missing)
    squares = torch.cat([values, ends], 1).unflatten(1, (-1, square))
    return squares.amin(-1), squares.amax(-1)


def _in_order(squares: Tensor) -> tuple[Tensor, Tensor]:
    """How many each row of squares has, and which, those first."""
    order = squares.int().argsort(dim=-1, descending=True, stable=True)
    return squares.sum(-1, dtype=torch.int32), order.to(torch.int32)
