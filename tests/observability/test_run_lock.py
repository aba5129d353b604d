"""Two commands with one run folder."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from skyasync.errors import UserError
from skyasync.observability import run_dir

HOLDER = """
import os, sys, time
from pathlib import Path
from skyasync.observability.run_dir import lock_run
lock_run(Path(sys.argv[1]))
if os.fork() == 0:  # outlives its parent, and holds nothing
    time.sleep(3)
    os._exit(0)
print("held", flush=True)
time.sleep(60)
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    started = subprocess.Popen(
        [sys.executable, "-c", HOLDER, folder], stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None and started.stdout.readline() == "held\n"
    return started


def test_a_second_command_names_the_first_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    first = holder(tmp_path)
    try:
        for _ in range(2):  # the rejected command has changed nothing
            with pytest.raises(UserError) as refused:
                run_dir.lock_run(tmp_path)
            line = str(refused.value)
            assert (
                f"{tmp_path} is in use: process {first.pid} on {socket.gethostname()} trains there since 20"
                in line
            )
            assert "trainer.run_name" in line and "\n" not in line
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    run_dir.lock_run(tmp_path)
    run_dir.lock_run(tmp_path)  # its own
    run_dir.unlock_run(tmp_path)
    run_dir.unlock_run(tmp_path)
    assert (tmp_path / run_dir.LOCK).read_text() == ""
    second = holder(tmp_path)
    second.kill()
    second.wait()


def test_a_file_system_without_locks_is_no_reason_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", without)
    run_dir.lock_run(tmp_path)
    assert (
        "not guarded against a second command" in caplog.text
        and "No locks available" in caplog.text
    )
    run_dir.unlock_run(tmp_path)
