"""The watchdog of a killed program removes its files itself, and Ray's folder is where the audit looks for it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from skyasync.run.watchdog import private_folder
from tests.chaos.driver import ENVIRONMENT, scratch_folder
from tests.chaos.leaks import clean_up, temporary_files
from tests.chaos.process_tree import marked

PROGRAM = """
import os, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
from skyasync.run.watchdog import VARIABLE, Watchdog
dog = Watchdog()
subprocess.Popen(["sleep", "600"], env={**os.environ, VARIABLE: dog.mark})
print(dog.folder, flush=True)
time.sleep(600)
"""


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    folder = scratch_folder()
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, str(folder))
    return folder


def test_rays_folder_is_a_temporary_file_and_reported_only_if_it_stays(scratch: Path) -> None:
    folder = private_folder()
    try:
        assert Path(folder).parent == scratch
        assert temporary_files(scratch) == [f"temporary {folder}"]
    finally:
        os.rmdir(folder)
        scratch.rmdir()


def test_a_watchdog_may_end_its_work_before_what_is_left_is_killed(scratch: Path) -> None:
    mark = f"{ENVIRONMENT[0]}={scratch}"
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(Path.cwd())], stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    folder = Path(program.stdout.readline().strip())
    assert folder.parent == scratch
    while (
        len(marked(mark)) < 3
    ):  # program, watchdog, part: a process that has just started has no environment to read
        time.sleep(0.01)
    program.kill()
    program.wait()
    clean_up([], mark)
    assert not marked(mark)
    assert not folder.exists()
    scratch.rmdir()
