"""The tensors that training sees, in the stages that a step makes of them.

Invariant: every per-token tensor is ``[batch, length, ...]``, right-padded, aligned with
``tokens``: entry t belongs to token t, and entry 0 (which nothing predicts) is never a loss token.
Everything that needs the whole batch (loss weights, advantages) is computed before a batch is
split, so that splitting it over micro-batches or ranks cannot change the gradient. A batch has all
that its stage promises:

    TokenBatch ◁─ RolloutBatch ──▶ ScoredBatch ──▶ TrainingBatch ──▶ UpdateBatch
    a model's       as collated      proximal and     advantages       loss weights
    inputs                           reference                         of a mini-batch
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from skyasync.models.images import Images

B = TypeVar("B", bound="TokenBatch")


@dataclass
class TokenBatch:
    """Rows of tokens: enough to ask a model for log-probabilities. Shapes are ``[batch, length]``
    unless stated."""

    tokens: Tensor  # int64
    attention_mask: Tensor  # bool
    loss_mask: Tensor  # bool
    group_ids: Tensor  # int64 [batch]: samples of one prompt share one
    trajectory_ids: Tensor | None = (
        None  # int64 [batch]: rows of one trajectory share one; None: a row each
    )
    routed_experts: Tensor | None = None
    """``[batch, length, layers, top_k]``: the experts that the engine's routers chose, which the
    trained model replays; the dtype's largest number if they are not known. None: the trained model
    chooses."""
    images: tuple[Images, ...] | None = None  # of each row; None: no row has any
    rope: Tensor | None = (
        None  # int64 [batch, length, 3]: positions in time, height, width; None: those of text
    )

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Concatenated rows, padded to the longest; groups and trajectories of different batches
        stay different.

        A tensor that a part lacks, and a number in which parts differ, is None.
        """
        length = max(part.tokens.shape[1] for part in parts)
        whole = copy(parts[0])
        if any(part.images for part in parts):
            whole.images = tuple(row for part in parts for row in part.images or ((),) * len(part))
        for name in vars(whole):
            if name == "images":
                continue
            values = [value for part in parts if isinstance(value := vars(part).get(name), Tensor)]
            if len(values) < len(parts):
                given = [vars(part).get(name) for part in parts]
                setattr(
                    whole,
                    name,
                    None if values or any(value != given[0] for value in given) else given[0],
                )
                continue
            start = 0
            for i, value in enumerate(values):
                if name.endswith("_ids"):
                    values[i] = value + start
                    if len(value):
                        start = int(values[i].max()) + 1
                    else:
                        start = start
                elif value.dim() >= 2:
                    values[i] = pad(
                        value, (*[0, 0] * (value.dim() - 2), 0, length - value.shape[1])
                    )
            setattr(whole, name, torch.cat(values))
        return whole

    def select(self, rows: Tensor) -> Self:
        """The given rows (int64 ``[n]``), in that order."""
        selected = self.each(lambda tensor: tensor[rows])
        if self.images is not None:
            selected.images = tuple(self.images[row] for row in rows.tolist())
        return selected

    def trim(self) -> Self:
        """Shorten the sequence dimension to the longest row."""
        if len(self):
            length = int(self.attention_mask.sum(1).max())
        else:
            length = 0
        return self.each(lambda tensor: tensor[:, :length] if tensor.dim() >= 2 else tensor)

    def mini_batches(self, size: int, first: int | None = None) -> Iterator[tuple[Self, int]]:
        """Mini-batches of whole groups, in order, and how many groups each has: ``first``, then
        ``size`` at a time.

        ``size=0`` gives the whole batch.
        """
        groups = self.group_ids.unique()
        if size:
            count = size if first is None else first
        else:
            count = len(groups)
        while len(groups):
            chosen = torch.isin(self.group_ids, groups[:count])
            yield self.select(chosen.nonzero().squeeze(1)), len(groups[:count])
            groups = groups[count:]
            count = size

    def split(self, size: int) -> Iterator[Self]:
        """Consecutive batches of at most ``size`` rows."""
        for start in range(0, len(self), size):
            yield self.select(torch.arange(start, min(start + size, len(self))))

    def each(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The batch with ``function`` applied to each of its tensors, also to those that a hook has
        added."""
        changed = copy(self)
        vars(changed).update(
            {name: function(v) for name, v in vars(self).items() if isinstance(v, Tensor)}
        )
        return changed

    def to_stage(self, stage: type[B], **more: Tensor | None) -> B:
        """The same batch at a later stage, with the tensors of that stage. Tensors that a hook has
        added are kept.

        Raises:
            TypeError: if something that the stage promises is missing.
        """
        values = {**vars(self), **more}
        result = stage(**{f.name: values.pop(f.name) for f in fields(stage) if f.name in values})
        vars(result).update(values)
        return result


@dataclass(kw_only=True)
class RolloutBatch(TokenBatch):
    """Trajectories as they were sampled and rewarded. ``versions`` is -1 where no policy computed
    the token."""

    behaviour_logprobs: Tensor
    versions: Tensor  # int32
    truncated: Tensor  # bool [batch]: the response did not end by itself
    rewards: Tensor  # each reward on the token that earned it


@dataclass(kw_only=True)
class ScoredBatch(RolloutBatch):
    """With log-probabilities and values of the trainer's own models, as far as the objective needs
    them.

    Without ``proximal_logprobs`` the current policy is the proximal one, and the update fills them
    in; without ``reference_logprobs`` nothing is compared with a reference model, without
    ``teacher_logprobs`` there is no teacher. ``values`` are the critic's, before its update.
    ``teacher_top_k``, ``[batch, length, 2 k]``, has the k tokens that the teacher finds most
    likely, and after them their log-probabilities.
    """

    proximal_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    teacher_top_k: Tensor | None = None
    values: Tensor | None = None


@dataclass(kw_only=True)
class TrainingBatch(ScoredBatch):
    """A whole batch that is ready to be trained on, or mini-batches of it."""

    advantages: Tensor
    returns: Tensor | None = None  # what the critic learns


@dataclass(kw_only=True)
class UpdateBatch(TrainingBatch):
    """A mini-batch, or a part of one, as the workers get it.

    ``loss_weights`` carry the reduction: the loss of a batch is
    ``(loss_weights * token_loss).sum()``.
    """

    loss_weights: Tensor
    selection: Tensor | None = None  # what ``Objective.prepare`` chose on the whole mini-batch
    approximated_version: int | None = (
        None  # that this update makes, where the proximal policy is interpolated
    )
    correction_exponent: float = 1.0  # of the off-policy correction's factors
    critic_alone: bool = False  # a critic on the policy's layers learns from it, and no policy
