"""Processes of the tests start as forks of one that has imported what is slow to import.

Ray's workers are forks of a nursery (``nursery.py``), and vLLM's core and its workers, which know no other way than a
fresh interpreter, are forks of that one's child, which has vLLM imported as well, once it is asked for.
"""

from __future__ import annotations

import multiprocessing
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

HERE = Path(__file__).parent


@contextmanager
def nursery() -> Iterator[Path]:
    """Inside, it can be asked for processes at this address."""
    with TemporaryDirectory() as folder:
        door = Path(folder) / "nursery"
        _write_interpreter(door)
        command = [sys.executable, HERE / "nursery.py", door]
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # read when torch is loaded; a fork sets its own number
        with subprocess.Popen(command, env=one_thread, stdin=subprocess.PIPE, process_group=0) as process:
            try:
                yield door
            finally:
                with suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=30)
                process.kill()


@contextmanager
def warm_workers(door: Path) -> Iterator[None]:
    """Inside, every cluster that this process starts takes its workers from the nursery."""
    from ray._private.parameter import RayParams

    defaults = RayParams.update_if_absent

    def with_stand_in(self: RayParams, **given: Any) -> None:
        if "setup_worker_path" in given:
            given["setup_worker_path"] = str(HERE / "stand_in.py")
        defaults(self, **given)

    with (
        mock.patch.object(RayParams, "update_if_absent", with_stand_in),
        mock.patch.dict(os.environ, SKYASYNC_NURSERY=str(door)),
    ):
        yield


@contextmanager
def warm_engines(door: Path) -> Iterator[None]:
    """Inside, what this process starts by ``multiprocessing`` comes from the nursery: vLLM's core and its workers."""
    from multiprocessing import spawn

    before = spawn.get_executable()
    multiprocessing.set_executable(str(interpreter(door)))
    try:
        yield
    finally:
        multiprocessing.set_executable(os.fsdecode(before))


def interpreter(door: Path) -> Path:
    """What starts in place of a Python that would import vLLM."""
    return door.with_name("python")


def _write_interpreter(door: Path) -> None:
    command = shlex.join([sys.executable, "-I", "-S", str(HERE / "stand_in.py")])
    interpreter(door).write_text(f'#!/bin/sh\nSKYASYNC_NURSERY={shlex.quote(f"{door}.vllm")} exec {command} "$@"\n')
    interpreter(door).chmod(0o700)
