"""Rows of a batch laid out for one forward pass: micro-batches, and prompts computed once for all their samples.

Invariant: packing changes only how much is computed, never what. A token attends to exactly the tokens
before it in its own sequence and has its own position; every loss token of the batch is in exactly one
micro-batch.

    four samples of one prompt as rows      the same, packed into one row
    p p p a a                               p p p a a b b b c d d . .
    p p p b b b                             each response attends to the prompt and to itself
    p p p c
    p p p d d

Packed rows that differ in length become one packed sequence if the model can take it (``skyasync.models.attention``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

import torch
from torch import Tensor

from skyasync.models import MAX_PADDING, MIN_SAVED_TOKENS
from skyasync.models.attention import PackedBlock, blocks_of
from skyasync.models.batch import B, TokenBatch
from skyasync.models.images import Images, ImageTokens


@dataclass
class Layout:
    """The model's inputs, and which result they belong to.

    ``tokens``, ``positions`` (int64) and ``owners`` (int32) are ``[packed rows, width]``. The latter two are None
    if every packed row is one sequence, right-padded: then the causal mask alone is exact, since padding comes
    last. An owner is 0 for a token of the shared prefix, -1 for padding, else the number of the token's own row.

    With ``blocks`` the packed rows are one packed sequence, ``[1, tokens]``, and the blocks have the owners.

    The n loss tokens: ``predictors`` (flat indices into ``tokens`` of the token before each), ``targets``
    (token ids), ``cells`` (flat indices into the ``shape`` = ``[rows, length]`` of the result).

    ``experts``: ``[packed rows, width, layers, top_k]`` if the batch has routed experts.

    ``images``: of each row, if any row has some. ``tokens`` have ids in their places (``skyasync.models.vision``).
    ``rope``: ``[packed rows, width, 3]``, positions of models that have them in time, height and width.
    """

    tokens: Tensor
    positions: Tensor | None
    owners: Tensor | None
    predictors: Tensor
    targets: Tensor
    cells: Tensor
    shape: tuple[int, int]
    blocks: tuple[PackedBlock, ...] = ()
    experts: Tensor | None = None
    images: tuple[Images, ...] | None = None
    rope: Tensor | None = None

    def to(self, device: torch.device) -> Layout:
        moved: dict[str, Any] = {n: value.to(device) for n, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved, blocks=tuple(block.to(device) for block in self.blocks))

    def to_rows(self, values: Tensor) -> Tensor:
        """Values of the loss tokens, ``[n, ...]``, as ``[rows, length, ...]`` with zeros between; differentiable."""
        rows, length = self.shape
        where = (self.cells // max(1, length), self.cells % max(1, length))
        return values.new_zeros(rows, length, *values.shape[1:]).index_put(where, values)


@dataclass
class MicroBatch(Generic[B]):
    """``rows`` (int64, into the batch that was packed), the batch of these rows, and its layout."""

    rows: Tensor
    batch: B
    layout: Layout


@dataclass
class _Bundles:
    """Which rows are computed together: per row its bundle and the length of the prefix it shares there."""

    bundle: Tensor
    prefix: Tensor
    widths: Tensor  # per bundle, in tokens
    counts: Tensor  # per bundle, in rows


class MicroBatches(Generic[B]):
    """A batch cut into micro-batches of similar widths. The cuts are made at once, which is cheap; each micro-batch is
    built when the iteration comes to it.

    Args:
        max_tokens: most tokens per micro-batch, padding included; only a single longer row exceeds it.
        max_rows: most sequences per micro-batch; 0 sets no such limit.
        share_prefixes: compute the common prefix of a group's rows once, if that saves enough.
        hidden_size: of the model: it decides the cost of attention relative to that of the linear layers.
        packs: the model takes packed sequences: rows of a micro-batch may differ in length, at no cost.
    """

    def __init__(
        self,
        batch: B,
        *,
        max_tokens: int,
        max_rows: int = 0,
        share_prefixes: bool,
        hidden_size: int,
        packs: bool = False,
    ) -> None:
        self._batch, self._max_tokens, self._packs = batch, max_tokens, packs
        lengths = batch.attention_mask.sum(1)
        each = torch.arange(len(lengths))
        bundles = _Bundles(each, torch.zeros_like(lengths), lengths, torch.ones_like(lengths))
        if share_prefixes and len(batch):
            shared = _by_group(batch, lengths, hidden_size, max_tokens, max_rows)
            if shared.widths.sum() <= (1 - MIN_SAVED_TOKENS) * lengths.sum():
                bundles = shared
        self._bundles = bundles
        self._order = torch.argsort(bundles.widths, descending=True, stable=True)
        # The widest bundles come first, so the first of a micro-batch is as wide as the micro-batch.
        widths, counts = bundles.widths[self._order].tolist(), bundles.counts[self._order].tolist()
        self._cuts: list[tuple[int, int]] = []
        start = 0
        while start < len(widths):
            end, rows, tokens = start + 1, counts[start], widths[start]
            while end < len(widths) and (not max_rows or rows + counts[end] <= max_rows):
                tokens += widths[end] if packs else widths[start]
                if tokens > max_tokens:
                    break
                rows += counts[end]
                end += 1
            self._cuts.append((start, end))
            start = end

    def __len__(self) -> int:
        return len(self._cuts)

    def __iter__(self) -> Iterator[MicroBatch[B]]:
        bundles = self._bundles
        by_bundle = torch.argsort(bundles.bundle, stable=True)
        starts = bundles.counts.cumsum(0) - bundles.counts
        for start, end in self._cuts:
            chosen = self._order[start:end]
            widths, counts = bundles.widths[chosen], bundles.counts[chosen]
            before = counts.cumsum(0) - counts
            rows = by_bundle[torch.arange(int(counts.sum())) + torch.repeat_interleave(starts[chosen] - before, counts)]
            selected = self._batch.select(rows).trim()
            bundle = torch.repeat_interleave(torch.arange(end - start), counts)
            layout = _layout(selected, bundle, bundles.prefix[rows])
            tokens = layout.tokens.numel()
            if self._packs and (tokens > self._max_tokens or widths.sum() < (1 - MAX_PADDING) * tokens):
                layout = _packed(layout, widths, counts)
            yield MicroBatch(rows, selected, layout)


def plain_layout(tokens: Tensor, attention_mask: Tensor, loss_mask: Tensor) -> Layout:
    """One sequence per row, as it is: ``[rows, length]`` each."""
    rows, length = tokens.shape
    loss_mask = loss_mask.bool() & attention_mask.bool()
    loss_mask[:, :1] = False
    cells = loss_mask.flatten().nonzero().squeeze(1)
    return Layout(tokens, None, None, cells - 1, tokens.flatten()[cells], cells, (rows, length))


def empty_micro_batch(like: B) -> MicroBatch[B]:
    """One row without a loss token: for the collectives alone, it adds nothing."""
    row = like.each(lambda t: torch.zeros((1, 2, *t.shape[2:]) if t.dim() >= 2 else (1,), dtype=t.dtype))
    row.attention_mask[:], row.images = True, None
    (micro,) = MicroBatches(row, max_tokens=2, share_prefixes=False, hidden_size=1)
    return replace(micro, rows=torch.zeros(0, dtype=torch.int64))


def put_rows(
    whole: dict[str, Tensor],
    names: Collection[str],
    micro: MicroBatch[Any],
    outputs: Mapping[str, Tensor],
    batch: TokenBatch,
) -> None:
    """Write a micro-batch's outputs into the rows of the batch's, float32 ``[batch, length, ...]`` on the CPU."""
    for name in names:
        own = outputs[name].detach()
        result = whole.setdefault(name, torch.zeros(*batch.tokens.shape, *own.shape[2:]))
        own = own[: len(micro.rows), : result.shape[1]].float().cpu()
        result[micro.rows, : own.shape[1]] = own


def sequences_as_batch(sequences: Sequence[Sequence[int]]) -> TokenBatch:
    """Every token but the first of each sequence is a loss token; no groups."""
    lengths = torch.tensor([len(s) for s in sequences])
    mask = torch.arange(int(lengths.max()) if len(lengths) else 0) < lengths[:, None]
    tokens = torch.zeros(mask.shape, dtype=torch.int64)
    tokens[mask] = torch.tensor([t for s in sequences for t in s], dtype=torch.int64)
    loss_mask = mask.clone()
    loss_mask[:, :1] = False
    images = tuple(map(ImageTokens.images_of, sequences))
    each = torch.arange(len(sequences))
    return TokenBatch(tokens, mask, loss_mask, group_ids=each, images=images if any(images) else None)


def _by_group(batch: TokenBatch, lengths: Tensor, hidden_size: int, max_tokens: int, max_rows: int) -> _Bundles:
    """Rows of a group together, as many as is cheapest.

    A layer of hidden size h costs about 24 h² operations per token and 4 h per attended pair. A prefix has P tokens,
    and c responses have R each. Then a response costs (P + cR) / c * 24 h² + (P + cR)² / c * 4 h. This is least
    if all responses together have cR = sqrt(P² + 6 h P) tokens.
    """
    group, group_sizes = torch.unique(batch.group_ids, return_inverse=True, return_counts=True)[1:]
    order = torch.argsort(group, stable=True)
    first_of_group = order[group_sizes.cumsum(0) - group_sizes]

    # The prefix that all rows of a group share; loss tokens are never shared.
    same = batch.tokens == batch.tokens[first_of_group[group]]
    same &= (torch.arange(batch.tokens.shape[1]) < lengths[:, None]) & ~batch.loss_mask.bool()
    if batch.routed_experts is not None:  # what is computed once has one choice of experts
        same &= (batch.routed_experts == batch.routed_experts[first_of_group[group]]).all(-1).all(-1)
    per_row = same.int().cumprod(1).sum(1)
    per_group = torch.full_like(first_of_group, batch.tokens.shape[1]).scatter_reduce(0, group, per_row, "amin")
    prefix = per_group[group]
    own = lengths - prefix

    # Position of a row within its group, in tokens and in rows.
    own_sorted, group_sorted = own[order], group[order]
    tokens_before = own_sorted.cumsum(0) - own_sorted
    group_start = (group_sizes.cumsum(0) - group_sizes)[group_sorted]
    tokens_before = tokens_before - tokens_before[group_start]
    rows_before = torch.arange(len(group)) - group_start

    exact, free = prefix[order].double(), max_tokens - prefix[order]
    cheapest = (exact * exact + 6 * hidden_size * exact).sqrt().long().clamp(min=1)
    chunk = torch.div(tokens_before, torch.minimum(cheapest, free.clamp(min=1)), rounding_mode="floor")
    keys = torch.stack([group_sorted, chunk, rows_before // max_rows if max_rows else torch.zeros_like(chunk)], 1)

    # Consecutive rows with equal keys are a bundle, as long as their own tokens fit.
    numbers: list[int] = []
    number, used, last = -1, 0, None
    for key, tokens, limit in zip(keys.tolist(), own_sorted.tolist(), free.tolist(), strict=True):
        if key != last or used + tokens > limit:
            number, used = number + 1, 0
        used, last = used + tokens, key
        numbers.append(number)
    bundle = torch.empty_like(order)
    bundle[order] = torch.tensor(numbers)
    counts = torch.bincount(bundle)
    widths = torch.zeros_like(counts).index_add_(0, bundle, own)
    widths[bundle] += prefix
    return _Bundles(bundle, prefix, widths, counts)


def _layout(batch: TokenBatch, bundle: Tensor, prefix: Tensor) -> Layout:
    """Of rows in the order of their ``bundle``, which counts from 0; ``prefix`` is shared within a bundle."""
    plain = plain_layout(batch.tokens, batch.attention_mask, batch.loss_mask)
    plain.experts, plain.images, plain.rope = batch.routed_experts, batch.images, batch.rope
    lengths, counts = batch.attention_mask.sum(1), torch.bincount(bundle)
    if int(counts.max()) == 1:
        return plain

    rows, length = batch.tokens.shape
    index = torch.arange(length)
    first = (counts.cumsum(0) - counts)[bundle]
    own = lengths - prefix
    own_before = own.cumsum(0) - own
    own_start = prefix + own_before - own_before[first]
    is_own = index >= prefix[:, None]
    target = torch.where(is_own, index + (own_start - prefix)[:, None], index)

    width = int((own_start + own).max())
    target = target + (bundle * width)[:, None]
    valid = index < lengths[:, None]
    cells = target[valid]
    packed_size = len(counts) * width
    tokens = batch.tokens.new_zeros(packed_size)
    tokens[cells] = batch.tokens[valid]
    positions = torch.zeros(packed_size, dtype=torch.int64)
    positions[cells] = index.expand(rows, length)[valid]
    owners = torch.full((packed_size,), -1, dtype=torch.int32)
    owners[cells] = torch.where(is_own, torch.arange(1, rows + 1, dtype=torch.int32)[:, None], 0)[valid]

    def packed(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        whole = values.new_zeros(packed_size, *values.shape[2:])
        whole[cells] = values[valid]
        return whole.view(len(counts), width, *values.shape[2:])

    shape = (len(counts), width)
    return replace(
        plain,
        tokens=tokens.view(shape),
        positions=positions.view(shape),
        owners=owners.view(shape),
        predictors=target.flatten()[plain.cells - 1],
        experts=packed(batch.routed_experts),
        rope=packed(batch.rope),
    )


def _packed(layout: Layout, widths: Tensor, counts: Tensor) -> Layout:
    """Packed rows of these widths as one packed sequence, without padding; ``counts``: the sequences in each."""
    index = torch.arange(layout.tokens.shape[1])
    valid = index < widths[:, None]
    positions = index.expand_as(valid) if layout.positions is None else layout.positions
    return replace(
        layout,
        tokens=layout.tokens[valid][None],
        positions=positions[valid][None],
        owners=None,
        predictors=(valid.flatten().cumsum(0) - 1)[layout.predictors],
        experts=None if layout.experts is None else layout.experts[valid][None],
        rope=None if layout.rope is None else layout.rope[valid][None],
        blocks=blocks_of(widths, (counts > 1).tolist(), layout.owners),
    )
