"""Trajectories to tensors.

Invariant: row order is group by group, sample by sample, sequence by sequence; see ``TrainingBatch`` for the layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyasync.rollout.types import Group, Segment
from skyasync.workers.batch import TrainingBatch


def collate(groups: Sequence[Group], pad_token_id: int = 0) -> TrainingBatch:
    """All trajectories of the groups as one right-padded batch; ``group_ids`` number the groups from 0."""
    trajectories = [(g, t) for g, group in enumerate(groups) for t in group.trajectories]
    rows = [_row(sequence) for _, t in trajectories for sequence in t.sequences]
    group_ids = [g for g, t in trajectories for _ in t.sequences]
    trajectory_ids = [i for i, (_, t) in enumerate(trajectories) for _ in t.sequences]
    length = max((len(row["tokens"]) for row in rows), default=0)

    def stack(name: str, filler: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([row[name] + [filler] * (length - len(row[name])) for row in rows], dtype=dtype)

    return TrainingBatch(
        tokens=stack("tokens", pad_token_id, torch.int64),
        attention_mask=stack("attention", 0, torch.bool),
        loss_mask=stack("action", 0, torch.bool),
        group_ids=torch.tensor(group_ids, dtype=torch.int64),
        trajectory_ids=torch.tensor(trajectory_ids) if len(trajectories) < len(rows) else None,
        behaviour_logprobs=stack("logprobs", 0.0, torch.float32),
        versions=stack("versions", -1, torch.int32),
        rewards=stack("rewards", 0.0, torch.float32),
    )


def _row(sequence: list[Segment]) -> dict[str, list]:
    row: dict[str, list] = {name: [] for name in ("tokens", "action", "logprobs", "versions", "rewards")}
    for segment in sequence:
        _append(row, segment)
    row["attention"] = [1] * len(row["tokens"])
    return row


def _append(row: dict[str, list], segment: Segment) -> None:
    count, is_action = len(segment.tokens), segment.kind == "action"
    row["tokens"] += segment.tokens
    row["action"] += [int(is_action)] * count
    row["logprobs"] += segment.logprobs if is_action else [0.0] * count
    row["versions"] += segment.versions if is_action else [-1] * count
    row["rewards"] += [0.0] * count
    if segment.reward and count:
        row["rewards"][-1] = segment.reward
