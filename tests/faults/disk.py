"""A small file system that is filled and emptied while a run writes to it, and a run in which that is done.

Invariant: what fails fails in the kernel, with ENOSPC, in the process that writes.
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
from tests.faults.heard import Heard

SIZE_MIB = 64
BALLAST = "ballast"

Full = dict[int, bool]  # behind this step: whether the disk is full from here on


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own; the test is skipped where none can be mounted."""
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


class Filling(TrainerCallback):
    def __init__(self, disk: Path, full: Full) -> None:
        self._disk, self._full = disk, full

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        if (full := self._full.get(trainer.global_step)) is not None:
            fill(self._disk) if full else empty(self._disk)


class Filled(Heard):
    """Args: disk: where the run's folder is. file: for warnings, on another one."""

    def __init__(self, cfg: Config, file: Path, disk: Path, full: Full) -> None:
        super().__init__(cfg, file)
        self.disk, self.full = disk, full

    def get_callbacks(self) -> list[TrainerCallback]:
        return [Filling(self.disk, self.full)]
