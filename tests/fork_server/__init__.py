"""Processes of the tests are forks of a server process that has imported the slow libraries (``server.py``).

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
SCRIPT = HERE / "server.py"
ON_LINUX = sys.platform == "linux"  # on other systems processes start as usual
FAILED = "failed"  # a file next to the socket of a server that has ended
FAILURES: list[str] = []  # the line that pytest prints after the tests
TEMPORARY = "SKYASYNC_TESTS_TEMPORARY"  # the folder of temporary files of the processes of the session's cluster


@contextmanager
def start_fork_server() -> Iterator[Path]:
    """Start the fork server; inside, it forks processes on requests to this address."""
    with TemporaryDirectory() as folder, (Path(folder) / "errors").open("w+") as errors:
        fork_socket = Path(folder) / "socket"
        _write_interpreters(fork_socket)
        if not ON_LINUX:
            yield fork_socket
            return
        command = [sys.executable, SCRIPT, fork_socket]
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # a fork sets its own number
        with subprocess.Popen(
            command, env=one_thread, stdin=subprocess.PIPE, stderr=errors, process_group=0
        ) as process:
            over = Event()
            Thread(target=_watch, args=(process, fork_socket, errors, over), daemon=True).start()
            try:
                yield fork_socket
            finally:
                over.set()
                with suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=30)
                process.kill()


def _watch(
    process: subprocess.Popen[bytes], fork_socket: Path, errors: TextIO, over: Event
) -> None:
    """End the tests if the fork server ends first: they would wait for it forever."""
    status = process.wait()
    if not over.is_set():
        errors.seek(0)
        said = errors.read().strip() or "it printed nothing"
        FAILURES.append(f"the fork server has ended with status {status}:\n{said}")
        fork_socket.with_name(FAILED).touch()
        os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def fork_ray_workers(fork_socket: Path) -> Iterator[None]:
    """Inside, the workers of every cluster that this process starts are forks."""
    if not ON_LINUX:
        yield
        return
    from ray._private.parameter import RayParams

    defaults = RayParams.update_if_absent

    def with_client(self: RayParams, **given: Any) -> None:
        if "setup_worker_path" in given:
            given["setup_worker_path"] = str(HERE / "client.py")
        defaults(self, **given)

    with (
        mock.patch.object(RayParams, "update_if_absent", with_client),
        mock.patch.dict(
            os.environ,
            SKYASYNC_FORK_SOCKET=str(fork_socket),
            SKYASYNC_ENGINES=str(_marker(fork_socket)),
        ),
    ):
        yield


@contextmanager
def fork_spawned_processes(fork_socket: Path, *, vllm: bool = False) -> Iterator[None]:
    """Inside, processes that this process spawns by ``multiprocessing`` are forks."""
    from multiprocessing import spawn

    before = spawn.get_executable()
    multiprocessing.set_executable(str(interpreter(fork_socket, vllm=vllm)))
    try:
        yield
    finally:
        multiprocessing.set_executable(os.fsdecode(before))


@contextmanager
def import_vllm_in_ray_workers(fork_socket: Path) -> Iterator[None]:
    """Inside, Ray's workers have vLLM imported, too."""
    _marker(fork_socket).touch()
    try:
        yield
    finally:
        _marker(fork_socket).unlink()


def _marker(fork_socket: Path) -> Path:
    """A file that exists while workers of this process's clusters should have vLLM imported."""
    return fork_socket.with_name(f"engines.{os.getpid()}")


def interpreter(fork_socket: Path, *, vllm: bool = False) -> Path:
    """The executable that replaces Python for ``multiprocessing``."""
    return fork_socket.with_name("python" if vllm else "python.plain")


def program(fork_socket: Path, *, vllm: bool = False) -> str:
    """The start of a command line that replaces ``python``, for a script or ``-m`` and a module.

    The fork has its own session. Its process group gets the signals of this process: SIGINT and SIGTERM.
    """
    return str(fork_socket.with_name("program.vllm" if vllm else "program"))


def _write_interpreters(fork_socket: Path) -> None:
    command = shlex.join(
        [sys.executable, "-I", "-S", str(HERE / "client.py")] if ON_LINUX else [sys.executable]
    )
    plain, vllm = shlex.quote(str(fork_socket)), shlex.quote(f"{fork_socket}.vllm")
    for path, settings in {
        interpreter(fork_socket): f"SKYASYNC_FORK_SOCKET={plain}",
        interpreter(fork_socket, vllm=True): f"SKYASYNC_FORK_SOCKET={vllm}",
        Path(program(fork_socket)): f"SKYASYNC_PROGRAM=1 SKYASYNC_FORK_SOCKET={plain}",
        Path(program(fork_socket, vllm=True)): f"SKYASYNC_PROGRAM=1 SKYASYNC_FORK_SOCKET={vllm}",
    }.items():
        path.write_text(f'#!/bin/sh\n{settings} exec {command} "$@"\n')
        path.chmod(0o700)
