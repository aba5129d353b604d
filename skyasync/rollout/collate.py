"""Trajectories to tensors: rows are group by group, sample by sample, sequence by sequence (see
``RolloutBatch``).

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
    """All trajectories of the groups as one batch, right-padded by zeros; ``group_ids`` number the
    groups from 0."""
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
    """One entry per token, ``[rows, length]``. Arrays of zeros take memory only when they are
    written to."""

    def __init__(self, groups: Sequence[Group]) -> None:
        owners = (
            (g, trajectory) for g, group in enumerate(groups) for trajectory in group.trajectories
        )
        self._rows = [
            _Row(group, number, trajectory, sequence)
            for number, (group, trajectory) in enumerate(owners)
            for sequence in trajectory.sequences
        ]
        shape = (
            len(self._rows),
            max((sum(len(s.tokens) for s in row.sequence) for row in self._rows), default=0),
        )
        self._tokens = np.zeros(shape, np.int64)
        self._attention_mask = np.zeros(shape, np.bool_)
        self._loss_mask = np.zeros(shape, np.bool_)
        self._logprobs = np.zeros(shape, np.float32)
        self._versions = np.zeros(shape, np.int32)
        self._rewards = np.zeros(shape, np.float32)
        actions = (s for row in self._rows for s in row.sequence if s.kind == "action")
        like = next((s.experts for s in actions if s.experts is not None), None)
        #: [rows, length, layers, top_k]
        if like is None:
            self._experts = None
        else:
            self._experts = np.empty(shape + like.shape[1:], like.dtype)

    def fill(self) -> Iterator[None]:
        """Write the rows, with a pause after each group and after ``TURN_TOKENS``."""
        written = group = 0
        for index, row in enumerate(self._rows):
            if written >= TURN_TOKENS or row.group != group:
                written = 0
                group = row.group
                yield
            self._versions[index] = -1
            if self._experts is not None:
                known = joined_experts(segment.experts for segment in row.sequence)
                count = 0 if known is None else len(known)
                if known is not None:
                    self._experts[index, :count] = known
                self._experts[index, count:] = np.iinfo(self._experts.dtype).max
            end = 0
            for segment in row.sequence:
                start = end
                end = end + len(segment.tokens)
                self._tokens[index, start:end] = segment.tokens
                if segment.kind == "action":
                    self._loss_mask[index, start:end] = True
                    self._logprobs[index, start:end] = segment.logprobs
                    self._versions[index, start:end] = segment.versions
                if segment.reward:  # of a response without tokens: on the token before
                    self._rewards[index, end - 1] += segment.reward
            self._attention_mask[index, :end] = True
            written += self._tokens.shape[1]
        yield

    def batch(self) -> RolloutBatch:
        rows = self._rows
        images = tuple(images_in(row.sequence) for row in rows)
        branched = len({row.number for row in rows}) < len(rows)
        return RolloutBatch(
            tokens=torch.from_numpy(self._tokens),
            attention_mask=torch.from_numpy(self._attention_mask),
            loss_mask=torch.from_numpy(self._loss_mask),
            group_ids=torch.tensor([row.group for row in rows], dtype=torch.int64),
            trajectory_ids=torch.tensor([row.number for row in rows], dtype=torch.int64)
            if branched
            else None,
            truncated=torch.tensor(
                [row.trajectory.stop_reason != "stop" for row in rows], dtype=torch.bool
            ),
            behaviour_logprobs=torch.from_numpy(self._logprobs),
            versions=torch.from_numpy(self._versions),
            rewards=torch.from_numpy(self._rewards),
            routed_experts=None if self._experts is None else torch.from_numpy(self._experts),
            images=images if any(images) else None,
        )
