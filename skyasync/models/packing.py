"""Rows of a batch laid out for one forward pass: micro-batches, and prompts computed once for all their samples.

Invariant: packing changes only how much is computed, never what. A token attends to exactly the tokens
before it in its own sequence and has its own position; every loss token of the batch is in exactly one
micro-batch.

    four samples of one prompt as rows      the same, packed into one row
    p p p a a                               p p p a a b b b c d d . .
    p p p b b b                             each response attends to the prompt and to itself
    p p p c
    p p p d d

Packed rows that differ in length stand end to end where a model can take them so (``skyasync.models.attention``).
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


@dataclass
class Layout:
    """What the model computes and where the results belong.

    ``tokens``, ``positions`` (int64) and ``owners`` (int32) are ``[packed rows, width]``. The latter two are None
    where every packed row is one sequence, right-padded: then the causal mask alone is exact, since padding comes
    last. An owner is 0 for a token of the shared prefix, -1 for padding, else the number of the token's own row.

    With ``blocks`` the packed rows stand end to end, ``[1, tokens]``, and the blocks have the owners.

    The n loss tokens: ``predictors`` (flat indices into ``tokens`` of the token before each), ``targets``
    (token ids), ``cells`` (flat indices into the ``shape`` = ``[rows, length]`` of the result).

    ``experts``: ``[packed rows, width, layers, top_k]`` where a batch says which experts a mixture chooses.
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

    def to(self, device: torch.device) -> Layout:
        moved: dict[str, Any] = {n: value.to(device) for n, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved, blocks=tuple(block.to(device) for block in self.blocks))

    def to_rows(self, values: Tensor) -> Tensor:
        """What there is per loss token, ``[n, ...]``, as ``[rows, length, ...]``, zero elsewhere; differentiable."""
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
    """A batch cut into micro-batches of similar widths. How it is cut is settled at once, which is cheap; each
    micro-batch is built when the iteration comes to it.

    Args:
        max_tokens: most tokens per micro-batch, padding included; only a single longer row exceeds it.
        max_rows: most sequences per micro-batch; 0 sets no such limit.
        share_prefixes: compute the common prefix of a group's rows once, where that pays.
        hidden_size: of the model; with it goes the price of attention against that of the linear layers.
        end_to_end: the model takes rows end to end: those of a micro-batch may differ in length, at no cost.
    """

    def __init__(
        self,
        batch: B,
        *,
        max_tokens: int,
        max_rows: int = 0,
        share_prefixes: bool,
        hidden_size: int,
        end_to_end: bool = False,
    ) -> None:
        self._batch, self._max_tokens, self._end_to_end = batch, max_tokens, end_to_end
        lengths = batch.attention_mask.sum(1)
        each = torch.arange(len(lengths))
        bundles = _Bundles(each, torch.zeros_like(lengths), lengths, torch.ones_like(lengths))
        if share_prefixes and len(batch):
            shared = _by_group(batch, lengths, hidden_size, max_tokens, max_rows)
            if shared.widths.sum() <= (1 - MIN_SAVED_TOKENS) * lengths.sum():
                bundles = shared
        self._bundles = bundles
        self._order = torch.argsort(bundles.widths, descending=True, stable=True)
        widths, counts = bundles.widths[self._order].tolist(), bundles.counts[self._order].tolist()
        self._cuts = list(_cuts(widths, counts, max_tokens, max_rows, padded=not end_to_end))

    def __len__(self) -> int:
        return len(self._cuts)

    def __iter__(self) -> Iterator[MicroBatch[B]]:
        bundles = self._bundles
        by_bundle = torch.argsort(bundles.bundle, stable=True)
        starts = bundles.counts.cumsum(0) - bundles.counts
        for start, end in self._cuts:
            chosen = self._order[start:end]
            rows = by_bundle[_ranges(starts[chosen], bundles.counts[chosen])]
            piece = self._batch.select(rows).trim()
            local = torch.repeat_interleave(torch.arange(end - start), bundles.counts[chosen])
            layout = _layout(piece, local, bundles.prefix[rows])
            widths, tokens = bundles.widths[chosen], layout.tokens.numel()
            if self._end_to_end and (tokens > self._max_tokens or widths.sum() < (1 - MAX_PADDING) * tokens):
                layout = _end_to_end(layout, widths, bundles.counts[chosen])
            yield MicroBatch(rows, piece, layout)


def plain_layout(tokens: Tensor, attention_mask: Tensor, loss_mask: Tensor) -> Layout:
    """One sequence per row, as it is: ``[rows, length]`` each."""
    rows, length = tokens.shape
    loss_mask = loss_mask.bool() & attention_mask.bool()
    loss_mask[:, :1] = False
    cells = loss_mask.flatten().nonzero().squeeze(1)
    return Layout(tokens, None, None, cells - 1, tokens.flatten()[cells], cells, (rows, length))


def empty_micro_batch(like: B) -> MicroBatch[B]:
    """One row without a loss token: it takes part in every collective and adds nothing."""
    row = like.each(lambda t: torch.zeros((1, 2, *t.shape[2:]) if t.dim() >= 2 else (1,), dtype=t.dtype))
    row.attention_mask[:] = True
    (piece,) = MicroBatches(row, max_tokens=2, share_prefixes=False, hidden_size=1)
    return MicroBatch(torch.zeros(0, dtype=torch.int64), piece.batch, piece.layout)


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
        kept = own[: len(micro.rows), : result.shape[1]].float().cpu()
        result[micro.rows, : kept.shape[1]] = kept


def sequences_as_batch(sequences: Sequence[Sequence[int]]) -> TokenBatch:
    """Every token but the first of each sequence is a loss token; no groups."""
    lengths = torch.tensor([len(s) for s in sequences])
    mask = torch.arange(int(lengths.max()) if len(lengths) else 0) < lengths[:, None]
    tokens = torch.zeros(mask.shape, dtype=torch.int64)
    tokens[mask] = torch.tensor([t for s in sequences for t in s], dtype=torch.int64)
    loss_mask = mask.clone()
    loss_mask[:, :1] = False
    return TokenBatch(tokens, mask, loss_mask, group_ids=torch.arange(len(sequences)))


def _by_group(batch: TokenBatch, lengths: Tensor, hidden_size: int, max_tokens: int, max_rows: int) -> _Bundles:
    """Rows of a group together, as many as is cheapest."""
    group, group_sizes = torch.unique(batch.group_ids, return_inverse=True, return_counts=True)[1:]
    order = torch.argsort(group, stable=True)
    first_of_group = order[group_sizes.cumsum(0) - group_sizes]
    prefix = _common_prefix(batch, lengths, group, first_of_group)
    own = lengths - prefix

    # Position of a row within its group, in tokens and in rows.
    own_sorted, group_sorted = own[order], group[order]
    tokens_before = own_sorted.cumsum(0) - own_sorted
    group_start = (group_sizes.cumsum(0) - group_sizes)[group_sorted]
    tokens_before = tokens_before - tokens_before[group_start]
    rows_before = torch.arange(len(group)) - group_start

    limit = torch.minimum(_cheapest_width(prefix[order], hidden_size), (max_tokens - prefix[order]).clamp(min=1))
    piece = torch.div(tokens_before, limit, rounding_mode="floor")
    keys = torch.stack([group_sorted, piece, rows_before // max_rows if max_rows else torch.zeros_like(piece)], 1)
    room = max_tokens - prefix[order]
    bundle = torch.empty_like(order)
    bundle[order] = _numbered(keys.tolist(), own_sorted.tolist(), room.tolist())
    counts = torch.bincount(bundle)
    widths = torch.zeros_like(counts).index_add_(0, bundle, own)
    widths[bundle] += prefix
    return _Bundles(bundle, prefix, widths, counts)


def _numbered(keys: list[list[int]], own: list[int], room: list[int]) -> Tensor:
    """Bundles from 0 on: consecutive rows with equal keys, as long as their own tokens fit into the room."""
    numbers: list[int] = []
    number, used = -1, 0
    for i, key in enumerate(keys):
        if i == 0 or key != keys[i - 1] or used + own[i] > room[i]:
            number, used = number + 1, 0
        used += own[i]
        numbers.append(number)
    return torch.tensor(numbers)


def _common_prefix(batch: TokenBatch, lengths: Tensor, group: Tensor, first_of_group: Tensor) -> Tensor:
    """Tokens that all rows of a group share from the start, per row; loss tokens are never shared."""
    columns = torch.arange(batch.tokens.shape[1])
    same = batch.tokens == batch.tokens[first_of_group[group]]
    same &= (columns < lengths[:, None]) & ~batch.loss_mask.bool()
    if batch.routed_experts is not None:  # what is computed once has one choice of experts
        same &= (batch.routed_experts == batch.routed_experts[first_of_group[group]]).all(-1).all(-1)
    per_row = same.int().cumprod(1).sum(1)
    per_group = torch.full_like(first_of_group, batch.tokens.shape[1]).scatter_reduce(0, group, per_row, "amin")
    return per_group[group]


def _cheapest_width(prefix: Tensor, hidden_size: int) -> Tensor:
    """Response tokens to put into one row with a prefix of P tokens: sqrt(P² + 6 h P).

    A layer of hidden size h costs about 24 h² operations per token and 4 h per attended pair, so a row with c
    responses of R tokens costs, per response, (P + cR) / c * 24 h² + (P + cR)² / c * 4 h; this is least at that cR.
    """
    p = prefix.double()
    return (p * p + 6 * hidden_size * p).sqrt().long().clamp(min=1)


def _cuts(
    widths: list[int], counts: list[int], max_tokens: int, max_rows: int, *, padded: bool
) -> Iterator[tuple[int, int]]:
    """Consecutive pieces of bundles that come widest first, so that the first of a piece is as wide as the piece."""
    start = 0
    while start < len(widths):
        end, rows, tokens = start + 1, counts[start], widths[start]
        while end < len(widths) and (not max_rows or rows + counts[end] <= max_rows):
            tokens += widths[start] if padded else widths[end]
            if tokens > max_tokens:
                break
            rows += counts[end]
            end += 1
        yield start, end
        start = end


def _ranges(starts: Tensor, counts: Tensor) -> Tensor:
    """All integers of [start, start + count), one range after the other."""
    before = counts.cumsum(0) - counts
    return torch.arange(int(counts.sum())) + torch.repeat_interleave(starts - before, counts)


def _layout(batch: TokenBatch, bundle: Tensor, prefix: Tensor) -> Layout:
    """Rows that come bundle by bundle, ``bundle`` counting from 0; ``prefix`` is shared within a bundle."""
    lengths = batch.attention_mask.sum(1)
    counts = torch.bincount(bundle)
    if int(counts.max()) == 1:
        plain = plain_layout(batch.tokens, batch.attention_mask, batch.loss_mask)
        return replace(plain, experts=batch.routed_experts)

    rows, length = batch.tokens.shape
    columns = torch.arange(length)
    first = (counts.cumsum(0) - counts)[bundle]
    own = lengths - prefix
    own_before = own.cumsum(0) - own
    own_start = prefix + own_before - own_before[first]
    is_own = columns >= prefix[:, None]
    place = torch.where(is_own, columns + (own_start - prefix)[:, None], columns)

    width = int((own_start + own).max())
    place = place + (bundle * width)[:, None]
    valid = columns < lengths[:, None]
    where = place[valid]
    packed_size = len(counts) * width
    tokens = batch.tokens.new_zeros(packed_size)
    tokens[where] = batch.tokens[valid]
    positions = torch.zeros(packed_size, dtype=torch.int64)
    positions[where] = columns.expand(rows, length)[valid]
    owners = torch.full((packed_size,), -1, dtype=torch.int32)
    owners[where] = torch.where(is_own, torch.arange(1, rows + 1, dtype=torch.int32)[:, None], 0)[valid]

    experts = None
    if batch.routed_experts is not None:
        kind = batch.routed_experts.shape[2:]
        experts = batch.routed_experts.new_zeros(packed_size, *kind)
        experts[where] = batch.routed_experts[valid]
        experts = experts.view(len(counts), width, *kind)

    plain = plain_layout(batch.tokens, batch.attention_mask, batch.loss_mask)
    shape = (len(counts), width)
    return Layout(
        tokens=tokens.view(shape),
        positions=positions.view(shape),
        owners=owners.view(shape),
        predictors=place.flatten()[plain.cells - 1],
        targets=plain.targets,
        cells=plain.cells,
        shape=plain.shape,
        experts=experts,
    )


def _end_to_end(layout: Layout, widths: Tensor, counts: Tensor) -> Layout:
    """Packed rows of these widths, without what pads them; ``counts``: the sequences in each."""
    valid = torch.arange(layout.tokens.shape[1]) < widths[:, None]
    columns = torch.arange(layout.tokens.shape[1]).expand_as(valid)
    place = valid.flatten().cumsum(0) - 1
    return replace(
        layout,
        tokens=layout.tokens[valid][None],
        positions=(columns if layout.positions is None else layout.positions)[valid][None],
        owners=None,
        predictors=place[layout.predictors],
        experts=None if layout.experts is None else layout.experts[valid][None],
        blocks=blocks_of(widths, (counts > 1).tolist(), layout.owners),
    )
