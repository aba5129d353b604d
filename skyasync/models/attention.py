"""Rows of different lengths end to end: linear layers see no padding, and attention sees each row alone.

Invariant: a token attends to what it would attend to in a row of its own. Rows of similar length are one block, a
rectangle in which attention pads them; what stands in the padding is read by nobody, and gets and gives no gradient.

    tokens     a a a a a a a b b b b b b c c d d d        linear layers, norms, the head
    attention  a a a a a a a │ c c .                      two rectangles, one call each
               b b b b b b . │ d d d

On a GPU the rectangles are not needed: one FlexAttention kernel takes rows end to end, shared prefixes and sliding
windows, without a dense mask. Which squares of its mask are computed is found from what is in them; a square too many
costs time and changes nothing. A CPU cannot use it: FlexAttention has no backward pass there.

Blocks reach a model's attention as a keyword, which all families of transformers hand on to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

if TYPE_CHECKING:
    from skyasync.models.parallel.context import Context

NAME = "skyasync_blocks"
"""Of the attention, in transformers' table. Without blocks it is the library's sdpa."""

SIMILAR = 16
"""A row joins a block if its padding is at most this part of the block's width."""

SHORT = 16
"""Or this many tokens: a call costs more than that little attention."""


@dataclass(frozen=True)
class PackedBlock:
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

    def to(self, device: torch.device) -> PackedBlock:
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


def blocks_of(widths: Tensor, together: Sequence[bool], owners: Tensor | None) -> tuple[PackedBlock, ...]:
    """Rows that come widest first as blocks.

    Args:
        widths: tokens of each row, int64 ``[rows]``.
        together: whether a row is several sequences with a prefix in common.
        owners: ``[rows, width]``, as in ``Layout``.
    """
    found: list[PackedBlock] = []
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
        found.append(PackedBlock(tokens, rows, width, cells, filling, shared))
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


@dataclass(eq=False)
class AttentionPlan:
    """How one forward pass attends; it reaches every layer's attention as the keyword ``attention_plan``.

    Args:
        blocks: of rows end to end.
        masks: the dense mask of each block; None: it is causal.
        spec: which tokens each token sees, for FlexAttention.
        flexible: FlexAttention computes windows as well.
        context: this rank's place on the context axis.
    """

    blocks: tuple[PackedBlock, ...] = ()
    masks: tuple[Tensor | None, ...] = ()
    spec: MaskSpec | None = None
    flexible: bool = False
    context: Context | None = None


def attention_inputs(
    owners: Tensor | None,
    blocks: tuple[PackedBlock, ...],
    device: torch.device,
    *,
    flexible: bool = False,
    context: Context | None = None,
) -> dict[str, Any]:
    """Arguments of a model besides tokens and positions: ``attention_mask``, and ``attention_plan`` if necessary.

    A dense mask, bool ``[packed rows, 1, width, width]``, is made only if nothing else can say which tokens each token
    sees. Its size is the width's square, so it is made here, where it is used and on that device, and kept nowhere.

    Args:
        owners: as in ``Layout``.
        blocks: of rows end to end, which have the owners then.
        flexible: FlexAttention attends.
    """
    plan = AttentionPlan(flexible=flexible, context=context)
    if blocks and flexible:
        plan.spec = _spec_of(blocks, device)
    elif blocks:
        plan.blocks = blocks
        plan.masks = tuple(None if block.owners is None else owners_mask(block.owners) for block in blocks)
    elif owners is None:
        return {"attention_mask": None, **({"attention_plan": plan} if context else {})}
    elif flexible and context:
        plan.spec = MaskSpec(torch.zeros_like(owners), owners)
    else:
        return {"attention_mask": owners_mask(owners), **({"attention_plan": plan} if context else {})}
    # Four-dimensional, so that models pass it on as it is; empty and of integers, so that no other attention takes it.
    stand_in = torch.empty(1, 1, 0, 0, dtype=torch.int64, device=device)
    return {"attention_mask": stand_in, "attention_plan": plan}


def _spec_of(blocks: tuple[PackedBlock, ...], device: torch.device) -> MaskSpec:
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
    return MaskSpec(torch.cat(rows)[None], torch.cat(owners)[None])


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
    attention_plan: AttentionPlan | None = None,
    **options: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Queries, keys, values ``[1, heads, tokens, size]``; the result is ``[1, tokens, heads, size]``."""
    if attention_plan is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if attention_plan.spec is not None:
        return flex_attention_forward(module, query, key, value, attention_plan.spec.mask(), **options)[0], None
    blocks = attention_plan.blocks
    pieces = [_SplitIntoBlocks.apply(tensor.transpose(1, 2)[0], blocks) for tensor in (query, key, value)]
    found = [
        sdpa_attention_forward(module, q, k, v, mask, **options)[0]
        for mask, q, k, v in zip(attention_plan.masks, *pieces, strict=True)
    ]
    return _JoinBlocks.apply(blocks, *found)[None], None


class _BlockContext(FunctionCtx):
    blocks: tuple[PackedBlock, ...]


class _SplitIntoBlocks(torch.autograd.Function):
    """``[tokens, heads, size]`` to ``[rows, heads, width, size]`` of each block.

    Autograd's own way back would write gradients twice: out of each block, and then end to end.
    """

    @staticmethod
    def forward(ctx: _BlockContext, values: Tensor, blocks: tuple[PackedBlock, ...]) -> tuple[Tensor, ...]:
        ctx.blocks = blocks
        pieces = values.split([block.tokens for block in blocks])
        return tuple(block.pad(piece).transpose(1, 2) for block, piece in zip(blocks, pieces, strict=True))

    @staticmethod
    def backward(ctx: _BlockContext, *gradients: Tensor) -> tuple[Tensor, None]:
        return _end_to_end(ctx.blocks, [gradient.transpose(1, 2) for gradient in gradients]), None


class _JoinBlocks(torch.autograd.Function):
    """The other way, from ``[rows, width, heads, size]``."""

    @staticmethod
    def forward(ctx: _BlockContext, blocks: tuple[PackedBlock, ...], *values: Tensor) -> Tensor:
        ctx.blocks = blocks
        return _end_to_end(blocks, values)

    @staticmethod
    def backward(ctx: _BlockContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        pieces = gradient.split([block.tokens for block in ctx.blocks])
        return None, *(block.spread(piece) for block, piece in zip(ctx.blocks, pieces, strict=True))


def _end_to_end(blocks: Sequence[PackedBlock], values: Sequence[Tensor]) -> Tensor:
    whole = values[0].new_empty(sum(block.tokens for block in blocks), *values[0].shape[2:])
    pieces = whole.split([block.tokens for block in blocks])
    for block, value, piece in zip(blocks, values, pieces, strict=True):
        block.unpad(value, piece)
    return whole


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


SQUARE = 128
"""Tokens on a side of what the kernel takes or leaves as a whole."""


class MaskSpec:
    """Which tokens each token sees.

    Args:
        rows: int32 ``[batch, length]``: the row that a token stands in, in order.
        owners: int32 ``[batch, length]``, as in ``Layout``; None: each row is one sequence.
    """

    def __init__(self, rows: Tensor, owners: Tensor | None = None) -> None:
        self.rows, self.owners = rows, torch.ones_like(rows) if owners is None else owners
        self._masks: dict[int, BlockMask] = {}

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


def _mask(
    rows: Tensor, owners: Tensor, window: int, sees: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
) -> BlockMask:
    length = rows.shape[1]
    some, every = (squares[:, None] for squares in block_coverage(rows, owners, window))
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


def block_coverage(rows: Tensor, owners: Tensor, window: int = 0, square: int = SQUARE) -> tuple[Tensor, Tensor]:
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
