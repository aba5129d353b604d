"""Trajectories as files: reading returns what was written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from skyasync.arrays import Floats, Ints, floats
from skyasync.errors import UserError
from skyasync.rollout.metrics import MAX_SHOWN_TOKENS, token_columns
from skyasync.rollout.trajectory_files import RecordedStep, files_of, path_of, read, write
from skyasync.rollout.types import Group, Prompt, PromptId, Segment, Trajectory, TrajectoryId


def prompt(row: int) -> Prompt:
    return Prompt(
        PromptId(2, row), [{"role": "user", "content": f"row {row} ü"}], "env", {"label": [1, row]}
    )


def talk(of: Prompt, repetition: int, *, branches: int = 0) -> Trajectory:
    def sequence(first: int) -> list[Segment]:
        return [
            Segment("prompt", [first, 2]),
            Segment("action", [3, 4], [-0.125, -0.1], [5, 6], reward=0.1),
            Segment("observation", [7]),
            Segment("action", [8], [-3.0], [6], reward=0.7),
        ]

    identity = TrajectoryId(of.id, repetition)
    return Trajectory(
        identity, sequence(1), "length", {"calls": 2.0}, [sequence(9 + n) for n in range(branches)]
    )


@pytest.fixture
def groups() -> list[Group]:
    return [
        Group(prompt(row), [talk(prompt(row), n, branches=n) for n in range(2)]) for row in (4, 1)
    ]


def test_what_is_read_is_what_was_written(groups: list[Group], tmp_path: Path) -> None:
    path = path_of(tmp_path, 3)
    write(path, RecordedStep(3, groups, positions=(7, 9, 11), total_steps=7))
    found = read(path)
    assert found.groups == groups
    assert (found.step, found.positions, found.total_steps) == (3, (7, 9, 11), 7)
    assert found.trainer_logprobs == [None] * 6
    assert files_of(tmp_path) == files_of(path.parent) == [path]


def test_the_trainers_log_probabilities_are_saved_with_each_sequence(
    groups: list[Group], tmp_path: Path
) -> None:
    def trained(tokens: Ints) -> Floats | None:
        return None if tokens[0] == 9 else floats(tokens) / 2

    write(path_of(tmp_path, 1), RecordedStep(1, groups), trained)
    first, branch, last = read(path_of(tmp_path, 1)).trainer_logprobs[:3]
    assert branch is None
    assert first is not None and last is not None
    np.testing.assert_array_equal(first, floats([1, 2, 3, 4, 7, 8]) / 2)


def test_a_file_that_is_none_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "step_000001.parquet").write_bytes(b"no parquet")
    with pytest.raises(UserError, match=r"step_000001.parquet has no recorded trajectories"):
        read(tmp_path / "step_000001.parquet")


def test_a_disk_that_is_full_leaves_no_file(groups: list[Group], tmp_path: Path) -> None:
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "step_000001.parquet.tmp").mkdir()  # it cannot be written to
    with pytest.raises(OSError):
        write(path_of(tmp_path, 1), RecordedStep(1, groups))
    assert files_of(tmp_path) == []


def test_tokens_for_people_name_who_said_them() -> None:
    columns = token_columns(
        talk(prompt(1), 0).segments, lambda tokens: f"<{tokens[0]}>", floats([0, 0, -1, -2, 0, -3])
    )
    assert columns == {
        "text": ["<3>", "<4>", "<7>", "<8>"],
        "versions": [5, 6, -1, 6],
        "logprobs": [-0.125, -0.1, None, -3.0],
        "trainer_logprobs": [-1.0, -2.0, None, -3.0],
    }


def test_a_long_response_is_cut() -> None:
    many = MAX_SHOWN_TOKENS + 5
    segments = [Segment("prompt", [1]), Segment("action", [2] * many, [0.0] * many, [0] * many)]
    assert {len(column) for column in token_columns(segments, str).values()} == {MAX_SHOWN_TOKENS}
