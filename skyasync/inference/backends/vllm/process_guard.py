"""No process of an engine outlives the process that started it, however that one ended.

Invariant: when the guard's standard input closes, every process that was started while the guard's
mark stood in the environment is killed. The input closes if its parent closed it, exited, or was
killed with SIGKILL. The processes' shared memory is removed too, with the folder of their sockets
and temporary files. vLLM starts its engine core as a child, and that one its workers; none of them
notices that the first process has ended.

This file is also the guard's program: it runs by itself and imports the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "SKYASYNC_GUARDED_BY"
# Of Python's blocks of shared memory, Python's semaphores, and vLLM's memory of several ranks.
NAMES = ("/dev/shm/psm_", "/dev/shm/sem.mp-", "/dev/shm/vllm_dist_")
PLACE = "SKYASYNC_TEMPORARY"  # names a folder that is removed at the run's end
SOCKETS = "VLLM_RPC_BASE_PATH"  # the folder of vLLM's sockets, whose names have 36 characters
# Characters of the folder: the address of a Unix socket has at most 107, a slash and the name.
LONGEST = 107 - 37
# A process that is being started shows its environment only after its exec: the guard looks again.
SWEEPS = 20
PAUSE_S = 0.1


class ProcessGuard:
    """A small process that waits for this one's end.

    >>> guard = ProcessGuard()
    >>> with guard.marking():
    ...     process = subprocess.Popen(["sleep", "100"])
    >>> guard.close()  # or the end of this process
    >>> process.wait()
    -9

    Attributes:
        folder: for the guarded processes' temporary files; gone with them.
    """

    def __init__(self) -> None:
        self.mark = f"{os.getpid()}-{uuid.uuid4().hex}"
        self.folder = short_folder()
        command = [sys.executable, "-I", "-S", __file__, self.mark, self.folder]
        # A session of its own: Ctrl-C in the terminal must not end the guard before the processes.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        # The child ends at once, and its child is the guard: Ray kills the children of an actor
        # that it kills.
        self._process.wait()

    @contextlib.contextmanager
    def marking(self) -> Iterator[None]:
        """Processes started inside, and their descendants, are guarded."""
        guarded_values = {VARIABLE: self.mark, SOCKETS: self.folder, "TMPDIR": self.folder}
        # Compiled kernels are used by later runs: not in a folder that is removed.
        kernel_folder = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
        kernel_folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", kernel_folder)
        guarded_values["TORCHINDUCTOR_CACHE_DIR"] = kernel_folder
        previous_values = {name: os.environ.get(name) for name in guarded_values}
        os.environ.update(guarded_values)
        try:
            yield
        finally:
            for name, value in previous_values.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def note_shared_memory(self) -> None:
        """Note the processes' shared memory of now, which is removed after their end."""
        assert self._process.stdin is not None
        names: set[str] = set()
        for process_id in guarded(self.mark):
            names |= _shared_memory(process_id)
        for name in sorted(names):
            self._process.stdin.write(f"{name}\n".encode())
        self._process.stdin.flush()

    def close(self) -> None:
        """Kill the guarded processes that still run, and end the guard. Blocks; may be repeated."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if not self._process.stdin.closed:
            self._process.stdin.close()
            self._process.stdout.read()  # ends when the guard does
            self._process.stdout.close()


def short_folder() -> str:
    """A new folder of this user alone, whose path is short enough for a socket's address.

    It is where the user has vLLM's sockets, or in a folder that the run removes at its end.
    """
    folders = [
        os.environ.get(SOCKETS, ""),
        os.environ.get(PLACE, ""),
        tempfile.gettempdir(),
        "/tmp",
        "/dev/shm",
    ]
    parent = None  # the system's default
    for folder in folders:
        short = len(folder) + len("/vllm-12345678") <= LONGEST
        if folder and short and os.access(folder, os.W_OK | os.X_OK):
            parent = folder
            break
    return tempfile.mkdtemp(prefix="vllm-", dir=parent)


def guarded(mark: str) -> list[int]:
    """Ids of the running processes that carry this mark."""
    ids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes()
        except OSError:  # gone, or another user's
            continue
        # Python's resource tracker ends by itself, after it has removed the others' shared memory.
        tracker = b"multiprocessing.resource_tracker import main" in command
        if f"{VARIABLE}={mark}".encode() in environment and not tracker:
            ids.append(int(folder.name))
    return ids


def _shared_memory(process_id: int) -> set[str]:
    """The files of shared memory (``NAMES``) that a process has mapped."""
    try:
        lines = Path(f"/proc/{process_id}/maps").read_text().splitlines()
    except OSError:  # the process has ended
        return set()
    paths = [line.rpartition(" ")[2] for line in lines]
    return {path for path in paths if path.startswith(NAMES)}


if __name__ == "__main__":
    if os.fork():  # the child goes on, as a grandchild of the process that started this one
        os._exit(0)
    shared_memory = set(sys.stdin.read().split())  # returns when the other end is closed
    for _ in range(SWEEPS):
        ids = guarded(sys.argv[1])
        if not ids:
            break
        for process_id in ids:
            shared_memory |= _shared_memory(process_id)
        for process_id in ids:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(process_id, signal.SIGKILL)
        time.sleep(PAUSE_S)
    for name in shared_memory:
        Path(name).unlink(missing_ok=True)
    shutil.rmtree(sys.argv[2], ignore_errors=True)
