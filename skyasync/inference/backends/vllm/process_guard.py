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
NAMES = ("/dev/shm/psm_", "/dev/shm/sem.mp-", "/dev/shm/vllm_dist_")
PLACE = "SKYASYNC_TEMPORARY"  # names a folder that is removed with what the run has started
SOCKETS = "VLLM_RPC_BASE_PATH"  # where vLLM's processes meet, each under a name of 36 characters
LONGEST = 107 - 37  # characters of the folder: the kernel takes no longer address
# a process being started shows its environment only after its exec
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
        # A session of its own: Ctrl-C in the terminal must not reach the guard before the guarded.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        # the guard is a grandchild: Ray kills the children of an actor it kills
        self._process.wait()

    @contextlib.contextmanager
    def marking(self) -> Iterator[None]:
        """Processes started inside, and their descendants, are guarded."""
        compiled = os.path.join(
            tempfile.gettempdir(), f"torchinductor_{os.getuid()}"
        )  # which is worth keeping
        inside = {VARIABLE: self.mark, SOCKETS: self.folder, "TMPDIR": self.folder}
        inside["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR", compiled)
        before = {name: os.environ.get(name) for name in inside}
        os.environ.update(inside)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})

    def note_shared_memory(self) -> None:
        """Have the shared memory that the guarded processes use now removed after their end."""
        assert self._process.stdin is not None
        names = {name for process_id in guarded(self.mark) for name in _shared_memory(process_id)}
        self._process.stdin.write("".join(f"{name}\n" for name in sorted(names)).encode())
        self._process.stdin.flush()

    def close(self) -> None:
        """Kill what is left of the guarded processes and end the guard. Blocks; safe to call
        twice."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if not self._process.stdin.closed:
            self._process.stdin.close()
            self._process.stdout.read()  # ends when the guard does
            self._process.stdout.close()


def short_folder() -> str:
    """A new one, this user's alone: where the user has vLLM's sockets, or what the run removes at
    its end."""
    folders = [
        os.environ.get(SOCKETS, ""),
        os.environ.get(PLACE, ""),
        tempfile.gettempdir(),
        "/tmp",
        "/dev/shm",
    ]
    short = [
        folder for folder in folders if folder and len(folder) + len("/vllm-12345678") <= LONGEST
    ]
    writable = [folder for folder in short if os.access(folder, os.W_OK | os.X_OK)]
    return tempfile.mkdtemp(prefix="vllm-", dir=writable[0] if writable else None)


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
    """The shared memory that a process has mapped: Python's blocks and semaphores, and what vLLM's
    ranks share."""
    try:
        lines = Path(f"/proc/{process_id}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {path for line in lines if (path := line.rpartition(" ")[2]).startswith(NAMES)}


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    shared_memory = set(sys.stdin.read().split())
    for _ in range(SWEEPS):
        ids = guarded(sys.argv[1])
        if not ids:
            break
        shared_memory |= {name for process_id in ids for name in _shared_memory(process_id)}
        for process_id in ids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        time.sleep(PAUSE_S)
    for name in shared_memory:
        Path(name).unlink(missing_ok=True)
    shutil.rmtree(sys.argv[2], ignore_errors=True)
