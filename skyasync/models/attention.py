"""Packed sequences: linear layers see no padding, and attention is computed per row.

Invariant: a token attends to what it would attend to in a row of its own. Rows of similar length are one block, a
rectangle in which attention pads them. Padding is never read, and neither gets nor gives a gradient.

    tokens     a a a a a a a b b b b b b c c d d d        linear layers, norms, the head
    attention  a a a a a a a │ c c .                      two rectangles, one call each
               b b b b b b . │ d d d

On a GPU one FlexAttention kernel takes packed sequences, shared prefixes and sliding windows, without rectangles and
dense masks. Which squares of its mask are computed follows from their contents; a square too many costs time and
changes nothing. On a CPU FlexAttention has no backward pass.

Blocks reach a model's attention as a keyword, which all model families of transformers pass on to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
"""A row joins a block if its padding is at most one part in this many of the block's width."""

SHORT = 16
"""Or this many tokens: a call costs more than so little attention."""


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

    def pad(self, values: Tensor) -> Tensor:
        """Its own ``[tokens, ...]`` to ``[rows, width, ...]``, with copies of each row's last token as padding."""
        flat = values if self.filling is None else values.index_select(0, self.filling)
        return flat.view(self.rows, self.width, *flat.shape[1:])

    def pad_zeros(self, values: Tensor) -> Tensor:
        """As ``pad``, with zeros in the padding."""
        if self.cells is not None:
            zeros = values.new_zeros(self.rows * self.width, *values.shape[1:])
            values = zeros.index_copy_(0, self.cells, values)
        return values.view(self.rows, self.width, *values.shape[1:])


def blocks_of(widths: Tensor, shared: Sequence[bool], owners: Tensor | None) -> tuple[PackedBlock, ...]:
    """Rows that come widest first as blocks.

    Args:
        widths: tokens of each row, int64 ``[rows]``.
        shared: whether a row is several sequences with a shared prefix.
        owners: ``[rows, width]``, as in ``Layout``.
    """
    blocks: list[PackedBlock] = []
    sizes, first = widths.tolist(), 0
    for last in range(1, len(sizes) + 1):
        if last < len(sizes) and sizes[first] - sizes[last] <= max(sizes[first] // SIMILAR, SHORT):
            continue
        own = widths[first:last]
        rows, width, tokens = last - first, sizes[first], int(own.sum())
        cells = filling = None
        if tokens < rows * width:
            index = torch.arange(width)
            cells = (index < own[:, None]).flatten().nonzero().squeeze(1)
            starts = own.cumsum(0) - own
            filling = (starts[:, None] + torch.minimum(index, own[:, None] - 1)).flatten()
        of_tokens = owners[first:last, :width].clone() if owners is not None and any(shared[first:last]) else None
        blocks.append(PackedBlock(tokens, rows, width, cells, filling, of_tokens))
        first = last
    return tuple(blocks)


def owners_mask(owners: Tensor) -> Tensor:
    """Bool ``[rows, 1, width, width]``: which tokens each token sees; padding sees padding only."""
    allowed = owners[:, :, None] == owners[:, None, :]
    allowed |= (owners == 0)[:, None, :]
    return allowed.tril_()[:, None]


@dataclass(eq=False)
class AttentionPlan:
    """How one forward pass attends; it reaches every layer's attention as the keyword ``attention_plan``.

    Args:
        blocks: of packed sequences.
        masks: the dense mask of each block; None: it is causal.
        spec: which tokens each token sees, for FlexAttention.
        flexible: FlexAttention computes windows as well.
        context: this rank's coordinate in the context dimension.
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

    A dense mask, bool ``[packed rows, 1, width, width]``, is made only if neither causality nor FlexAttention says
    which tokens each token sees. Its size is the width's square, so it is made here, on the device that uses it.

    Args:
        owners: as in ``Layout``.
        blocks: of packed sequences, which have the owners then.
        flexible: FlexAttention attends.
    """
    plan = AttentionPlan(flexible=flexible, context=context)
    if blocks and flexible:
        rows: list[Tensor] = []
        row_owners: list[Tensor] = []
        first = 0
        for block in blocks:
            numbers = torch.arange(first, first + block.rows, dtype=torch.int32, device=device)
            row = numbers[:, None].expand(-1, block.width).reshape(-1)
            owner = torch.ones_like(row) if block.owners is None else block.owners.reshape(-1)
            rows.append(row if block.cells is None else row[block.cells])
            row_owners.append(owner if block.cells is None else owner[block.cells])
            first += block.rows
        plan.spec = MaskSpec(torch.cat(rows)[None], torch.cat(row_owners)[None])
    elif blocks:
        plan.blocks = blocks
        plan.masks = tuple(None if block.owners is None else owners_mask(block.owners) for block in blocks)
    elif owners is None:
        return {"attention_mask": None, **({"attention_plan": plan} if context else {})}
    elif flexible:
        plan.spec = MaskSpec(torch.zeros_like(owners), owners)
    else:
        return {"attention_mask": owners_mask(owners), **({"attention_plan": plan} if context else {})}
    # Four-dimensional, so that models pass it on as it is; empty and of integers, so that no other attention takes it.
    stand_in = torch.empty(1, 1, 0, 0, dtype=torch.int64, device=device)
    return {"attention_mask": stand_in, "attention_plan": plan}


def pack_rows(model: PreTrainedModel) -> bool:
    """Give a model, or its language model, the attention that takes blocks, if it can have it; whether it has."""
    model = model.get_decoder() if model.config.sub_configs else model
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
    split = [_SplitIntoBlocks.apply(tensor.transpose(1, 2)[0], blocks) for tensor in (query, key, value)]
    results = [
        sdpa_attention_forward(module, q, k, v, mask, **options)[0]
        for mask, q, k, v in zip(attention_plan.masks, *split, strict=True)
    ]
    return _JoinBlocks.apply(blocks, *results)[None], None


class _BlockContext(FunctionCtx):
    blocks: tuple[PackedBlock, ...]


class _SplitIntoBlocks(torch.autograd.Function):
    """``[tokens, heads, size]`` to ``[rows, heads, width, size]`` of each block.

    Autograd's own backward pass would write gradients twice: out of each block, and then into one tensor.
    """

    @staticmethod
    def forward(ctx: _BlockContext, values: Tensor, blocks: tuple[PackedBlock, ...]) -> tuple[Tensor, ...]:
        ctx.blocks = blocks
        chunks = values.split([block.tokens for block in blocks])
        return tuple(block.pad(chunk).transpose(1, 2) for block, chunk in zip(blocks, chunks, strict=True))

    @staticmethod
    def backward(ctx: _BlockContext, *gradients: Tensor) -> tuple[Tensor, None]:
        return _unpadded(ctx.blocks, [gradient.transpose(1, 2) for gradient in gradients]), None


class _JoinBlocks(torch.autograd.Function):
    """The inverse, from ``[rows, width, heads, size]``."""

    @staticmethod
    def forward(ctx: _BlockContext, blocks: tuple[PackedBlock, ...], *values: Tensor) -> Tensor:
        ctx.blocks = blocks
        return _unpadded(blocks, values)

    @staticmethod
    def backward(ctx: _BlockContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        chunks = gradient.split([block.tokens for block in ctx.blocks])
        return None, *(block.pad_zeros(chunk) for block, chunk in zip(ctx.blocks, chunks, strict=True))


def _unpadded(blocks: Sequence[PackedBlock], values: Sequence[Tensor]) -> Tensor:
    """``[rows, width, ...]`` of each block to ``[tokens, ...]`` of all."""
    whole = values[0].new_empty(sum(block.tokens for block in blocks), *values[0].shape[2:])
    chunks = whole.split([block.tokens for block in blocks])
    for block, value, chunk in zip(blocks, values, chunks, strict=True):
        flat = value.reshape(block.rows * block.width, *value.shape[2:])
        if block.cells is None:
            chunk.copy_(flat)
        else:
            torch.index_select(flat, 0, block.cells, out=chunk)
    return whole


# Plans differ in their blocks: compiled layers call it as it is.
AttentionInterface.register(NAME, torch.compiler.disable(_attention))
AttentionMaskInterface.register(NAME, sdpa_mask)


SQUARE = 128
"""Tokens on a side of the squares that the kernel computes or skips as a whole."""


RECOMPILATIONS = 64
"""FlexAttention is compiled per kind of shape: one row or several, short or long, with a window or without."""


def allow_recompilations() -> None:
    """For this process. Beyond torch's limit of 8, FlexAttention would make the whole matrix of scores: an error is
    better."""
    torch._dynamo.config.recompile_limit = RECOMPILATIONS
    torch._dynamo.config.fail_on_recompile_limit_hit = True


class MaskSpec:
    """Which tokens each token sees.

    Args:
        rows: int32 ``[batch, length]``: the row of each token, in order.
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
    last = window or length

    def sees_own(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = (owners[b, q] == owners[b, k]) | (owners[b, k] == 0)
        return (k <= q) & (q - k < last) & (rows[b, q] == rows[b, k]) & own

    some, every = (squares[:, None] for squares in block_coverage(rows, owners, window))
    # How many each row of squares has, and which, those first.
    partial, full = (
        (squares.sum(-1, dtype=torch.int32), squares.int().argsort(dim=-1, descending=True, stable=True).int())
        for squares in (some & ~every, every)
    )
    mask_mod = sees or sees_own
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=SQUARE, mask_mod=mask_mod, seq_lengths=(length, length))


def block_coverage(rows: Tensor, owners: Tensor, window: int = 0, square: int = SQUARE) -> tuple[Tensor, Tensor]:
    """Bool ``[batch, squares, squares]``: squares in which a token may see another, and those in which all see all.

    By the least and the greatest row and owner among a square's tokens: if these ranges are disjoint, no two are equal.
    """
    length = rows.shape[1]
    padded = [
        torch.cat([v, v[:, -1:].expand(-1, -length % square)], 1).unflatten(1, (-1, square)) for v in (rows, owners)
    ]
    (low, high), (least, most) = ((values.amin(-1), values.amax(-1)) for values in padded)
    start = torch.arange(low.shape[1], device=rows.device) * square
    distance = start[:, None] - start[None, :]  # of the first tokens
    nearest, farthest = distance - square + 1, distance + square - 1
    rows_meet = (low[:, :, None] <= high[:, None, :]) & (low[:, None, :] <= high[:, :, None])
    owners_meet = (least[:, :, None] <= most[:, None, :]) & (least[:, None, :] <= most[:, :, None])
    owners_meet |= ((least <= 0) & (most >= 0))[:, None, :]
    some = rows_meet & owners_meet & (distance >= 0) & (nearest < (window or length))
    one_row = (low == high)[:, :, None] & (low == high)[:, None, :] & (low[:, :, None] == low[:, None, :])
    one = least == most
    agree = one[:, None, :] & ((one[:, :, None] & (least[:, :, None] == least[:, None, :])) | (least == 0)[:, None, :])
    within = (start + square <= length)[:, None] & (distance > 0) & (farthest < (window or length + square))
    return some, some & one_row & agree & within
