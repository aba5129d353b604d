"""The tensors that training sees.

Invariant: every per-token tensor is ``[batch, length]``, right-padded, aligned with ``tokens``: entry t
belongs to token t, and entry 0 (which nothing predicts) is never a loss token. Everything that needs the
whole batch (loss weights, advantages) is computed before a batch is split, so that splitting it over
micro-batches or ranks cannot change the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass
class TrainingBatch:
    """One training batch; see the module's invariant for the layout.

    Shapes are ``[batch, length]`` unless stated. ``versions`` is -1 where no policy computed the token.
    ``loss_weights`` carry the reduction: the loss of a batch is ``(loss_weights * token_loss).sum()``.
    """

    tokens: Tensor  # int64
    attention_mask: Tensor  # bool
    loss_mask: Tensor  # bool
    group_ids: Tensor  # int64 [batch]: samples of one prompt share one
    trajectory_ids: Tensor | None = None  # int64 [batch]: rows of one trajectory share one; None: a row each
    behaviour_logprobs: Tensor | None = None
    versions: Tensor | None = None  # int32
    truncated: Tensor | None = None  # bool [batch]: the response did not end by itself
    rewards: Tensor | None = None  # each reward on the token that earned it
    proximal_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    loss_weights: Tensor | None = None
    approximated_version: int | None = None  # that this update makes, where the proximal policy is interpolated
    selection: Tensor | None = None  # what ``Objective.prepare`` chose on the whole mini-batch

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @staticmethod
    def concatenate(parts: Sequence[TrainingBatch]) -> TrainingBatch:
        """Batches one below the other, padded to the longest; groups and trajectories keep apart."""
        length = max(part.tokens.shape[1] for part in parts)
        columns: dict[str, Any] = {}
        for name in (f.name for f in fields(TrainingBatch)):
            values = [getattr(part, name) for part in parts]
            if all(isinstance(value, Tensor) for value in values):
                values = _apart(values) if name.endswith("_ids") else values
                columns[name] = torch.cat([_padded(value, length) for value in values])
        return TrainingBatch(**columns)

    def select(self, rows: Tensor) -> TrainingBatch:
        """The given rows (int64 ``[n]``), in that order."""
        return self._each(lambda tensor: tensor[rows])

    def trim(self) -> TrainingBatch:
        """Drop the columns in which every row is padding."""
        length = int(self.attention_mask.sum(1).max()) if len(self) else 0
        return self._each(lambda tensor: tensor[:, :length] if tensor.dim() == 2 else tensor)

    def mini_batches(self, size: int, first: int | None = None) -> Iterator[tuple[TrainingBatch, int]]:
        """Pieces of whole groups, in order, and how many groups each has: ``first``, then ``size`` at a time.

        ``size=0`` gives the whole batch as one piece.
        """
        groups = self.group_ids.unique()
        count = (size if first is None else first) if size else len(groups)
        while len(groups):
            chosen = torch.isin(self.group_ids, groups[:count])
            yield self.select(chosen.nonzero().squeeze(1)), len(groups[:count])
            groups, count = groups[count:], size

    def split(self, size: int) -> Iterator[TrainingBatch]:
        """Consecutive pieces of at most ``size`` rows."""
        for start in range(0, len(self), size):
            yield self.select(torch.arange(start, min(start + size, len(self))))

    def _each(self, function: Callable[[Tensor], Tensor]) -> TrainingBatch:
        chosen: dict[str, Any] = {}
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            chosen[name] = function(value) if isinstance(value, Tensor) else value
        return TrainingBatch(**chosen)


def _apart(identities: Sequence[Tensor]) -> list[Tensor]:
    """Numbers ``[batch]`` of several batches, moved so that no two batches share one."""
    moved, start = [], 0
    for ids in identities:
        moved.append(ids + start)
        start = int(moved[-1].max()) + 1 if len(ids) else start
    return moved


def _padded(value: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(value, (0, length - value.shape[1])) if value.dim() == 2 else value
