"""The status of a run, as its folder tells it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from skyasync.observability.run_dir import STATUS, read_status, status_file


def test_a_run_that_goes_on_and_one_that_is_over(tmp_path: Path) -> None:
    with status_file(tmp_path):
        inside = read_status(tmp_path)
    after = read_status(tmp_path)
    assert (inside.state, inside.over) == ("running", False)
    assert (after.state, after.over) == ("finished", True)
    assert after.began == inside.began <= after.ended


@pytest.mark.parametrize(
    ("error", "state"), [(ValueError, "failed"), (KeyboardInterrupt, "stopped")]
)
def test_what_ends_a_run_is_told(tmp_path: Path, error: type[BaseException], state: str) -> None:
    with pytest.raises(error), status_file(tmp_path):
        raise error
    assert read_status(tmp_path).state == state


def test_a_run_whose_process_is_gone_is_lost(tmp_path: Path) -> None:
    with status_file(tmp_path):
        values = json.loads((tmp_path / STATUS).read_text())
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / STATUS).write_text(json.dumps(values | {"state": "running", "pid": gone.pid}))
    assert read_status(tmp_path).state == "lost"


def test_a_run_whose_processs_number_another_process_has_is_lost(tmp_path: Path) -> None:
    """In a container that is started again, numbers are small and return."""
    with status_file(tmp_path):
        values = json.loads((tmp_path / STATUS).read_text())
        (tmp_path / STATUS).write_text(json.dumps(values | {"born": "1"}))
        assert read_status(tmp_path).state == "lost"


def test_without_a_status_the_error_file_tells(tmp_path: Path) -> None:
    assert read_status(tmp_path).state == "unknown"
    (tmp_path / "error.txt").write_text("Traceback")
    assert read_status(tmp_path).state == "failed"


def test_a_disk_that_takes_nothing_does_not_end_the_run(tmp_path: Path) -> None:
    with status_file(tmp_path / "missing"):
        pass
