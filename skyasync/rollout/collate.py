"""Trajectories to tensors (``RolloutBatch``).

Rows are group by group, sample by sample, sequence by sequence.

Memory is touched only as rows are filled, step by step, so that other tasks can run in between: a
large batch takes a tenth of a second and more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from skyasync.arrays import TURN_TOKENS, joined_experts
from skyasync.models.batch import RolloutBatch
from skyasync.rollout.types import Group, Segment, Trajectory, images_in


def collate(groups: Sequence[Group]) -> RolloutBatch:
    """All trajectories as one batch, padded by zeros on the right; ``group_ids`` count from 0."""
    collation = _Collation(groups)
    for _ in collation.fill():
        pass
    return collation.batch()


async def collate_in_turns(groups: Sequence[Group]) -> RolloutBatch:
    """``collate`` that lets other tasks run after each group, and within a large one."""
    collation = _Collation(groups)
    for _ in collation.fill():
        await asyncio.sleep(0)
    return collation.batch()


class _Row(NamedTuple):
    """A sequence, and the numbers of its group and its trajectory."""

    group: int
    number: int
    trajectory: Trajectory
    sequence: list[Segment]


class _Collation:
    """The arrays of a batch, with one entry per token: ``[rows, length]``.

    Arrays of zeros take memory only when they are written to.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._rows: list[_Row] = []
        length = 0
        number = 0  # of the trajectory
        for group_number, group in enumerate(groups):
            for trajectory in group.trajectories:
                for sequence in trajectory.sequences:
                    self._rows.append(_Row(group_number, number, trajectory, sequence))
                    length = max(length, sum(len(segment.tokens) for segment in sequence))
                number += 1
        shape = (len(self._rows), length)
        # All are [rows, length].
        self._tokens = np.zeros(shape, np.int64)
        self._attention_mask = np.zeros(shape, np.bool_)
        self._loss_mask = np.zeros(shape, np.bool_)
        self._logprobs = np.zeros(shape, np.float32)
        self._versions = np.zeros(shape, np.int32)
        self._rewards = np.zeros(shape, np.float32)
        experts = (s.experts for row in self._rows for s in row.sequence if s.experts is not None)
        example = next(experts, None)  # [tokens, layers, top_k]
        if example is None:
            self._experts = None
        else:
            # [rows, length, layers, top_k]
            self._experts = np.empty(shape + example.shape[1:], example.dtype)

    def fill(self) -> Iterator[None]:
        """Write the rows, with a pause after each group and after ``TURN_TOKENS``."""
        written_tokens = 0
        group = 0
        for index, row in enumerate(self._rows):
            if written_tokens >= TURN_TOKENS or row.group != group:
                written_tokens = 0
                group = row.group
                yield
            self._versions[index] = -1
            if self._experts is not None:
                experts = joined_experts(segment.experts for segment in row.sequence)
                count = 0 if experts is None else len(experts)
                if experts is not None:
                    self._experts[index, :count] = experts
                # The largest value stands for no expert (``models.router_replay``).
                self._experts[index, count:] = np.iinfo(self._experts.dtype).max
            end = 0
            for segment in row.sequence:
                start = end
                end += len(segment.tokens)
                self._tokens[index, start:end] = segment.tokens
                if segment.kind == "action":
                    self._loss_mask[index, start:end] = True
                    self._logprobs[index, start:end] = segment.logprobs
                    self._versions[index, start:end] = segment.versions
                if segment.reward:
                    # On its last token, or the token before if the response has none.
                    self._rewards[index, end - 1] += segment.reward
            self._attention_mask[index, :end] = True
            written_tokens += self._tokens.shape[1]
        yield

    def batch(self) -> RolloutBatch:
        rows = self._rows
        images = tuple(images_in(row.sequence) for row in rows)
        numbers = [row.number for row in rows]
        trajectory_ids = None  # unless a trajectory has several rows
        if len(set(numbers)) < len(rows):
            trajectory_ids = torch.tensor(numbers, dtype=torch.int64)
        truncated = [row.trajectory.stop_reason != "stop" for row in rows]
        return RolloutBatch(
            tokens=torch.from_numpy(self._tokens),
            attention_mask=torch.from_numpy(self._attention_mask),
            loss_mask=torch.from_numpy(self._loss_mask),
            group_ids=torch.tensor([row.group for row in rows], dtype=torch.int64),
            trajectory_ids=trajectory_ids,
            truncated=torch.tensor(truncated, dtype=torch.bool),
            behaviour_logprobs=torch.from_numpy(self._logprobs),
            versions=torch.from_numpy(self._versions),
            rewards=torch.from_numpy(self._rewards),
            routed_experts=None if self._experts is None else torch.from_numpy(self._experts),
            images=images if any(images) else None,
        )
