"""The stopwatch finds seconds that no row has, and benchmarks take a step's time between the ends of steps."""

import pytest

from benchmarks.step_ends import step_times
from benchmarks.stopwatch import line

ROWS = [
    {"step": step, "time": 100.0 + 2.0 * step, "time/step_s": 2.0, "time/interval_s": 2.0,
     "throughput/samples_per_s": 50.0}
    for step in range(1, 5)
]  # fmt: skip


def cells(rows):
    return [cell.strip() for cell in line("sync", rows).strip("| ").split("|")]


def test_a_run_whose_steps_are_those_of_the_watch_has_no_difference():
    assert cells(ROWS) == ["`sync`", "6.00 s", "6.00 s", "0.00 s", "+0.00%", "0.000 s", "50", "50"]


def test_seconds_that_no_step_has_are_a_difference():
    late = [row | {"time": 100.0 + 3.0 * row["step"]} for row in ROWS]
    assert cells(late)[1:6] == ["9.00 s", "6.00 s", "0.00 s", "-33.33%", "1.000 s"]


def test_an_evaluation_between_steps_is_not_one():
    late = [row | {"time": row["time"] + 5.0 * (row["step"] > 2)} for row in ROWS]
    late[2] = late[2] | {"time/eval_s": 5.0}
    assert cells(late)[1:6] == ["11.00 s", "6.00 s", "5.00 s", "+0.00%", "0.000 s"]


def test_a_steps_time_is_that_between_two_ends_and_the_first_has_none():
    rows = [
        {"step": 1, "time": 7.0},
        {"step": 2, "time": 9.5},
        {"step": 5, "time": 20.0},
        {"step": 6, "time": 21.0},
    ]
    assert step_times(rows) == pytest.approx({2: 2.5, 6: 1.0})
