"""Packed sequences: linear layers see each token once and no padding, and attention is computed per
row.

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

from skyasync.models.packed_blocks import NO_END, PackedBlock

if TYPE_CHECKING:
    from skyasync.models.parallel.context import Context

NAME = "skyasync_blocks"
"""Of the attention, in transformers' table. Without blocks it is the library's sdpa."""


def tree_mask(visible_until: Tensor) -> Tensor:
    """Bool ``[rows, 1, width, width]``: which tokens each token sees; padding sees padding only."""
    index = torch.arange(visible_until.shape[1], device=visible_until.device)
    return (index[:, None] < visible_until[:, None, :]).tril_()[:, None]


@dataclass(eq=False)
class AttentionPlan:
    """How one forward pass attends; it reaches every layer's attention as the keyword
    ``attention_plan``.

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
        """Queries, keys and values as they are computed with."""
        if self.in_float32:
            exact = torch.promote_types(states[0].dtype, torch.float32)
        else:
            exact = states[0].dtype
        return [tensor.to(exact) for tensor in states]


def attention_inputs(
    visible_until: Tensor | None,
    blocks: tuple[PackedBlock, ...],
    device: torch.device,
    *,
    flexible: bool = False,
    in_float32: bool = False,
    context: Context | None = None,
) -> dict[str, Any]:
    """Arguments of a model besides tokens and positions: ``attention_mask``, and ``attention_plan``
    if necessary.

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
        if visible_until is None:
            mask = None
        else:
            mask = tree_mask(visible_until)
        return {
            "attention_mask": mask,
            **({"attention_plan": plan} if context or in_float32 else {}),
        }
    # Four-dimensional, so that models pass it on as it is; empty and of integers, so that no other
    # attention takes it.
    stand_in = torch.empty(1, 1, 0, 0, dtype=torch.int64, device=device)
    return {"attention_mask": stand_in, "attention_plan": plan}


_WITHOUT_PLAN = ("nemotron", "doge")
"""Families whose layers do not pass the plan on to the attention, or make a mask of their own from
the stand-in."""


def pack_rows(model: PreTrainedModel) -> bool:
    """Give a model, or its language model, the attention that takes blocks, if it can have it;
    whether it has."""
    model = model.get_decoder() if model.config.sub_configs else model
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
    **options: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Queries, keys, values ``[1, heads, tokens, size]``; the result is
    ``[1, tokens, heads, size]``."""
    if attention_plan is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if attention_plan.spec is not None:
        return flex_attention_forward(
            module, query, key, value, attention_plan.spec.mask(), **options
        )[0], None
    dtype = query.dtype
    blocks = attention_plan.blocks
    query, key, value = attention_plan.exact(query, key, value)
    if not blocks:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)[0].to(
            dtype
        ), None
    queries = [block.queries for block in blocks]
    keys = [block.queries if block.keys is None else block.keys for block in blocks]
    split = [
        _SplitIntoBlocks.apply(tensor.transpose(1, 2)[0], rectangles)
        for tensor, rectangles in ((query, queries), (key, keys), (value, keys))
    ]
    results = [
        sdpa_attention_forward(module, q, k, v, mask, **options)[0]
        for mask, q, k, v in zip(attention_plan.masks, *split, strict=True)
    ]
    return _JoinBlocks.apply(blocks, *results)[None].to(dtype), None


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
        ctx: _SplitContext, values: Tensor, rectangles: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        ctx.rectangles = rectangles
        ctx.tokens = len(values)
        return tuple(
            values.index_select(0, indices.flatten()).unflatten(0, indices.shape).transpose(1, 2)
            for indices in rectangles
        )

    @staticmethod
    def backward(ctx: _SplitContext, *gradients: Tensor) -> tuple[Tensor, None]:
        """A token's gradients are summed over the rows that have it, in float32 at least."""
        first = gradients[0]
        exact = torch.promote_types(first.dtype, torch.float32)
        whole = first.new_zeros(ctx.tokens, first.shape[1], first.shape[3], dtype=exact)
        for indices, gradient in zip(ctx.rectangles, gradients, strict=True):
            whole.index_add_(0, indices.flatten(), gradient.transpose(1, 2).flatten(0, 1).to(exact))
        return whole.to(first.dtype), None


class _JoinContext(FunctionCtx):
    blocks: tuple[PackedBlock, ...]


class _JoinBlocks(torch.autograd.Function):
    """The rows' own tokens, from ``[rows, width, heads, size]`` of each block to
    ``[tokens, heads, size]``."""

    @staticmethod
    def forward(ctx: _JoinContext, blocks: tuple[PackedBlock, ...], *values: Tensor) -> Tensor:
        ctx.blocks = blocks
        whole = values[0].new_empty(
            sum(len(block.tokens) for block in blocks), *values[0].shape[2:]
        )
        for block, value in zip(blocks, values, strict=True):
            flat = value.flatten(0, 1)
            whole.index_copy_(
                0, block.tokens, flat if block.cells is None else flat.index_select(0, block.cells)
            )
        return whole

    @staticmethod
    def backward(ctx: _JoinContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor] = []
        for block in ctx.blocks:
            flat = gradient.index_select(0, block.tokens)
            if block.cells is not None:
                zeros = flat.new_zeros(block.queries.numel(), *flat.shape[1:])
                flat = zeros.index_copy_(0, block.cells, flat)
            gradients.append(flat.unflatten(0, block.queries.shape))
        return None, *gradients


# Plans differ in their blocks: compiled layers call it as it is.
AttentionInterface.register(NAME, torch.compiler.disable(_attention))
AttentionMaskInterface.register(NAME, sdpa_mask)


SQUARE = 128
"""Tokens on a side of the squares that the kernel computes or skips as a whole."""


SMALLEST_HEAD = 16
"""That FlexAttention's kernel takes; with smaller heads a GPU attends in rectangles, as a CPU
does."""


RECOMPILATIONS = 64
"""FlexAttention is compiled per kind of shape: one row or several, short or long, with a window or
without."""


def allow_recompilations() -> None:
    """For this process. Beyond torch's limit of 8, FlexAttention would make the whole matrix of
    scores: an error is better."""
    torch._dynamo.config.recompile_limit = RECOMPILATIONS
    torch._dynamo.config.fail_on_recompile_limit_hit = True


class MaskSpec:
    """Which tokens each token sees, by their ``visible_until``, int32 ``[batch, length]``, as in
    ``Layout``."""

    def __init__(self, visible_until: Tensor) -> None:
        self.visible_until = visible_until
        self._masks: dict[int, BlockMask] = {}

    def mask(self, window: int = 0) -> BlockMask:
        """Over the last ``window`` tokens (0: over all); made once, for all layers."""
        if window not in self._masks:
            self._masks[window] = _mask(self.visible_until, window)
        return self._masks[window]


@lru_cache(maxsize=8)
def window_mask(length: int, window: int, device: torch.device) -> BlockMask:
    """Causal, over the last ``window`` tokens, of rows that are one sequence each."""
    visible_until = torch.full((1, length), NO_END, dtype=torch.int32, device=device)
    return _mask(visible_until, window, lambda b, h, q, k: (k <= q) & (q - k < window))


def _mask(
    visible_until: Tensor,
    window: int,
    sees: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
) -> BlockMask:
    length = visible_until.shape[1]
    last = window or length

    def sees_own(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q - k < last) & (q < visible_until[b, k])

    some, every = (squares[:, None] for squares in block_coverage(visible_until, window))
    # How many each row of squares has, and which, those first.
    partial, full = (
        (
            squares.sum(-1, dtype=torch.int32),
            squares.int().argsort(dim=-1, descending=True, stable=True).int(),
        )
        for squares in (some & ~every, every)
    )
    mask_mod = sees or sees_own
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=SQUARE, mask_mod=mask_mod, seq_lengths=(length, length)
    )


def block_coverage(
    visible_until: Tensor, window: int = 0, square: int = SQUARE
) -> tuple[Tensor, Tensor]:
    """Bool ``[batch, squares, squares]``: squares in which a token may see another, and those in
    which all see all.

    By the least and the greatest end among a square's tokens.
    """
    length = visible_until.shape[1]
    padded = torch.cat(
        [visible_until, visible_until[:, -1:].expand(-1, -length % square)], 1
    ).unflatten(1, (-1, square))
    least = padded.amin(-1)[:, None, :]
    most = padded.amax(-1)[:, None, :]
    start = torch.arange(padded.shape[1], device=visible_until.device) * square
    distance = start[:, None] - start[None, :]  # of the first tokens
    nearest = distance - square + 1
    farthest = distance + square - 1
    some = (most > start[:, None]) & (distance >= 0) & (nearest < (window or length))
    within = (
        (start + square <= length)[:, None]
        & (distance > 0)
        & (farthest < (window or length + square))
    )
    return some, some & (least >= start[:, None] + square) & within
