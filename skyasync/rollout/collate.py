"""Trajectories to tensors.

Invariant: row order is group by group, sample by sample, sequence by sequence; see ``TrainingBatch`` for the layout.
Rows are filled one by one, so that an event loop can have its turn in between: a large batch takes a tenth of a
second and more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from skyasync.rollout.types import Group, Segment
from skyasync.workers.batch import TrainingBatch


def collate(groups: Sequence[Group], pad_token_id: int = 0) -> TrainingBatch:
    """All trajectories of the groups as one right-padded batch; ``group_ids`` number the groups from 0."""
    batch = _blank(groups, pad_token_id)
    for _ in _fill(batch, groups):
        pass
    return batch


async def collate_in_turns(groups: Sequence[Group], pad_token_id: int = 0) -> TrainingBatch:
    """``collate`` that lets other tasks run after each group."""
    batch = _blank(groups, pad_token_id)
    for _ in _fill(batch, groups):
        await asyncio.sleep(0)
    return batch


def _blank(groups: Sequence[Group], pad_token_id: int) -> TrainingBatch:
    trajectories = [(g, t) for g, group in enumerate(groups) for t in group.trajectories]
    group_ids = [g for g, t in trajectories for _ in t.sequences]
    trajectory_ids = [i for i, (_, t) in enumerate(trajectories) for _ in t.sequences]
    lengths = [sum(len(s.tokens) for s in sequence) for _, t in trajectories for sequence in t.sequences]
    shape = (len(lengths), max(lengths, default=0))
    return TrainingBatch(
        tokens=torch.full(shape, pad_token_id, dtype=torch.int64),
        attention_mask=torch.zeros(shape, dtype=torch.bool),
        loss_mask=torch.zeros(shape, dtype=torch.bool),
        group_ids=torch.tensor(group_ids, dtype=torch.int64),
        trajectory_ids=torch.tensor(trajectory_ids) if len(trajectories) < len(lengths) else None,
        truncated=torch.tensor([t.stop_reason != "stop" for _, t in trajectories for _ in t.sequences]),
        behaviour_logprobs=torch.zeros(shape),
        versions=torch.full(shape, -1, dtype=torch.int32),
        rewards=torch.zeros(shape),
    )


def _fill(batch: TrainingBatch, groups: Sequence[Group]) -> Iterator[None]:
    """Write the rows, pausing behind each group."""
    row = 0
    for group in groups:
        for sequence in (sequence for trajectory in group.trajectories for sequence in trajectory.sequences):
            _put(batch, row, sequence)
            row += 1
        yield


def _put(batch: TrainingBatch, row: int, sequence: Sequence[Segment]) -> None:
    assert batch.behaviour_logprobs is not None and batch.versions is not None and batch.rewards is not None
    end = 0
    for segment in sequence:
        start, end = end, end + len(segment.tokens)
        _write(batch.tokens, row, start, segment.tokens)
        if segment.kind == "action":
            batch.loss_mask[row, start:end] = True
            _write(batch.behaviour_logprobs, row, start, segment.logprobs)
            _write(batch.versions, row, start, segment.versions)
        if segment.reward and segment.tokens:
            batch.rewards[row, end - 1] = segment.reward
    batch.attention_mask[row, :end] = True


def _write(target: Tensor, row: int, start: int, values: list) -> None:
    if values:
        target[row, start : start + len(values)] = torch.tensor(values, dtype=target.dtype)
