"""Rows of a batch as prefix trees: what rows have in common is computed once.

Invariant: rows share a token only if the token itself, everything before it and the experts that are replayed for it
are equal, bit by bit. Tokens of images are ids by the images' content (``skyasync.models.vision``). Only rows of one
group share tokens: the samples of a prompt, and the rows of their episodes.

    rows, sorted      shared with the row before      the tree, in the order in which it is computed
    p a q b           0                               p a q b
    p a q c d         3                                     c d
    p e               1                                 e
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from skyasync.models.batch import TokenBatch


@dataclass(frozen=True)
class SortedRows:
    """``rows`` (int64, into the batch) group by group, so that rows with a long common prefix are neighbours.

    ``prefixes``: of each of them, the tokens that it shares with the one before. ``lengths``: all of its tokens.
    """

    rows: Tensor
    lengths: Tensor
    prefixes: Tensor


def sorted_rows(batch: TokenBatch) -> SortedRows:
    order = torch.argsort(batch.group_ids, stable=True).tolist()
    lengths, groups = batch.attention_mask.sum(1), batch.group_ids.tolist()
    sizes, tokens = lengths.tolist(), batch.tokens.numpy()
    start = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or groups[order[end]] != groups[order[start]]:
            if end - start > 1:  # any order of the bytes puts equal beginnings together
                order[start:end] = sorted(order[start:end], key=lambda row: tokens[row, : sizes[row]].tobytes())
            start = end
    rows = torch.tensor(order, dtype=torch.int64)
    prefixes = torch.zeros_like(rows)
    experts = None if batch.routed_experts is None else batch.routed_experts.flatten(2).numpy()
    for place in range(1, len(order)):
        first, second = order[place - 1], order[place]
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
    """Which rows are computed together. The rows of a bundle are neighbours; its first shares nothing."""

    rows: Tensor
    prefixes: Tensor
    widths: Tensor  # per bundle, in tokens that are computed
    counts: Tensor  # per bundle, in rows

    @classmethod
    def single(cls, lengths: Tensor) -> Bundles:
        """Each row for itself."""
        return cls(torch.arange(len(lengths)), torch.zeros_like(lengths), lengths, torch.ones_like(lengths))


def cheapest_bundles(rows: SortedRows, *, hidden_size: int, dense: bool, max_tokens: int, max_rows: int) -> Bundles:
    """Neighbours together, so that the sum of all bundles' costs is least; only a single row exceeds the limits.

    A layer of hidden size h costs about 24 h² operations per token and 4 h per attended pair. A bundle of W tokens is
    computed as W * 24 h² + W² * 4 h with a dense mask. Without one its pairs are those of its rows, in any bundle.
    """
    lengths, prefixes = rows.lengths.numpy(), rows.prefixes.numpy()
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


def _cuts(lengths: np.ndarray, prefixes: np.ndarray, per_token: float, max_tokens: int, max_rows: int) -> list[int]:
    """The first rows of the bundles of neighbours that all share something.

    Rows i to j have as many tokens as row i, and what each later row does not share with the one before.

    Args:
        per_token: the cost of a token, relative to an attended pair; 0: pairs do not count.
    """
    count = len(lengths)
    if count == 1:
        return [0]
    total = np.cumsum(lengths - prefixes)
    if not per_token and total[-1] <= max_tokens and count <= (max_rows or count):
        return [0]
    best, chosen = np.zeros(count + 1), [0] * count
    for last in range(count):
        low = max(0, last + 1 - max_rows) if max_rows else 0
        widths = (lengths[low : last + 1] + total[last] - total[low : last + 1]).astype(np.float64)
        costs = best[low : last + 1] + (widths * per_token + widths * widths if per_token else widths)
        costs[:-1][widths[:-1] > max_tokens] = np.inf
        first = low + int(costs.argmin())
        best[last + 1], chosen[last] = costs[first - low], first
    starts, last = [], count
    while last:
        last = chosen[last - 1]
        starts.append(last)
    return starts[::-1]
