"""Rows of different lengths end to end: linear layers see no padding, and attention sees each row alone.

Invariant: a token attends to what it would attend to in a row of its own. Rows of similar length are one block, a
rectangle in which attention pads them; what stands in the padding is read by nobody, and gets and gives no gradient.

    tokens     a a a a a a a b b b b b b c c d d d        linear layers, norms, the head
    attention  a a a a a a a │ c c .                      two rectangles, one call each
               b b b b b b . │ d d d

On a GPU the rectangles are not needed: FlexAttention takes the tokens as they stand (``skyasync.models.attention``).

Blocks travel to a model's attention in the place of its mask, on whose way nothing of a model looks inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "skyasync_blocks"
"""Of the attention, in transformers' table. Without blocks it is the library's sdpa."""

SIMILAR = 16
"""A row joins a block if its padding is at most this part of the block's width."""

SHORT = 16
"""Or this many tokens: a call costs more than that little attention."""


@dataclass(frozen=True)
class Block:
    """``rows`` x ``width``, of the next ``tokens``.

    Args:
        cells: int64 ``[tokens]``: where each stands in the flattened rectangle; None: it has no padding.
        filling: int64 ``[rows * width]``: the token in each cell, in padding the last of its row.
        owners: int32 ``[rows, width]``, as in ``Layout``; None: every row is one sequence.
    """

    tokens: int
    rows: int
    width: int
    cells: Tensor | None
    filling: Tensor | None
    owners: Tensor | None

    def to(self, device: torch.device) -> Block:
        moved: dict[str, Any] = {n: value.to(device) for n, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    def rectangle(self, flat: Tensor) -> Tensor:
        """``[rows * width, ...]`` as ``[rows, width, ...]``."""
        return flat.view(self.rows, self.width, *flat.shape[1:])

    def pad(self, values: Tensor) -> Tensor:
        """Its own ``[tokens, ...]`` to ``[rows, width, ...]``."""
        return self.rectangle(values if self.filling is None else values.index_select(0, self.filling))

    def spread(self, values: Tensor) -> Tensor:
        """As ``pad``, with zeros in the padding."""
        if self.cells is None:
            return self.rectangle(values)
        zeros = values.new_zeros(self.rows * self.width, *values.shape[1:])
        return self.rectangle(zeros.index_copy_(0, self.cells, values))

    def unpad(self, values: Tensor, into: Tensor) -> None:
        """``[rows, width, ...]`` to ``[tokens, ...]``."""
        flat = values.reshape(self.rows * self.width, *values.shape[2:])
        if self.cells is None:
            into.copy_(flat)
        else:
            torch.index_select(flat, 0, self.cells, out=into)


def blocks_of(widths: Tensor, together: Sequence[bool], owners: Tensor | None) -> tuple[Block, ...]:
    """Rows that come widest first as blocks.

    Args:
        widths: tokens of each row, int64 ``[rows]``.
        together: whether a row is several sequences with a prefix in common.
        owners: ``[rows, width]``, as in ``Layout``.
    """
    found: list[Block] = []
    for first, last in _similar(widths.tolist()):
        own = widths[first:last]
        rows, width, tokens = last - first, int(own[0]), int(own.sum())
        cells = filling = None
        if tokens < rows * width:
            columns = torch.arange(width)
            cells = (columns < own[:, None]).flatten().nonzero().squeeze(1)
            starts = own.cumsum(0) - own
            filling = (starts[:, None] + torch.minimum(columns, own[:, None] - 1)).flatten()
        shared = owners[first:last, :width].clone() if owners is not None and any(together[first:last]) else None
        found.append(Block(tokens, rows, width, cells, filling, shared))
    return tuple(found)


def _similar(widths: list[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for i in range(1, len(widths) + 1):
        if i == len(widths) or widths[start] - widths[i] > max(widths[start] // SIMILAR, SHORT):
            yield start, i
            start = i


def owners_mask(owners: Tensor) -> Tensor:
    """Bool ``[rows, 1, width, width]``: which tokens each token sees; padding sees padding only."""
    allowed = owners[:, :, None] == owners[:, None, :]
    allowed |= (owners == 0)[:, None, :]
    return allowed.tril_()[:, None]


class Places(Tensor):
    """In the place of a mask: ``blocks``, and the dense ``masks`` of those that need one; or a ``sight`` of tokens."""

    blocks: tuple[Block, ...]
    masks: list[Tensor | None]
    sight: Sight | None

    # What is made of it is no such thing.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def as_mask(blocks: tuple[Block, ...], device: torch.device, *, flexible: bool = False) -> Tensor:
    """What a model's attention gets of them; ``flexible``: it is FlexAttention."""
    if flexible:
        return places(_sight(blocks, device))
    found = _places(device)
    found.blocks = blocks
    found.masks = [None if block.owners is None else owners_mask(block.owners) for block in blocks]
    return found


def places(sight: Sight) -> Tensor:
    """What a model's attention gets of tokens as they stand."""
    found = _places(sight.rows.device)
    found.sight = sight
    return found


def _places(device: torch.device) -> Places:
    """Four-dimensional, so that models hand it on as it is; it has no entries, and of integers, so that no other
    attention takes it."""
    found = torch.empty(1, 1, 0, 0, dtype=torch.int64, device=device).as_subclass(Places)
    found.blocks, found.masks, found.sight = (), [], None
    return found


def _sight(blocks: tuple[Block, ...], device: torch.device) -> Sight:
    """Of rows end to end."""
    rows: list[Tensor] = []
    owners: list[Tensor] = []
    first = 0
    for block in blocks:
        own = torch.arange(first, first + block.rows, dtype=torch.int32, device=device)[:, None].expand(-1, block.width)
        of = torch.ones_like(own) if block.owners is None else block.owners
        for found, values in ((rows, own), (owners, of)):
            flat = values.reshape(-1)
            found.append(flat if block.cells is None else flat[block.cells])
        first += block.rows
    return Sight(torch.cat(rows)[None], torch.cat(owners)[None])


def pack_rows(model: PreTrainedModel) -> bool:
    """Have a model's attention understand blocks, if it is one that can; whether it does."""
    config = model.config
    if config._attn_implementation == "sdpa" and model._supports_attention_backend and not config.sub_configs:
        model.set_attn_implementation(NAME)
    return bool(config._attn_implementation == NAME)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Queries, keys, values ``[1, heads, tokens, size]``; the result is ``[1, tokens, heads, size]``."""
    if not isinstance(attention_mask, Places):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if attention_mask.sight is not None:
        return attend(module, query, key, value, attention_mask.sight.mask(), **options), None
    blocks = attention_mask.blocks
    pieces = [_Cut.apply(tensor.transpose(1, 2)[0], blocks) for tensor in (query, key, value)]
    found = [
        sdpa_attention_forward(module, q, k, v, mask, **options)[0]
        for mask, q, k, v in zip(attention_mask.masks, *pieces, strict=True)
    ]
    return _Joined.apply(blocks, *found)[None], None


class _Kept(FunctionCtx):
    blocks: tuple[Block, ...]


class _Cut(torch.autograd.Function):
    """``[tokens, heads, size]`` to ``[rows, heads, width, size]`` of each block.

    Autograd's own way back would write gradients twice: out of each block, and then end to end.
    """

    @staticmethod
    def forward(ctx: _Kept, values: Tensor, blocks: tuple[Block, ...]) -> tuple[Tensor, ...]:
        ctx.blocks = blocks
        pieces = values.split([block.tokens for block in blocks])
        return tuple(block.pad(piece).transpose(1, 2) for block, piece in zip(blocks, pieces, strict=True))

    @staticmethod
    def backward(ctx: _Kept, *gradients: Tensor) -> tuple[Tensor, None]:
        return _end_to_end(ctx.blocks, [gradient.transpose(1, 2) for gradient in gradients]), None


class _Joined(torch.autograd.Function):
    """The other way, from ``[rows, width, heads, size]``."""

    @staticmethod
    def forward(ctx: _Kept, blocks: tuple[Block, ...], *values: Tensor) -> Tensor:
        ctx.blocks = blocks
        return _end_to_end(blocks, values)

    @staticmethod
    def backward(ctx: _Kept, gradient: Tensor) -> tuple[Tensor | None, ...]:
        pieces = gradient.split([block.tokens for block in ctx.blocks])
        return None, *(block.spread(piece) for block, piece in zip(ctx.blocks, pieces, strict=True))


def _end_to_end(blocks: Sequence[Block], values: Sequence[Tensor]) -> Tensor:
    whole = values[0].new_empty(sum(block.tokens for block in blocks), *values[0].shape[2:])
    pieces = whole.split([block.tokens for block in blocks])
    for block, value, piece in zip(blocks, values, pieces, strict=True):
        block.unpad(value, piece)
    return whole


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


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
