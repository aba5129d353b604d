"""Packed sequences: linear layers see each token once, and attention is computed per row.

Invariant: a token attends to what it would attend to in a row of its own. The tokens that a row
adds to those before it are its queries, and all of its tokens are its keys. Rows of similar length
are one block, a rectangle in which attention pads them. Padding neither gets nor gives a gradient.

    tokens     a a a a a a a b b b b b b c c d d d        linear layers, norms, the head
    attention  a a a a a a a │ c c . │ a a a e e          rectangles, one call each; e e continue a a a,
               b b b b b b . │ d d d │                     which are keys for them and no queries

On a GPU one FlexAttention kernel takes packed sequences, prefix trees and sliding windows, without
rectangles and dense masks. Which squares of its mask are computed follows from their contents; a
square too many costs time and changes nothing. On a CPU FlexAttention has no backward pass.

Blocks reach a model's attention as a keyword, which all model families of transformers pass on to
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from skyasync.models.packed_blocks import NO_END, PackedBlock

if TYPE_CHECKING:
    from skyasync.models.parallel.context import Context

NAME = "skyasync_blocks"
"""Name of the attention in transformers' table. Without blocks it is the library's sdpa."""


def tree_mask(visible_until: Tensor) -> Tensor:
    """Bool ``[rows, 1, width, width]``: which tokens each token sees; padding sees padding only."""
    query = torch.arange(visible_until.shape[1], device=visible_until.device)[:, None]
    visible = query < visible_until[:, None, :]  # [rows, width, width]: queries by keys
    # In place: the mask is the largest tensor here.
    return visible.tril_()[:, None]


@dataclass(eq=False)
class AttentionPlan:
    """How one forward pass attends.

    It reaches every layer's attention as the keyword ``attention_plan``.

    Args:
        blocks: of packed sequences.
        masks: the mask of each block; None: it is causal.
        spec: which tokens each token sees, for FlexAttention.
        flexible: FlexAttention computes windows as well.
        in_float32: queries, keys and values are cast to float32, and the result is cast back.
        context: this rank's coordinate in the context dimension.
    """

    blocks: tuple[PackedBlock, ...] = ()
    masks: tuple[Tensor | None, ...] = ()
    spec: MaskSpec | None = None
    flexible: bool = False
    in_float32: bool = False
    context: Context | None = None

    def exact(self, *states: Tensor) -> list[Tensor]:
        """Queries, keys and values in the dtype that attention computes in."""
        dtype = states[0].dtype
        if self.in_float32:
            dtype = torch.promote_types(dtype, torch.float32)  # float64 stays
        return [tensor.to(dtype) for tensor in states]


def attention_inputs(
    visible_until: Tensor | None,
    blocks: tuple[PackedBlock, ...],
    device: torch.device,
    *,
    flexible: bool = False,
    in_float32: bool = False,
    context: Context | None = None,
) -> dict[str, Any]:
    """Arguments of a model besides tokens and positions.

    They are ``attention_mask``, and ``attention_plan`` if necessary.

    A dense mask, bool ``[packed rows, 1, width, width]``, is made only if neither causality nor
    FlexAttention says which tokens each token sees. Its size is the width's square, so it is made
    here, on the device that uses it.

    Args:
        visible_until: as in ``Layout``.
        blocks: of packed sequences.
        flexible: FlexAttention attends.
        in_float32: as in ``AttentionPlan``, for models whose attention takes a plan.
    """
    plan = AttentionPlan(flexible=flexible, in_float32=in_float32, context=context)
    if visible_until is not None and flexible:
        plan.spec = MaskSpec(visible_until)
    elif blocks:
        plan.blocks = blocks
        plan.masks = tuple(block.mask() for block in blocks)
    else:
        inputs: dict[str, Any] = {"attention_mask": None}
        if visible_until is not None:
            inputs["attention_mask"] = tree_mask(visible_until)
        if context or in_float32:
            inputs["attention_plan"] = plan
        return inputs
    # Four-dimensional, so that models pass it on as it is; empty and of integers, so that no other
    # attention takes it.
    stand_in = torch.empty(1, 1, 0, 0, dtype=torch.int64, device=device)
    return {"attention_mask": stand_in, "attention_plan": plan}


_WITHOUT_PLAN = ("nemotron", "doge")
"""Families whose layers drop the plan, or make a mask of their own from the stand-in."""


def pack_rows(model: PreTrainedModel) -> bool:
    """Give a model, or its language model, the attention that takes blocks.

    Returns:
        Whether the model has this attention; some families cannot.
    """
    if model.config.sub_configs:
        model = model.get_decoder()
    config = model.config
    takes_plan = model._supports_attention_backend and config.model_type not in _WITHOUT_PLAN
    if config._attn_implementation == "sdpa" and takes_plan and not config.sub_configs:
        model.set_attn_implementation(NAME)
    return bool(config._attn_implementation == NAME)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attention_plan: AttentionPlan | None = None,
    attend: Callable[..., tuple[Tensor, None]] = sdpa_attention_forward,
    **options: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Attend within the rows of a packed sequence.

    Queries, keys, values are ``[1, heads, tokens, size]``; the result is
    ``[1, tokens, heads, size]``.
    """
    if attention_plan is None:
        return attend(module, query, key, value, attention_mask, **options)
    if attention_plan.spec is not None:
        squares = attention_plan.spec.mask()
        output, _ = flex_attention_forward(module, query, key, value, squares, **options)
        return output, None
    dtype = query.dtype
    blocks = attention_plan.blocks
    query, key, value = attention_plan.exact(query, key, value)
    if not blocks:
        output, _ = attend(module, query, key, value, attention_mask, **options)
        return output.to(dtype), None
    query_indices = [block.queries for block in blocks]
    key_indices = [block.queries if block.keys is None else block.keys for block in blocks]
    # [rows, heads, width, size] per block; of keys and values [rows, heads, length, size].
    queries = _SplitIntoBlocks.apply(query.transpose(1, 2)[0], query_indices)
    keys = _SplitIntoBlocks.apply(key.transpose(1, 2)[0], key_indices)
    values = _SplitIntoBlocks.apply(value.transpose(1, 2)[0], key_indices)
    outputs = []  # [rows, width, heads, size] of each block
    for mask, q, k, v in zip(attention_plan.masks, queries, keys, values, strict=True):
        output, _ = attend(module, q, k, v, mask, **options)
        outputs.append(output)
    packed_output = _JoinBlocks.apply(blocks, *outputs)  # [tokens, heads, size]
    return packed_output[None].to(dtype), None


class _SplitContext(FunctionCtx):
    rectangles: Sequence[Tensor]
    tokens: int


class _SplitIntoBlocks(torch.autograd.Function):
    """``[tokens, heads, size]`` to ``[rows, heads, width, size]`` of each block.

    Autograd's own backward pass would write gradients twice: out of each block, and then into one
    tensor.
    """

    @staticmethod
    def forward(
        ctx: _SplitContext,
        values: Tensor,
        rectangles: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        ctx.rectangles = rectangles
        ctx.tokens = len(values)
        blocks = []
        for indices in rectangles:
            flat = values.index_select(0, indices.flatten())  # [rows * width, heads, size]
            block = flat.unflatten(0, indices.shape)  # [rows, width, heads, size]
            blocks.append(block.transpose(1, 2))
        return tuple(blocks)

    @staticmethod
    def backward(ctx: _SplitContext, *gradients: Tensor) -> tuple[Tensor, None]:
        """Sum a token's gradients over the rows that have it, in float32 at least."""
        _, heads, _, size = gradients[0].shape
        dtype = gradients[0].dtype
        exact = torch.promote_types(dtype, torch.float32)
        sums = gradients[0].new_zeros(ctx.tokens, heads, size, dtype=exact)
        for indices, gradient in zip(ctx.rectangles, gradients, strict=True):
            flat = gradient.transpose(1, 2).flatten(0, 1)  # [rows * width, heads, size]
            # Padding's keys get a gradient of 0: no query that counts sees them.
            sums.index_add_(0, indices.flatten(), flat.to(exact))
        return sums.to(dtype), None


class _JoinContext(FunctionCtx):
    blocks: tuple[PackedBlock, ...]


class _JoinBlocks(torch.autograd.Function):
    """``[rows, width, heads, size]`` of each block to the rows' own tokens.

    The result is ``[tokens, heads, size]``, without padding.
    """

    @staticmethod
    def forward(ctx: _JoinContext, blocks: tuple[PackedBlock, ...], *values: Tensor) -> Tensor:
        ctx.blocks = blocks
        tokens = sum(len(block.tokens) for block in blocks)
        # Empty, not zeros: each token is in exactly one block, so all of it is written.
        output = values[0].new_empty(tokens, *values[0].shape[2:])
        for block, value in zip(blocks, values, strict=True):
            flat = value.flatten(0, 1)  # [rows * width, heads, size]
            if block.cells is not None:
                flat = flat.index_select(0, block.cells)
            output.index_copy_(0, block.tokens, flat)
        return output

    @staticmethod
    def backward(ctx: _JoinContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = []
        for block in ctx.blocks:
            flat = gradient.index_select(0, block.tokens)  # [tokens of the block, heads, size]
            if block.cells is not None:
                # The gradient of padding is 0: nothing reads its result.
                zeros = flat.new_zeros(block.queries.numel(), *flat.shape[1:])
                flat = zeros.index_copy_(0, block.cells, flat)
            gradients.append(flat.unflatten(0, block.queries.shape))
        return None, *gradients


# Plans differ in their blocks: compiled layers call it as it is.
AttentionInterface.register(NAME, torch.compiler.disable(_attention))
AttentionMaskInterface.register(NAME, sdpa_mask)


WITHOUT_MEMORY = "skyasync_without_memory"
"""The same attention on meta tensors, which allocates what a fused kernel does. torch's own
attention would make the matrix of scores there."""


class _Shapes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: ANN401
        output = torch.empty_like(query.transpose(1, 2))
        normalizer = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, normalizer)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _attend_without_memory(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **options: object
) -> tuple[Tensor, None]:
    return _Shapes.apply(query, key, value), None


AttentionInterface.register(WITHOUT_MEMORY, partial(_attention, attend=_attend_without_memory))
AttentionMaskInterface.register(WITHOUT_MEMORY, sdpa_mask)


SQUARE = 128
"""Tokens on a side of the squares that the kernel computes or skips as a whole."""

SMALLEST_HEAD = 16
"""Smallest head that FlexAttention's kernel takes; a GPU attends to smaller ones in rectangles."""

RECOMPILATIONS = 64
"""Limit of compilations of FlexAttention: one per kind of shape and per layer window.

Shapes are one row or several, short or long, with a window or without.
"""


def allow_recompilations() -> None:
    """Raise torch's limit of recompilations for this process, and make hitting it an error.

    Beyond torch's limit of 8, FlexAttention would silently make the whole matrix of scores.
    """
    torch._dynamo.config.recompile_limit = RECOMPILATIONS
    torch._dynamo.config.fail_on_recompile_limit_hit = True


class MaskSpec:
    """Which tokens each token sees.

    Args:
        visible_until: int32 ``[batch, length]``, as in ``Layout``.
    """

    def __init__(self, visible_until: Tensor) -> None:
        self.visible_until = visible_until
        self._masks: dict[int, BlockMask] = {}

    def mask(self, window: int = 0) -> BlockMask:
        """The mask over the last ``window`` tokens (0: over all); made once, for all layers."""
        if window not in self._masks:
            self._masks[window] = _mask(self.visible_until, window)
        return self._masks[window]


@lru_cache(maxsize=8)
def window_mask(length: int, window: int, device: torch.device) -> BlockMask:
    """Causal mask over the last ``window`` tokens, for rows that are one sequence each."""
    visible_until = torch.full((1, length), NO_END, dtype=torch.int32, device=device)

    # Without ``visible_until``: it has one row, and the batch may have more.
    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q - k < window)

    return _mask(visible_until, window, sees)


def _mask(
    visible_until: Tensor,
    window: int,
    sees: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
) -> BlockMask:
    length = visible_until.shape[1]
    reach = window or length

    def sees_until(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q - k < reach) & (q < visible_until[b, k])

    visible, full = block_coverage(visible_until, window)
    partial = visible & ~full
    return BlockMask.from_kv_blocks(
        *_listed(partial[:, None]),
        *_listed(full[:, None]),
        BLOCK_SIZE=SQUARE,
        mask_mod=sees or sees_until,
        seq_lengths=(length, length),
    )


def _listed(squares: Tensor) -> tuple[Tensor, Tensor]:
    """How many squares each row of squares has, and their columns, as ``BlockMask`` takes them.

    Args:
        squares: bool ``[batch, 1, squares, squares]``.

    Returns:
        int32 ``[batch, 1, squares]``, and ``[batch, 1, squares, squares]`` with those first.
    """
    counts = squares.sum(-1, dtype=torch.int32)
    columns = squares.int().argsort(dim=-1, descending=True, stable=True)
    return counts, columns.int()


def block_coverage(
    visible_until: Tensor,
    window: int = 0,
    square: int = SQUARE,
) -> tuple[Tensor, Tensor]:
    """Squares in which a token may see another, and those in which all see all.

    By the least and the greatest limit of visibility among a square's tokens. Squares are bool
    ``[batch, squares, squares]``, queries by keys.
    """
    length = visible_until.shape[1]
    padding = visible_until[:, -1:].expand(-1, -length % square)  # repeats the last end
    limits = torch.cat([visible_until, padding], 1).unflatten(1, (-1, square))
    smallest_limit = limits.amin(-1)[:, None, :]  # [batch, 1, squares]: of the keys
    largest_limit = limits.amax(-1)[:, None, :]
    start = torch.arange(limits.shape[1], device=visible_until.device) * square
    query_start = start[:, None]  # [squares, 1]
    query_stop = query_start + square
    distance = query_start - start  # [squares, squares]: of the first tokens
    nearest = distance - square + 1
    farthest = distance + square - 1
    visible = (largest_limit > query_start) & (distance >= 0) & (nearest < (window or length))
    # The diagonal is never full, and a square that limits beyond the length has padding.
    in_range = (query_stop <= length) & (distance > 0)
    in_range &= farthest < (window or length + square)
    return visible, visible & (smallest_limit >= query_stop) & in_range
