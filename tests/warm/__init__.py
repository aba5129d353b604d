"""Processes of the tests are forks of a server process that has imported the slow libraries (``nursery.py``).

Ray's workers are forks of the server. vLLM's core and its workers, which otherwise start as new interpreters, are forks
of the server's child, which imports vLLM on the first request. Programs that a test starts by ``program``, and the
workers of their clusters, are forks too.
"""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any, TextIO
from unittest import mock

HERE = Path(__file__).parent
SCRIPT = HERE / "nursery.py"
ON_LINUX = sys.platform == "linux"  # on other systems processes start as usual
FAILED = "failed"  # a file next to the socket of a server that has ended
FAILURES: list[str] = []  # the line that pytest prints after the tests
TEMPORARY = "SKYASYNC_TESTS_TEMPORARY"  # the folder of temporary files of the processes of the session's cluster


@contextmanager
def nursery() -> Iterator[Path]:
    """Start the fork server; inside, it forks processes on requests to this address."""
    with TemporaryDirectory() as folder, (Path(folder) / "errors").open("w+") as errors:
        door = Path(folder) / "nursery"
        _write_interpreters(door)
        if not ON_LINUX:
            yield door
            return
        command = [sys.executable, SCRIPT, door]
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # a fork sets its own number
        with subprocess.Popen(
            command, env=one_thread, stdin=subprocess.PIPE, stderr=errors, process_group=0
        ) as process:
            over = Event()
            Thread(target=_watch, args=(process, door, errors, over), daemon=True).start()
            try:
                yield door
            finally:
                over.set()
                with suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=30)
                process.kill()


def _watch(process: subprocess.Popen[bytes], door: Path, errors: TextIO, over: Event) -> None:
    """End the tests if the fork server ends first: they would wait for it forever."""
    status = process.wait()
    if not over.is_set():
        errors.seek(0)
        said = errors.read().strip() or "it has said nothing"
        FAILURES.append(f"the process that keeps imports warm has ended with status {status}:\n{said}")
        door.with_name(FAILED).touch()
        os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def warm_workers(door: Path) -> Iterator[None]:
    """Inside, the workers of every cluster that this process starts are forks."""
    if not ON_LINUX:
        yield
        return
    from ray._private.parameter import RayParams

    defaults = RayParams.update_if_absent

    def with_stand_in(self: RayParams, **given: Any) -> None:
        if "setup_worker_path" in given:
            given["setup_worker_path"] = str(HERE / "stand_in.py")
        defaults(self, **given)

    with (
        mock.patch.object(RayParams, "update_if_absent", with_stand_in),
        mock.patch.dict(os.environ, SKYASYNC_NURSERY=str(door), SKYASYNC_ENGINES=str(_marker(door))),
    ):
        yield


@contextmanager
def warm_children(door: Path, *, vllm: bool = False) -> Iterator[None]:
    """Inside, processes that this process spawns by ``multiprocessing`` are forks."""
    from multiprocessing import spawn

    before = spawn.get_executable()
    multiprocessing.set_executable(str(interpreter(door, vllm=vllm)))
    try:
        yield
    finally:
        multiprocessing.set_executable(os.fsdecode(before))


@contextmanager
def warm_engines_on_ray(door: Path) -> Iterator[None]:
    """Inside, Ray's workers have vLLM imported, too."""
    _marker(door).touch()
    try:
        yield
    finally:
        _marker(door).unlink()


def _marker(door: Path) -> Path:
    """A file that exists while workers of this process's clusters should have vLLM imported."""
    return door.with_name(f"engines.{os.getpid()}")


def interpreter(door: Path, *, vllm: bool = False) -> Path:
    """The executable that replaces Python for ``multiprocessing``."""
    return door.with_name("python" if vllm else "python.plain")


def program(door: Path, *, vllm: bool = False) -> str:
    """The start of a command line that replaces ``python``, for a script or ``-m`` and a module.

    The fork has its own session. Its process group gets the signals of this process: SIGINT and SIGTERM.
    """
    return str(door.with_name("program.vllm" if vllm else "program"))


def _write_interpreters(door: Path) -> None:
    command = shlex.join([sys.executable, "-I", "-S", str(HERE / "stand_in.py")] if ON_LINUX else [sys.executable])
    plain, vllm = shlex.quote(str(door)), shlex.quote(f"{door}.vllm")
    for path, settings in {
        interpreter(door): f"SKYASYNC_NURSERY={plain}",
        interpreter(door, vllm=True): f"SKYASYNC_NURSERY={vllm}",
        Path(program(door)): f"SKYASYNC_PROGRAM=1 SKYASYNC_NURSERY={plain}",
        Path(program(door, vllm=True)): f"SKYASYNC_PROGRAM=1 SKYASYNC_NURSERY={vllm}",
    }.items():
        path.write_text(f'#!/bin/sh\n{settings} exec {command} "$@"\n')
        path.chmod(0o700)
