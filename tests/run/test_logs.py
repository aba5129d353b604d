"""Output of processes: all of it in files, messages for the user on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyasync.run.logs import BURST, ProcessLogs, last_words


class Shown(list[tuple[str, bool]]):
    def __call__(self, lines: Any, error: bool) -> None:
        self.extend((line, error) for line in lines)


@pytest.fixture
def shown() -> Shown:
    return Shown()


@pytest.fixture
def logs(tmp_path: Path, shown: Shown) -> ProcessLogs:
    return ProcessLogs(tmp_path / "logs", shown)


def batch(
    *lines: str, pid: Any = 7, name: str | None = "Controller", error: bool = False, **more: Any
) -> dict[str, Any]:
    return {
        "pid": pid,
        "actor_name": name,
        "is_err": error,
        "lines": lines,
        "ip": "h",
        "localhost": "h",
        **more,
    }


def test_each_process_has_a_file_named_by_what_it_does(logs: ProcessLogs) -> None:
    logs(batch("a"))
    logs(batch("b", pid=8, name="_EngineActor"))
    logs(batch("c", pid=9, name="PolicyWorker"))
    logs(batch("d", pid=10, name="RpcActor"))
    logs(batch("e", pid=11, name=None))
    logs(batch("f", pid="raylet", name=None))
    logs(batch("g", pid=8, name="_EngineActor", ip="1.2.3.4"))
    logs(batch("more", pid=8, name="_EngineActor"))
    assert {file.name: file.read_text() for file in logs.folder.iterdir()} == {
        "controller-7.log": "a\n", "engine-8.log": "b\nmore\n", "policy-9.log": "c\n", "environment-10.log": "d\n",
        "process-11.log": "e\n", "ray.log": "f\n", "engine-1.2.3.4-8.log": "g\n",
    }  # fmt: skip


def test_what_users_code_prints_is_shown_as_it_was_printed_and_engines_are_quiet(
    logs: ProcessLogs, shown: Shown
) -> None:
    logs(batch("50%|##  | of a print", ""))
    logs(batch("a warning of ours", error=True))
    logs(batch("seen by an environment", pid=10, name="RpcActor"))
    logs(batch("INFO vllm says", pid=8, name="_EngineActor"))
    logs(batch("worker 3 was slow", pid="raylet", name=None))
    logs(batch("Node status", ":event_summary:Adding 1 node", pid="autoscaler", name=None))
    assert shown == [
        ("50%|##  | of a print", False), ("", False), ("a warning of ours", True), ("seen by an environment", False),
        ("Adding 1 node", False),
    ]  # fmt: skip


def test_bars_and_warnings_of_libraries_are_in_the_file_alone(
    logs: ProcessLogs, shown: Shown
) -> None:
    noise = [
        "Loading weights",
        "Failed to load CPU gemm_4bit_forward from kernels-community: no module. Please make sure you already ...",
        "Loading weights:  50%|█████     | 1/2 [00:00<00:00,  9.1it/s]",
        "/v/lib/python3.11/site-packages/torch/a.py:12: UserWarning: old",
        "  warnings.warn(",
        "[2026-08-01 10:00:00,000 W 12 34] core_worker.cc:1: slow",
        "[W801 10:00:00.1 Module.cpp:178] symbolizing",
    ]
    logs(
        batch(
            "mine",
            *noise,
            "  mine too",
            "/home/me/hooks.py:3: UserWarning: of the user's",
            error=True,
        )
    )
    assert [line for line, _ in shown] == [
        "mine",
        "  mine too",
        "/home/me/hooks.py:3: UserWarning: of the user's",
    ]
    assert all(line in (logs.folder / "controller-7.log").read_text() for line in noise)


def test_a_line_of_output_between_a_warning_and_its_source_changes_nothing(
    logs: ProcessLogs, shown: Shown
) -> None:
    logs(batch("/v/lib/python3.11/site-packages/torch/a.py:12: UserWarning: old", error=True))
    logs(batch("a line of the user's"))
    logs(batch("  warnings.warn(", error=True))
    assert [line for line, _ in shown] == ["a line of the user's"]


def test_a_flood_is_shown_in_part_and_says_where_the_rest_is(
    logs: ProcessLogs, shown: Shown
) -> None:
    for _ in range(3):
        logs(batch(*["again"] * BURST))
    assert BURST <= len(shown) < 1.2 * BURST
    assert next(line for line, _ in shown if "the rest is in" in line).endswith("controller-7.log)")
    assert (logs.folder / "controller-7.log").read_text().count("again") == 3 * BURST


def test_an_error_shows_the_last_lines_of_processes_with_errors_and_of_the_failed_one(
    logs: ProcessLogs,
) -> None:
    logs(batch("well", pid=8, name="_EngineActor"))
    logs(batch("RuntimeError: no memory", pid=9, name="_EngineActor"))
    logs(batch("calm", pid=10, name="PolicyWorker"))
    logs(batch("calm", pid=11, name="PolicyWorker"))
    said = last_words(logs, RuntimeError("The actor died unexpectedly\n\tpid: 10\n"))
    assert "logs/engine-9.log:\nRuntimeError: no memory" in said and "policy-10.log" in said
    assert "engine-8" not in said and "policy-11" not in said


def test_if_the_file_cannot_be_written_the_terminal_shows_all_output(
    tmp_path: Path, shown: Shown
) -> None:
    (tmp_path / "logs").touch()
    ProcessLogs(tmp_path / "logs", shown)(batch("an engine's", name="_EngineActor"))
    assert shown == [("an engine's", False)]
