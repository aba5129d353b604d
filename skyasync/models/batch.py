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
    """Rows of tokens, from which a model computes log-probabilities.

    Shapes are ``[batch, length]`` unless stated.
    """

    tokens: Tensor  # int64
    attention_mask: Tensor  # bool
    loss_mask: Tensor  # bool
    group_ids: Tensor  # int64 [batch]: samples of one prompt share one
    # int64 [batch]: rows of one trajectory share one; None: each row is a trajectory
    trajectory_ids: Tensor | None = None
    routed_experts: Tensor | None = None
    """``[batch, length, layers, top_k]``: the experts that the engine's routers chose, which the
    trained model replays; the dtype's largest number if they are not known. None: the trained model
    chooses."""
    images: tuple[Images, ...] | None = None  # of each row; None: no row has any
    # int64 [batch, length, 3]: positions in time, height, width; None: those of text
    rope: Tensor | None = None

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @classmethod
    def concatenate(cls, batches: Sequence[Self]) -> Self:
        """Concatenate the rows of batches, padded to the longest.

        Groups and trajectories of different batches stay different. A tensor that a batch lacks,
        and a number in which batches differ, is None.
        """
        length = max(batch.tokens.shape[1] for batch in batches)
        result = copy(batches[0])
        if any(batch.images for batch in batches):
            images: list[Images] = []
            for batch in batches:
                images += batch.images or [()] * len(batch)
            result.images = tuple(images)
        for name in vars(result):
            if name == "images":
                continue
            attributes = [vars(batch).get(name) for batch in batches]
            tensors = [value for value in attributes if isinstance(value, Tensor)]
            if len(tensors) == len(batches):
                setattr(result, name, _concatenate_tensors(name, tensors, length))
            elif tensors or any(value != attributes[0] for value in attributes):
                setattr(result, name, None)
        return result

    def select(self, rows: Tensor) -> Self:
        """The batch of these rows (int64 ``[n]``), in that order."""
        batch = self.each(lambda tensor: tensor[rows])
        if self.images is not None:
            batch.images = tuple(self.images[row] for row in rows.tolist())
        return batch

    def trim(self) -> Self:
        """Shorten the sequence dimension to the longest row."""
        length = 0
        if len(self):  # max() needs a row
            length = int(self.attention_mask.sum(1).max())
        return self.each(lambda tensor: tensor[:, :length] if tensor.dim() >= 2 else tensor)

    def mini_batches(self, size: int, first: int | None = None) -> Iterator[tuple[Self, int]]:
        """Mini-batches of whole groups, in order, and how many groups each has.

        Args:
            size: groups at a time; 0 gives the whole batch.
            first: groups of the first one, by default ``size``.
        """
        groups = self.group_ids.unique()  # sorted
        if size:
            count = size if first is None else first
        else:
            count = len(groups)
        while len(groups):
            chosen_groups = groups[:count]
            is_chosen = torch.isin(self.group_ids, chosen_groups)  # [batch]
            yield self.select(is_chosen.nonzero().squeeze(1)), len(chosen_groups)
            groups = groups[count:]
            count = size

    def split(self, size: int) -> Iterator[Self]:
        """Consecutive batches of at most ``size`` rows."""
        for start in range(0, len(self), size):
            yield self.select(torch.arange(start, min(start + size, len(self))))

    def each(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply ``function`` to each tensor of the batch, also to those that a hook has added."""
        batch = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(batch, name, function(value))
        return batch

    def to_stage(self, stage: type[B], **tensors: Tensor | None) -> B:
        """The same batch at a later stage, with the tensors of that stage.

        Tensors that a hook has added stay.

        Raises:
            TypeError: if something that the stage promises is missing.
        """
        values = {**vars(self), **tensors}
        arguments = {}
        for field in fields(stage):
            if field.name in values:
                arguments[field.name] = values.pop(field.name)
        result = stage(**arguments)
        vars(result).update(values)
        return result


def _concatenate_tensors(name: str, tensors: list[Tensor], length: int) -> Tensor:
    """Concatenate one tensor of several batches, padded to ``length``."""
    result = []
    next_id = 0
    for tensor in tensors:
        if name.endswith("_ids"):
            # Groups of different batches may have equal ids, and are different groups.
            tensor = tensor + next_id
            if len(tensor):
                next_id = int(tensor.max()) + 1
        elif tensor.dim() >= 2:
            # pad takes the last dimension first: only the sequence dimension grows.
            inner_dimensions = [0, 0] * (tensor.dim() - 2)
            tensor = pad(tensor, (*inner_dimensions, 0, length - tensor.shape[1]))
        result.append(tensor)
    return torch.cat(result)


@dataclass(kw_only=True)
class RolloutBatch(TokenBatch):
    """Trajectories as they were sampled and rewarded.

    ``versions`` is -1 where no policy computed the token.
    """

    behaviour_logprobs: Tensor
    versions: Tensor  # int32
    truncated: Tensor  # bool [batch]: the response did not end by itself
    rewards: Tensor  # each reward on the token that earned it


@dataclass(kw_only=True)
class ScoredBatch(RolloutBatch):
    """A batch with log-probabilities and values of the trainer's models.

    It has those that the objective needs.

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
    # The version that this update makes, where the proximal policy is interpolated.
    approximated_version: int | None = None
    correction_exponent: float = 1.0  # of the off-policy correction's factors
    critic_alone: bool = False  # a critic on the policy's layers learns from it, and no policy
