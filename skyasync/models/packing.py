"""Rows of a batch laid out for one forward pass: micro-batches, and what rows have in common
computed once.

Invariant: packing changes only how much is computed, never what. A token attends to exactly the
tokens before it in its own sequence and has its own position; every loss token of the batch is in
exactly one micro-batch. A token that several rows share is computed once, and its output is in each
of these rows: its loss, mask, advantage and log-probabilities are those of the row.

    rows of one group       the same as one tree
    p p p a a               p p p a a q b b c d d
    p p p a a q b b         a token attends to what leads to it: c to p p p a a q
    p p p a a q c
    p p p d d

Trees, and rows that differ in length, become one packed sequence if the model can take it
(``skyasync.models.attention``); else a tree is one row of a padded batch.

Rows become prefix trees. They share a token only if the token itself, everything before it and the
experts that are replayed for it are equal, bit by bit. Tokens of images are ids by the images'
content (``skyasync.models.vision``). Only rows of one group share tokens: the samples of a prompt,
and the rows of their episodes.

    rows, sorted      shared with the row before      the tree, in the order in which it is computed
    p a q b           0                               p a q b
    p a q c d         3                                     c d
    p e               1                                 e
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor

from skyasync.models import MAX_PADDING, MIN_SAVED_TOKENS
from skyasync.models.batch import B, TokenBatch
from skyasync.models.images import Images, ImageTokens
from skyasync.models.packed_blocks import NO_END, PackedBlock, blocks_of


@dataclass
class Layout:
    """The model's inputs, and which result they belong to.

    ``tokens``, ``positions`` (int64) and ``visible_until`` (int32) are ``[packed rows, width]``.
    The latter two are None if every packed row is one sequence, right-padded: then the causal mask
    alone is exact, since padding comes last. A token is visible to itself and to those after it, up
    to before this index; ``NO_END`` for padding.

    With ``blocks`` the packed rows are one packed sequence, ``[1, tokens]``.

    The m loss tokens that are computed: ``predictors`` (flat indices into ``tokens`` of the token
    before each) and ``targets`` (token ids). The n of the rows: ``cells`` (flat indices into the
    ``shape`` = ``[rows, length]`` of the result) and ``copies`` (which of the m each is; None: they
    are the same).

    ``experts``: ``[packed rows, width, layers, top_k]`` if the batch has routed experts.

    ``images``: of each row, if any row has some. ``tokens`` have ids in their places
    (``skyasync.models.vision``). ``rope``: ``[packed rows, width, 3]``, positions of models that
    have them in time, height and width.
    """

    tokens: Tensor
    positions: Tensor | None
    visible_until: Tensor | None
    predictors: Tensor
    targets: Tensor
    cells: Tensor
    shape: tuple[int, int]
    copies: Tensor | None = None
    blocks: tuple[PackedBlock, ...] = ()
    experts: Tensor | None = None
    images: tuple[Images, ...] | None = None
    rope: Tensor | None = None

    def each(self, function: Callable[[Tensor], Tensor]) -> Layout:
        """The layout with ``function`` applied to each of its tensors, but for those of
        ``blocks``."""
        changed: dict[str, Any] = {
            n: function(value) for n, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **changed)

    def to(self, device: torch.device) -> Layout:
        moved = self.each(lambda tensor: tensor.to(device))
        return replace(moved, blocks=tuple(block.to(device) for block in self.blocks))

    def to_rows(self, values: Tensor) -> Tensor:
        """Values of the m loss tokens as ``[rows, length, ...]``, with zeros between;
        differentiable."""
        if self.copies is not None:
            values = values.index_select(0, self.copies)
        rows, length = self.shape
        where = (self.cells // max(1, length), self.cells % max(1, length))
        return values.new_zeros(rows, length, *values.shape[1:]).index_put(where, values)


@dataclass
class MicroBatch(Generic[B]):
    """``rows`` (int64, into the batch that was packed), the batch of these rows, and its layout."""

    rows: Tensor
    batch: B
    layout: Layout


class MicroBatches(Generic[B]):
    """A batch cut into micro-batches of similar widths. The cuts are made at once, which is cheap;
    each micro-batch is built when the iteration comes to it.

    Args:
        max_tokens: most computed tokens per micro-batch, padding included; only a single longer row
            exceeds it.
        max_rows: most sequences per micro-batch; 0 sets no such limit.
        share_prefixes: compute what a group's rows have in common once, if that saves enough.
        hidden_size: of the model: it decides the cost of attention relative to that of the linear
            layers.
        packs: the model takes packed sequences: rows of a micro-batch may differ in length, at no
            cost.
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
        self._batch = batch
        self._max_tokens = max_tokens
        self._packs = packs
        lengths = batch.attention_mask.sum(1)
        # Each row for itself.
        bundles = Bundles(
            torch.arange(len(lengths)), torch.zeros_like(lengths), lengths, torch.ones_like(lengths)
        )
        if share_prefixes and len(batch):
            limits = {"max_tokens": max_tokens, "max_rows": max_rows}
            shared = cheapest_bundles(
                sorted_rows(batch), hidden_size=hidden_size, dense=not packs, **limits
            )
            if shared.widths.sum() <= (1 - MIN_SAVED_TOKENS) * lengths.sum():
                bundles = shared
        self._bundles = bundles
        self._order = torch.argsort(bundles.widths, descending=True, stable=True)
        # The widest bundles come first, so the first of a micro-batch is as wide as the
        # micro-batch.
        widths = bundles.widths[self._order].tolist()
        counts = bundles.counts[self._order].tolist()
        self._cuts: list[tuple[int, int]] = []
        start = 0
        while start < len(widths):
            end = start + 1
            rows = counts[start]
            tokens = widths[start]
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
        starts = bundles.counts.cumsum(0) - bundles.counts
        for start, end in self._cuts:
            chosen = self._order[start:end]
            widths = bundles.widths[chosen]
            counts = bundles.counts[chosen]
            before = counts.cumsum(0) - counts
            indices = torch.arange(int(counts.sum())) + torch.repeat_interleave(
                starts[chosen] - before, counts
            )
            selected = self._batch.select(rows := bundles.rows[indices]).trim()
            yield MicroBatch(
                rows, selected, self._layout(selected, widths, counts, bundles.prefixes[indices])
            )

    def _layout(self, batch: B, widths: Tensor, counts: Tensor, prefixes: Tensor) -> Layout:
        """Of rows in the order of their bundles, which have these widths and counts of rows."""
        padded = len(widths) * int(widths.max())
        trees = int(counts.max()) > 1
        wasteful = padded > self._max_tokens or widths.sum() < (1 - MAX_PADDING) * padded
        if self._packs and (trees or wasteful):
            return _packed(batch, prefixes)
        if trees:
            return _padded(_packed(batch, prefixes), widths)
        plain = plain_layout(batch.tokens, batch.attention_mask, batch.loss_mask)
        return replace(plain, experts=batch.routed_experts, images=batch.images, rope=batch.rope)


def plain_layout(tokens: Tensor, attention_mask: Tensor, loss_mask: Tensor) -> Layout:
    """One sequence per row, as it is: ``[rows, length]`` each."""
    rows, length = tokens.shape
    loss_mask = loss_mask.bool() & attention_mask.bool()
    loss_mask[:, :1] = False
    cells = loss_mask.flatten().nonzero().squeeze(1)
    return Layout(tokens, None, None, cells - 1, tokens.flatten()[cells], cells, (rows, length))


def empty_micro_batch(like: B) -> MicroBatch[B]:
    """One row without a loss token: for the collectives alone, it adds nothing."""
    row = like.each(
        lambda t: torch.zeros((1, 2, *t.shape[2:]) if t.dim() >= 2 else (1,), dtype=t.dtype)
    )
    row.attention_mask[:] = True
    row.images = None
    (micro,) = MicroBatches(row, max_tokens=2, share_prefixes=False, hidden_size=1)
    return replace(micro, rows=torch.zeros(0, dtype=torch.int64))


def put_rows(
    whole: dict[str, Tensor],
    names: Collection[str],
    micro: MicroBatch[Any],
    outputs: Mapping[str, Tensor],
    batch: TokenBatch,
) -> None:
    """Write a micro-batch's outputs into the rows of the batch's, float32 ``[batch, length, ...]``
    on the CPU."""
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
    return TokenBatch(
        tokens, mask, loss_mask, group_ids=each, images=images if any(images) else None
    )


def _packed(batch: TokenBatch, prefixes: Tensor) -> Layout:
    """Rows in the order of their bundles as one packed sequence of their trees, without padding.

    Each token is where the first row that has it puts it: at the row's own tokens, which follow its
    prefix.
    """
    plain = plain_layout(batch.tokens, batch.attention_mask, batch.loss_mask)
    rows, length = batch.tokens.shape
    lengths = batch.attention_mask.sum(1)
    index = torch.arange(length)
    numbers = torch.arange(rows)[:, None]
    own = lengths - prefixes
    starts = own.cumsum(0) - own
    after_prefix = index >= prefixes[:, None]
    # Of each token, the row whose own it is, and its place in the packed sequence.
    owner = numbers.where(after_prefix, 0).cummax(0).values
    indices = (starts - prefixes)[owner] + index
    # Rows see a token until one of them has another in its place.
    following = numbers.where(after_prefix, rows).flip(0).cummin(0).values.flip(0)
    following = torch.cat([following[1:], torch.full((1, length), rows)])
    is_own = after_prefix & (index < lengths[:, None])

    loss, copies = torch.unique(indices.flatten()[plain.cells], return_inverse=True)
    predictors = torch.empty_like(loss).scatter_(0, copies, indices.flatten()[plain.cells - 1])
    tokens = batch.tokens[is_own]
    return replace(
        plain,
        tokens=tokens[None],
        positions=index.expand(rows, length)[is_own][None],
        visible_until=torch.cat([starts, own.sum()[None]])[following][is_own].int()[None],
        predictors=predictors,
        targets=tokens[loss],
        copies=copies,
        blocks=blocks_of(lengths, prefixes, indices),
        experts=None if batch.routed_experts is None else batch.routed_experts[is_own][None],
        rope=None if batch.rope is None else batch.rope[is_own][None],
        images=batch.images,
    )


def _padded(packed: Layout, widths: Tensor) -> Layout:
    """A packed sequence of trees of these widths as a padded batch."""
    width = int(widths.max())
    is_token = torch.arange(width) < widths[:, None]
    place = is_token.flatten().nonzero().squeeze(1)
    assert packed.positions is not None and packed.visible_until is not None

    def padded(values: Tensor, padding: int = 0) -> Tensor:
        whole = values.new_full((*is_token.shape, *values.shape[2:]), padding)
        whole[is_token] = values[0]
        return whole

    starts = torch.repeat_interleave(widths.cumsum(0) - widths, widths)
    return replace(
        packed,
        tokens=padded(packed.tokens),
        positions=padded(packed.positions),
        visible_until=padded(packed.visible_until - starts.int(), NO_END),
        predictors=place[packed.predictors],
        blocks=(),
        experts=None if packed.experts is None else padded(packed.experts),
        rope=None if packed.rope is None else padded(packed.rope),
    )


@dataclass(frozen=True)
class SortedRows:
    """``rows`` (int64, into the batch) group by group, so that rows with a long common prefix are
    neighbours.

    ``prefixes``: of each of them, the tokens that it shares with the one before. ``lengths``: all
    of its tokens.
    """

    rows: Tensor
    lengths: Tensor
    prefixes: Tensor


def sorted_rows(batch: TokenBatch) -> SortedRows:
    order = torch.argsort(batch.group_ids, stable=True).tolist()
    lengths = batch.attention_mask.sum(1)
    groups = batch.group_ids.tolist()
    sizes = lengths.tolist()
    tokens = batch.tokens.numpy()
    start = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or groups[order[end]] != groups[order[start]]:
            if end - start > 1:  # any order of the bytes puts equal beginnings together
                order[start:end] = sorted(
                    order[start:end], key=lambda row: tokens[row, : sizes[row]].tobytes()
                )
            start = end
    rows = torch.tensor(order, dtype=torch.int64)
    prefixes = torch.zeros_like(rows)
    if batch.routed_experts is None:
        experts = None
    else:
        experts = batch.routed_experts.flatten(2).numpy()
    for place in range(1, len(order)):
        first = order[place - 1]
        second = order[place]
        if groups[first] != groups[second]:
            continue
        most = min(sizes[first], sizes[second])
        equal = tokens[first, :most] == tokens[second, :most]
        if experts is not None:
            equal &= (experts[first, :most] == experts[second, :most]).all(1)
        prefixes[place] = most if equal.all() else int(equal.argmin())
    return SortedRows(rows, lengths[rows], prefixes)


@dataclass
class Bundles:
    """Which rows are computed together. The rows of a bundle are neighbours; its first shares
    nothing."""

    rows: Tensor
    prefixes: Tensor
    widths: Tensor  # per bundle, in tokens that are computed
    counts: Tensor  # per bundle, in rows


def cheapest_bundles(
    rows: SortedRows, *, hidden_size: int, dense: bool, max_tokens: int, max_rows: int
) -> Bundles:
    """Neighbours together, so that the sum of all bundles' costs is least; only a single row
    exceeds the limits.

    A layer of hidden size h costs about 24 h² operations per token and 4 h per attended pair. A
    bundle of W tokens is computed as W * 24 h² + W² * 4 h with a dense mask. Without one its pairs
    are those of its rows, in any bundle.
    """
    lengths = rows.lengths.numpy()
    prefixes = rows.prefixes.numpy()
    edges = [*np.flatnonzero(prefixes == 0).tolist(), len(lengths)]
    per_token = 6.0 * hidden_size if dense else 0.0
    starts: list[int] = []
    for first, last in pairwise(edges):
        cuts = _cuts(lengths[first:last], prefixes[first:last], per_token, max_tokens, max_rows)
        starts += [first + start for start in cuts]
    begins = torch.zeros(len(lengths), dtype=torch.bool)
    begins[starts] = True
    shared = rows.prefixes.where(~begins, 0)
    bundle = begins.cumsum(0) - 1
    counts = torch.bincount(bundle)
    widths = torch.zeros_like(counts).index_add_(0, bundle, rows.lengths - shared)
    return Bundles(rows.rows, shared, widths, counts)


def _cuts(
    lengths: np.ndarray, prefixes: np.ndarray, per_token: float, max_tokens: int, max_rows: int
) -> list[int]:
    """The first rows of the bundles of neighbours that all share something.

    Rows i to j have as many tokens as row i, and what each later row does not share with the one
    before.

    Args:
        per_token: the cost of a token, relative to an attended pair; 0: pairs do not count.
    """
    count = len(lengths)
    if count == 1:
        return [0]
    total = np.cumsum(lengths - prefixes)
    if not per_token and total[-1] <= max_tokens and count <= (max_rows or count):
        return [0]
    best = np.zeros(count + 1)
    chosen = [0] * count
    for last in range(count):
        low = max(0, last + 1 - max_rows) if max_rows else 0
        widths = (lengths[low : last + 1] + total[last] - total[low : last + 1]).astype(np.float64)
        costs = best[low : last + 1] + (
            widths * per_token + widths * widths if per_token else widths
        )
        costs[:-1][widths[:-1] > max_tokens] = np.inf
        first = low + int(costs.argmin())
        best[last + 1] = costs[first - low]
        chosen[last] = first
    starts = []
    last = count
    while last:
        last = chosen[last - 1]
        starts.append(last)
    return starts[::-1]
