"""A small file system that is filled, made read-only and repaired while a run writes to it, and runs on it.

Invariant: writes fail in the kernel, with ENOSPC or EROFS, in the process that writes.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyasync import TrainerCallback
from skyasync.config.schema import Config
from tests.faults.warnings_file import WarningsToFile

SIZE_MIB = 64
BALLAST = "ballast"

FULL, READ_ONLY, WELL = "full", "read-only", "well"

States = dict[int, str]  # after this step: the new state of the disk


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system for this test, which is skipped if none can be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m,mode=700", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> None:
    with contextlib.suppress(OSError), (disk / BALLAST).open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


def empty(disk: Path) -> None:
    (disk / BALLAST).unlink(missing_ok=True)


def forbid(disk: Path) -> None:
    """Reject opening files for writing: a file system with open files cannot be remounted read-only."""
    subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)


def allow(disk: Path) -> None:
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


class Breaking(TrainerCallback):
    def __init__(self, disk: Path, states: States) -> None:
        self._disk, self._states, self._state = disk, states, WELL

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        if (state := self._states.get(trainer.global_step)) is None:
            return
        mended = {FULL: empty, READ_ONLY: allow}.get(self._state)
        broken = {FULL: fill, READ_ONLY: forbid}.get(state)
        for change in filter(None, (mended, broken)):
            change(self._disk)
        self._state = state


class Broken(WarningsToFile):
    """Args: disk: file system of the run's folder. file: for warnings, on another file system."""

    def __init__(self, cfg: Config, file: Path, disk: Path, states: States) -> None:
        super().__init__(cfg, file)
        self.disk, self.states = disk, states

    def get_callbacks(self) -> list[TrainerCallback]:
        return [Breaking(self.disk, self.states)]
