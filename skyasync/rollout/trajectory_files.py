"""Trajectories as Parquet files, and back: ``<run>/trajectories/step_000001.parquet``.

Invariant: what is read is bitwise identical to what was written: tokens, versions,
log-probabilities, rewards, order. A file is complete or absent. A row is a sequence; rows of one
trajectory, and trajectories of one group, are consecutive.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from skyasync.arrays import NO_FLOATS, NO_INTS, Floats, Ints, floats
from skyasync.errors import UserError
from skyasync.rollout.types import Group, Prompt, PromptId, Segment, Trajectory, TrajectoryId

TrainerLogprobs = Callable[[Ints], Floats | None]
"""The trainer's log-probabilities of a sequence; None if the trainer has not computed them."""

FOLDER = "trajectories"
NONFINITE = "nonfinite"
_META = b"skyasync"


@dataclass(frozen=True)
class RecordedStep:
    """The groups of a step, and the positions of the prompts that it consumes (see ``Rollout``).

    Args:
        trainer_logprobs: of each sequence, in the order of the rows; None if the trainer has not
            computed them.
        batches: names of the groups that were trained together, in order; empty if all groups were.
    """

    step: int
    groups: list[Group]
    positions: tuple[int, ...] = ()
    total_steps: int = 0
    trainer_logprobs: list[Floats | None] = field(default_factory=list)
    batches: list[list[str]] = field(default_factory=list)


def need_pyarrow() -> None:
    """Raises ``UserError`` if pyarrow is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(
            "trainer.dump_trajectories=true writes Parquet files, and pyarrow is not installed; add it with: uv pip "
            "install pyarrow"
        ) from error


def path_of(run: Path, step: int, folder: str = FOLDER) -> Path:
    return run / folder / f"step_{step:06d}.parquet"


def files_of(run: Path) -> list[Path]:
    """The files of a run, or of a folder of such files, in the order of their steps."""
    folder = run / FOLDER if (run / FOLDER).is_dir() else run
    return sorted(folder.glob("step_*.parquet"))


def write(
    path: Path, recorded: RecordedStep, trained: TrainerLogprobs = lambda tokens: None
) -> None:
    """Write the trajectories of a step, with the trainer's log-probabilities.

    Raises:
        OSError: if the disk does not take them; then there is no file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {
        "reward": pa.float64(),
        "tokens": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "versions": pa.list_(pa.int32()),
        "trainer_logprobs": pa.list_(pa.float32()),
        "lengths": pa.list_(pa.int32()),
        "segment_rewards": pa.list_(pa.float64()),
        "kinds": pa.list_(pa.string()),
    }
    scalars = (
        "epoch",
        "row",
        "repetition",
        "sequence",
        "env_class",
        "messages",
        "extras",
        "stop_reason",
        "metrics",
    )
    rows = []
    for group in recorded.groups:
        prompt = group.prompt
        prompt_columns = {
            "epoch": prompt.id.epoch,
            "row": prompt.id.row,
            "env_class": prompt.env_class,
            # As JSON, because rows have different columns; images become text.
            "messages": json.dumps(prompt.messages, default=str),
            "extras": json.dumps(prompt.extras, default=str),
        }
        for trajectory in group.trajectories:
            for number, segments in enumerate(trajectory.sequences):
                row = _row(trajectory, segments, trained)
                rows.append({**prompt_columns, "sequence": number, **row})
    columns: dict[str, Any] = {}
    for name in scalars:
        columns[name] = [row[name] for row in rows]
    # With types: pyarrow infers wider ones from Python's numbers, and none from empty lists.
    for name, column_type in types.items():
        columns[name] = pa.array([row[name] for row in rows], column_type)
    metadata = {
        "step": recorded.step,
        "positions": recorded.positions,
        "total_steps": recorded.total_steps,
        "batches": recorded.batches,
    }
    table = pa.table(columns).replace_schema_metadata({_META: json.dumps(metadata).encode()})
    path.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when it is complete, so that no reader finds a part of it.
    scratch = path.with_name(path.name + ".tmp")
    try:
        pq.write_table(table, scratch, compression="zstd")
        os.replace(scratch, path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def _row(
    trajectory: Trajectory, segments: Sequence[Segment], trained: TrainerLogprobs
) -> dict[str, Any]:
    tokens = np.concatenate([NO_INTS, *(s.tokens for s in segments)])
    logprobs = [NO_FLOATS]
    versions = [NO_INTS]
    for segment in segments:
        if segment.kind == "action":
            logprobs.append(segment.logprobs)
            versions.append(segment.versions)
        else:
            count = len(segment.tokens)
            logprobs.append(np.full(count, np.nan, np.float32))
            versions.append(np.full(count, -1, np.int32))
    return {
        "repetition": trajectory.id.repetition,
        "stop_reason": trajectory.stop_reason,
        "metrics": json.dumps(trajectory.metrics),
        "reward": trajectory.reward,
        "kinds": [s.kind for s in segments],
        "lengths": [len(s.tokens) for s in segments],
        "segment_rewards": [s.reward for s in segments],
        "tokens": tokens,
        "logprobs": np.concatenate(logprobs),
        "versions": np.concatenate(versions),
        "trainer_logprobs": trained(tokens),
    }


def read(path: Path) -> RecordedStep:
    """Read a file that ``write`` wrote.

    Raises:
        UserError: for a damaged or another file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        metadata = json.loads(table.schema.metadata[_META])
        rows = table.to_pylist()
        by_prompt = groupby(rows, key=itemgetter("epoch", "row"))
        groups = [_group(list(prompt_rows)) for _, prompt_rows in by_prompt]
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} has no recorded trajectories (trainer.dump_trajectories=true): {error}"
        ) from error
    logprobs: list[Floats | None] = []
    for row in rows:
        values = row["trainer_logprobs"]
        logprobs.append(None if values is None else floats(values))
    return RecordedStep(
        metadata["step"],
        groups,
        tuple(metadata["positions"]),
        metadata["total_steps"],
        logprobs,
        metadata["batches"],
    )


def _group(rows: Sequence[Mapping[str, Any]]) -> Group:
    prompt_row = rows[0]
    identity = PromptId(prompt_row["epoch"], prompt_row["row"])
    prompt = Prompt(
        identity,
        json.loads(prompt_row["messages"]),
        prompt_row["env_class"],
        json.loads(prompt_row["extras"]),
    )
    trajectories = []
    for repetition, repetition_rows in groupby(rows, key=itemgetter("repetition")):
        sequences = []
        for row in repetition_rows:
            sequences.append(list(_segments(row)))
        # The columns of a trajectory are equal in all of its rows.
        name = TrajectoryId(identity, repetition)
        metrics = json.loads(row["metrics"])
        *branches, segments = sequences
        trajectories.append(Trajectory(name, segments, row["stop_reason"], metrics, branches))
    return Group(prompt, trajectories)


def _segments(row: Mapping[str, Any]) -> Iterator[Segment]:
    start = 0
    segments = zip(row["kinds"], row["lengths"], row["segment_rewards"], strict=True)
    for kind, length, reward in segments:
        span = slice(start, start + length)
        tokens = row["tokens"][span]
        if kind == "action":
            yield Segment(kind, tokens, row["logprobs"][span], row["versions"][span], reward)
        else:
            yield Segment(kind, tokens, reward=reward)
        start += length
