"""Trajectories to tensors.

Invariant: row order is group by group, sample by sample, sequence by sequence; see ``RolloutBatch`` for the layout.
Memory is touched only as rows are filled, in pieces, so that an event loop can have its turn in between: a large batch
takes a tenth of a second and more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skyasync.arrays import TURN_TOKENS, Experts, joined_experts
from skyasync.models.batch import RolloutBatch
from skyasync.rollout.types import Group, Segment


def collate(groups: Sequence[Group], pad_token_id: int = 0) -> RolloutBatch:
    """All trajectories of the groups as one right-padded batch; ``group_ids`` number the groups from 0."""
    columns = _Columns.blank(groups)
    for _ in columns.fill(groups, pad_token_id):
        pass
    return columns.batch(groups)


async def collate_in_turns(groups: Sequence[Group], pad_token_id: int = 0) -> RolloutBatch:
    """``collate`` that lets other tasks run after each group, and within a large one."""
    columns = _Columns.blank(groups)
    for _ in columns.fill(groups, pad_token_id):
        await asyncio.sleep(0)
    return columns.batch(groups)


@dataclass
class _Columns:
    """What has an entry per token, ``[rows, length]``. The system gives zeros, and memory as it is written to."""

    tokens: NDArray[np.int64]
    attention_mask: NDArray[np.bool_]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    rewards: NDArray[np.float32]
    experts: Experts | None  # [rows, length, layers, top_k]

    @staticmethod
    def blank(groups: Sequence[Group]) -> _Columns:
        lengths = [sum(len(s.tokens) for s in q) for g in groups for t in g.trajectories for q in t.sequences]
        shape = (len(lengths), max(lengths, default=0))
        like = _experts_of(groups)
        return _Columns(
            tokens=np.zeros(shape, np.int64),
            attention_mask=np.zeros(shape, np.bool_),
            loss_mask=np.zeros(shape, np.bool_),
            logprobs=np.zeros(shape, np.float32),
            versions=np.zeros(shape, np.int32),
            rewards=np.zeros(shape, np.float32),
            experts=None if like is None else np.empty(shape + like.shape[1:], like.dtype),
        )

    def fill(self, groups: Sequence[Group], pad_token_id: int) -> Iterator[None]:
        """Write the rows, pausing behind each group and ``TURN_TOKENS``."""
        row = written = 0
        for group in groups:
            for sequence in (sequence for trajectory in group.trajectories for sequence in trajectory.sequences):
                if written >= TURN_TOKENS:
                    written = 0
                    yield
                self._put(row, sequence, pad_token_id)
                written += self.tokens.shape[1]
                row += 1
            written = 0
            yield

    def _put(self, row: int, sequence: Sequence[Segment], pad_token_id: int) -> None:
        self.versions[row] = -1
        if self.experts is not None:
            self._put_experts(self.experts[row], sequence)
        end = 0
        for segment in sequence:
            start, end = end, end + len(segment.tokens)
            self.tokens[row, start:end] = segment.tokens
            if segment.kind == "action":
                self.loss_mask[row, start:end] = True
                self.logprobs[row, start:end] = segment.logprobs
                self.versions[row, start:end] = segment.versions
            if segment.reward and len(segment.tokens):
                self.rewards[row, end - 1] = segment.reward
        self.attention_mask[row, :end] = True
        if pad_token_id:
            self.tokens[row, end:] = pad_token_id

    def _put_experts(self, row: Experts, sequence: Sequence[Segment]) -> None:
        known = joined_experts(segment.experts for segment in sequence)
        count = 0 if known is None else len(known)
        if known is not None:
            row[:count] = known
        row[count:] = np.iinfo(row.dtype).max

    def batch(self, groups: Sequence[Group]) -> RolloutBatch:
        trajectories = [(g, t) for g, group in enumerate(groups) for t in group.trajectories]
        owners = [(i, g, t) for i, (g, t) in enumerate(trajectories) for _ in t.sequences]
        return RolloutBatch(
            tokens=torch.from_numpy(self.tokens),
            attention_mask=torch.from_numpy(self.attention_mask),
            loss_mask=torch.from_numpy(self.loss_mask),
            group_ids=_ids(g for _, g, _ in owners),
            trajectory_ids=_ids(i for i, _, _ in owners) if len(trajectories) < len(owners) else None,
            truncated=torch.tensor([t.stop_reason != "stop" for _, _, t in owners], dtype=torch.bool),
            behaviour_logprobs=torch.from_numpy(self.logprobs),
            versions=torch.from_numpy(self.versions),
            rewards=torch.from_numpy(self.rewards),
            routed_experts=None if self.experts is None else torch.from_numpy(self.experts),
        )


def _experts_of(groups: Sequence[Group]) -> Experts | None:
    """Those of any segment."""
    actions = (s for group in groups for t in group.trajectories for s in t.actions)
    return next((s.experts for s in actions if s.experts is not None), None)


def _ids(numbers: Iterator[int]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.int64)
