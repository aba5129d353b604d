"""Layout of a batch's rows for forward passes: micro-batches, and shared prefixes computed once.

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
from itertools import chain, pairwise
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
        """Apply ``function`` to each tensor of the layout, but not to those of ``blocks``."""
        tensors: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                tensors[name] = function(value)
        return replace(self, **tensors)

    def to(self, device: torch.device) -> Layout:
        layout = self.each(lambda tensor: tensor.to(device))
        layout.blocks = tuple(block.to(device) for block in self.blocks)
        return layout

    def to_rows(self, values: Tensor) -> Tensor:
        """Put values of the m loss tokens into ``[rows, length, ...]``, with zeros between.

        Differentiable.
        """
        if self.copies is not None:
            values = values.index_select(0, self.copies)  # [m, ...] -> [n, ...]
        rows, length = self.shape
        divisor = max(1, length)  # an empty batch has no cells, but its length may be 0
        row_and_column = (self.cells // divisor, self.cells % divisor)  # [n] each
        zeros = values.new_zeros(rows, length, *values.shape[1:])
        # index_put, not scatter: it takes values with further dimensions, and has a gradient.
        return zeros.index_put(row_and_column, values)


@dataclass
class MicroBatch(Generic[B]):
    """``rows`` (int64, into the batch that was packed), the batch of these rows, and its layout."""

    rows: Tensor
    batch: B
    layout: Layout


class MicroBatches(Generic[B]):
    """A batch cut into micro-batches of similar widths.

    The cuts are made at once, which is cheap; iteration builds one micro-batch at a time.

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
        lengths = batch.attention_mask.sum(1)  # [rows]
        # By default a bundle is a single row, which shares nothing.
        bundles = Bundles(
            rows=torch.arange(len(lengths)),
            prefixes=torch.zeros_like(lengths),
            widths=lengths,
            counts=torch.ones_like(lengths),
        )
        if share_prefixes and len(batch):
            prefix_bundles = cheapest_bundles(
                sorted_rows(batch),
                hidden_size=hidden_size,
                dense=not packs,
                max_tokens=max_tokens,
                max_rows=max_rows,
            )
            limit = (1 - MIN_SAVED_TOKENS) * lengths.sum()
            if prefix_bundles.widths.sum() <= limit:
                bundles = prefix_bundles
        self._bundles = bundles
        # The widest bundles come first, so the first of a micro-batch is as wide as the
        # micro-batch. The sort is stable: the same batch is cut in the same way on every rank.
        self._order = torch.argsort(bundles.widths, descending=True, stable=True)  # [bundles]
        widths = bundles.widths[self._order].tolist()
        counts = bundles.counts[self._order].tolist()
        self._cuts: list[tuple[int, int]] = []
        start = 0
        while start < len(widths):
            end = start + 1
            rows = counts[start]
            tokens = widths[start]
            while end < len(widths):
                if max_rows and rows + counts[end] > max_rows:
                    break
                # In a padded batch a narrower bundle takes as many tokens as the widest.
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
        starts = bundles.counts.cumsum(0) - bundles.counts  # [bundles]: first rows
        for start, end in self._cuts:
            bundle_ids = self._order[start:end]
            widths = bundles.widths[bundle_ids]
            counts = bundles.counts[bundle_ids]
            # Bundles are neither in order nor of one size: shift a range by each one's offset.
            offsets = starts[bundle_ids] - (counts.cumsum(0) - counts)
            indices = torch.repeat_interleave(offsets, counts)  # [rows of the micro-batch]
            indices = torch.arange(len(indices)) + indices
            rows = bundles.rows[indices]
            batch = self._batch.select(rows).trim()
            layout = self._layout(batch, widths, counts, bundles.prefixes[indices])
            yield MicroBatch(rows, batch, layout)

    def _layout(self, batch: B, widths: Tensor, counts: Tensor, prefixes: Tensor) -> Layout:
        """Lay out rows in the order of their bundles.

        Args:
            widths, counts: int64 ``[bundles]``: computed tokens and rows of each bundle.
            prefixes: int64 ``[rows]``, as in ``SortedRows``.
        """
        padded_tokens = len(widths) * int(widths.max())
        has_trees = int(counts.max()) > 1
        is_wasteful = (
            padded_tokens > self._max_tokens or widths.sum() < (1 - MAX_PADDING) * padded_tokens
        )
        if self._packs and (has_trees or is_wasteful):
            return _packed(batch, prefixes)
        if has_trees:
            return _padded(_packed(batch, prefixes), widths)
        layout = plain_layout(batch.tokens, batch.attention_mask, batch.loss_mask)
        layout.experts = batch.routed_experts
        layout.images = batch.images
        layout.rope = batch.rope
        return layout


def plain_layout(tokens: Tensor, attention_mask: Tensor, loss_mask: Tensor) -> Layout:
    """Lay out one sequence per row, as it is: ``[rows, length]`` each."""
    rows, length = tokens.shape
    loss_mask = loss_mask.bool() & attention_mask.bool()
    loss_mask[:, :1] = False  # nothing predicts a row's first token
    cells = loss_mask.flatten().nonzero().squeeze(1)  # [n]
    return Layout(
        tokens,
        positions=None,
        visible_until=None,
        predictors=cells - 1,
        targets=tokens.flatten()[cells],
        cells=cells,
        shape=(rows, length),
    )


def empty_micro_batch(like: B) -> MicroBatch[B]:
    """Make one row without a loss token: for the collectives alone, it adds nothing."""

    def zeros(tensor: Tensor) -> Tensor:
        # Two tokens: a row of one would predict nothing, and some models reject it.
        shape = (1, 2, *tensor.shape[2:]) if tensor.dim() >= 2 else (1,)
        return torch.zeros(shape, dtype=tensor.dtype)

    row = like.each(zeros)
    row.attention_mask[:] = True
    row.images = None
    (micro,) = MicroBatches(row, max_tokens=2, share_prefixes=False, hidden_size=1)
    micro.rows = torch.zeros(0, dtype=torch.int64)  # its outputs belong to no row of the batch
    return micro


def put_rows(
    results: dict[str, Tensor],
    names: Collection[str],
    micro: MicroBatch[Any],
    outputs: Mapping[str, Tensor],
    batch: TokenBatch,
) -> None:
    """Write a micro-batch's outputs into ``results``, those of the batch.

    They are float32 ``[batch, length, ...]`` on the CPU.
    """
    for name in names:
        output = outputs[name].detach()  # [rows, width, ...]
        if name not in results:
            results[name] = torch.zeros(*batch.tokens.shape, *output.shape[2:])
        result = results[name]
        # An empty micro-batch has a row that is none of the batch, and may be wider than it.
        output = output[: len(micro.rows), : result.shape[1]].float().cpu()
        result[micro.rows, : output.shape[1]] = output


def sequences_as_batch(sequences: Sequence[Sequence[int]]) -> TokenBatch:
    """Pad sequences to a batch in which all tokens but the first are loss tokens; no groups."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    width = int(lengths.max()) if len(lengths) else 0
    mask = torch.arange(width) < lengths[:, None]  # [rows, width]
    tokens = torch.zeros(mask.shape, dtype=torch.int64)
    tokens[mask] = torch.tensor(list(chain.from_iterable(sequences)), dtype=torch.int64)
    loss_mask = mask.clone()
    loss_mask[:, :1] = False  # nothing predicts a row's first token
    images = tuple(map(ImageTokens.images_of, sequences))
    return TokenBatch(
        tokens,
        mask,
        loss_mask,
        group_ids=torch.arange(len(sequences)),
        images=images if any(images) else None,
    )


def _packed(batch: TokenBatch, prefixes: Tensor) -> Layout:
    """Pack rows, in the order of their bundles, into one sequence of their trees without padding.

    Each token is where the first row that has it puts it: at the row's own tokens, which follow its
    prefix.
    """
    plain = plain_layout(batch.tokens, batch.attention_mask, batch.loss_mask)
    rows, length = batch.tokens.shape
    lengths = batch.attention_mask.sum(1)  # [rows]
    column = torch.arange(length)  # [length]
    row = torch.arange(rows)[:, None]  # [rows, 1]
    new_tokens = lengths - prefixes  # [rows]: a row's own tokens
    stops = new_tokens.cumsum(0)
    starts = stops - new_tokens  # [rows]: in the packed sequence
    after_prefix = column >= prefixes[:, None]  # [rows, length]
    # A shared token belongs to the last row above, or this one, that has it as its own.
    owner = row.where(after_prefix, 0).cummax(0).values  # [rows, length]
    indices = (starts - prefixes)[owner] + column  # [rows, length]: in the packed sequence
    # Rows see a token until one of them has another in its place: the next row below that owns
    # this column. A minimum over the rows from below, shifted by a row, finds it.
    next_owner = row.where(after_prefix, rows).flip(0).cummin(0).values.flip(0)
    next_owner = torch.cat([next_owner[1:], torch.full((1, length), rows)])  # [rows, length]
    next_start = torch.cat([starts, stops[-1:]])[next_owner]  # [rows, length]
    is_own = after_prefix & (column < lengths[:, None])  # [rows, length]

    def packed(values: Tensor) -> Tensor:
        """``[rows, length, ...]`` as ``[1, tokens, ...]``: row after row, as ``starts`` counts."""
        return values[is_own][None]

    flat_indices = indices.flatten()
    # A loss token that several rows share is computed once: n of the rows, m in the sequence.
    loss_tokens, copies = torch.unique(flat_indices[plain.cells], return_inverse=True)  # [m], [n]
    predictors = torch.empty_like(loss_tokens)
    predictors.scatter_(0, copies, flat_indices[plain.cells - 1])  # copies write equal values
    tokens = packed(batch.tokens)
    return replace(
        plain,
        tokens=tokens,
        positions=packed(column.expand(rows, length)),
        visible_until=packed(next_start).int(),
        predictors=predictors,
        targets=tokens[0, loss_tokens],
        copies=copies,
        blocks=blocks_of(lengths, prefixes, indices),
        experts=None if batch.routed_experts is None else packed(batch.routed_experts),
        rope=None if batch.rope is None else packed(batch.rope),
        images=batch.images,
    )


def _padded(packed: Layout, widths: Tensor) -> Layout:
    """Unpack a sequence of trees of these widths, int64 ``[trees]``, into a padded batch."""
    width = int(widths.max())
    is_token = torch.arange(width) < widths[:, None]  # [trees, width]
    flat_positions = is_token.flatten().nonzero().squeeze(1)  # [tokens]: in the padded batch
    assert packed.positions is not None and packed.visible_until is not None

    def padded(values: Tensor, padding: int = 0) -> Tensor:
        result = values.new_full((*is_token.shape, *values.shape[2:]), padding)
        result[is_token] = values[0]
        return result

    # The end of a token's visibility counts from the beginning of its tree from now on.
    starts = torch.repeat_interleave(widths.cumsum(0) - widths, widths)  # [tokens]
    return replace(
        packed,
        tokens=padded(packed.tokens),
        positions=padded(packed.positions),
        visible_until=padded(packed.visible_until - starts.int(), NO_END),
        predictors=flat_positions[packed.predictors],
        blocks=(),
        experts=None if packed.experts is None else padded(packed.experts),
        rope=None if packed.rope is None else padded(packed.rope),
    )


@dataclass(frozen=True)
class SortedRows:
    """The batch's rows, group by group: rows with a long common prefix are neighbours.

    Args:
        rows: int64 ``[rows]``: indices into the batch.
        lengths: int64 ``[rows]``: all tokens of each row.
        prefixes: int64 ``[rows]``: the tokens that a row shares with the one before.
    """

    rows: Tensor
    lengths: Tensor
    prefixes: Tensor


def sorted_rows(batch: TokenBatch) -> SortedRows:
    """Sort a batch's rows by group and tokens, and count what neighbours share."""
    order = torch.argsort(batch.group_ids, stable=True).tolist()
    lengths = batch.attention_mask.sum(1)  # [rows]
    groups = batch.group_ids.tolist()
    sizes = lengths.tolist()
    tokens = batch.tokens.numpy()  # [rows, length]

    def token_bytes(row: int) -> bytes:
        # Any order of the bytes puts equal beginnings together; bytes compare faster than lists.
        return tokens[row, : sizes[row]].tobytes()

    start = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or groups[order[end]] != groups[order[start]]:
            if end - start > 1:
                order[start:end] = sorted(order[start:end], key=token_bytes)
            start = end
    rows = torch.tensor(order, dtype=torch.int64)
    prefixes = torch.zeros_like(rows)
    experts = None
    if batch.routed_experts is not None:
        experts = batch.routed_experts.flatten(2).numpy()  # [rows, length, layers * top_k]
    for position, (previous_row, row) in enumerate(pairwise(order), start=1):
        if groups[previous_row] != groups[row]:
            continue
        common = min(sizes[previous_row], sizes[row])
        equal = tokens[previous_row, :common] == tokens[row, :common]  # [common]
        if experts is not None:
            equal &= (experts[previous_row, :common] == experts[row, :common]).all(1)
        # argmin finds the first False; of all True it would find 0.
        prefixes[position] = common if equal.all() else int(equal.argmin())
    return SortedRows(rows, lengths[rows], prefixes)


@dataclass
class Bundles:
    """Rows that are computed together.

    The rows of a bundle are neighbours; its first shares nothing.
    """

    rows: Tensor  # int64 [rows]: indices into the batch
    prefixes: Tensor  # int64 [rows]: tokens shared with the row before
    widths: Tensor  # int64 [bundles], in tokens that are computed
    counts: Tensor  # int64 [bundles], in rows


def cheapest_bundles(
    rows: SortedRows,
    *,
    hidden_size: int,
    dense: bool,
    max_tokens: int,
    max_rows: int,
) -> Bundles:
    """Bundle neighbours so that the sum of all costs is least; only a single row exceeds limits.

    A layer of hidden size h costs about 24 h² operations per token and 4 h per attended pair. A
    bundle of W tokens is computed as W * 24 h² + W² * 4 h with a dense mask. Without one its pairs
    are those of its rows, in any bundle.
    """
    lengths = rows.lengths.numpy()
    prefixes = rows.prefixes.numpy()
    # Rows that share nothing with the one before begin a run of candidates: runs are independent.
    edges = [*np.flatnonzero(prefixes == 0).tolist(), len(lengths)]
    per_token = 6.0 * hidden_size if dense else 0.0  # 24 h² / 4 h
    is_start = torch.zeros(len(lengths), dtype=torch.bool)
    for begin, end in pairwise(edges):
        cuts = _cuts(lengths[begin:end], prefixes[begin:end], per_token, max_tokens, max_rows)
        for cut in cuts:
            is_start[begin + cut] = True
    bundle_prefixes = rows.prefixes.where(~is_start, 0)  # [rows]
    bundle = is_start.cumsum(0) - 1  # [rows]: the number of each row's bundle
    counts = torch.bincount(bundle)  # [bundles]
    widths = torch.zeros_like(counts)
    widths.index_add_(0, bundle, rows.lengths - bundle_prefixes)
    return Bundles(rows.rows, bundle_prefixes, widths, counts)


def _cuts(
    lengths: np.ndarray,
    prefixes: np.ndarray,
    per_token: float,
    max_tokens: int,
    max_rows: int,
) -> list[int]:
    """Find the first rows of the bundles of neighbours that all share something.

    A dynamic program: the cheapest bundles of rows up to an end are those up to a start, and one
    bundle from there.

    Rows i to j have as many tokens as row i, and what each later row does not share with the one
    before.

    Args:
        per_token: the cost of a token, relative to an attended pair; 0: pairs do not count.
    """
    count = len(lengths)
    if count == 1:
        return [0]
    total = np.cumsum(lengths - prefixes)  # [rows]: own tokens up to each row
    if not per_token and total[-1] <= max_tokens and count <= (max_rows or count):
        return [0]  # sharing only saves, and no limit forbids one bundle
    best_costs = np.zeros(count + 1)  # of the rows before each one
    best_starts = [0] * count
    for end in range(count):
        earliest = max(0, end + 1 - max_rows) if max_rows else 0
        window = slice(earliest, end + 1)
        # Entry i: the width of a bundle from row earliest + i to row end, inclusive.
        widths = (lengths[window] + total[end] - total[window]).astype(np.float64)
        if per_token:
            bundle_costs = widths * per_token + widths * widths
        else:
            bundle_costs = widths
        costs = best_costs[window] + bundle_costs
        # Not the last one, which is a single row: it may exceed the limit.
        costs[:-1][widths[:-1] > max_tokens] = np.inf
        start = earliest + int(costs.argmin())
        best_costs[end + 1] = costs[start - earliest]
        best_starts[end] = start
    starts = []
    end = count
    while end:
        end = best_starts[end - 1]
        starts.append(end)
    return starts[::-1]
