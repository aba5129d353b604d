"""Ends Ray's processes when the program that started them ends, however it ends.

    the program ── its pidfd, a pipe ──▶ watchdog ──(gone)──▶ 10 s ──▶ SIGKILL, and the folder is
    removed

Invariant: it ends processes that were started while ``variables`` stood in the environment, and no
others: no process of a cluster that was joined. Ray's own processes notice the program's end by
themselves, but its agents, which hold no model, first try for more than a minute to tell of it.
``folder`` is this user's alone: Ray makes everything inside it readable, and writable, for all.

| who waits    | for what                          | woken by                               |
|--------------|-----------------------------------|----------------------------------------|
| the watchdog | the program's end, or ``close``   | the kernel (pidfd, end of the pipe)    |
| the watchdog | the marked processes' own end     | the clock, twice a second, ``GRACE_S`` |
| ``close``    | the watchdog's end                | the end of its output, ``CLOSE_S``     |

This file is also the watchdog's program: it runs by itself and imports little of the standard
library.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

VARIABLE = "SKYASYNC_STARTED_BY"
GRACE_S = 10.0  # for processes that end by themselves, and release what they hold
CLOSE_S = 30.0  # after which a stopped or stuck watchdog is left alone
SWEEPS = 20
PAUSE_S = 0.1
# characters of the folder: the addresses of Ray's sockets, of which it is a part, may have 107
LONGEST = 36
WEIGHTS = (
    "skyasync-weights-"  # what files of shared weights are called, and then the writer's number
)


class Watchdog:
    """A small process next to this one.

    Args:
        grace_s: what processes have to end by themselves where this one has ended without
            ``close``, in seconds.

    Attributes:
        folder: for temporary files; it is removed by ``close``, or when this process ends.
        variables: in the environment of what is started, and of its descendants.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        import subprocess
        import uuid

        self.folder = private_folder()
        self.mark = f"{os.getpid()}-{uuid.uuid4().hex}"
        # Without the second, Ray's workers and agents write their titles over the environment that
        # /proc shows.
        self.variables = {VARIABLE: self.mark, "SPT_NOENV": "1"}
        command = [
            sys.executable,
            "-I",
            "-S",
            __file__,
            self.mark,
            self.folder,
            str(os.getpid()),
            str(grace_s),
        ]
        # A session of its own: Ctrl-C in the terminal is for the program, which then ends the
        # watchdog.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._process.wait()  # it continues as a grandchild, which needs no wait

    def close(self) -> None:
        """End the remaining processes at once. Blocks; safe to call twice."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if not self._process.stdin.closed:
            try:
                self._process.stdin.write(b"now")
                self._process.stdin.close()
            except BrokenPipeError:  # it has been ended
                pass
            select.select([self._process.stdout], [], [], CLOSE_S)
            self._process.stdout.close()


def private_folder() -> str:
    """A new folder that this user alone can enter, where temporary files are unless that has too
    long a name."""
    import tempfile

    for place in (os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "/tmp", "/dev/shm"):
        if len(place) + len("/skyasync-12345678") <= LONGEST and os.access(place, os.W_OK):
            return tempfile.mkdtemp(prefix="skyasync-", dir=place)
    return tempfile.mkdtemp(prefix="skyasync-")


def marked(mark: str) -> list[int]:
    """Ids of the running processes that carry this mark."""
    entry = f"{VARIABLE}={mark}".encode()
    carriers = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/environ", "rb") as environment:
                if entry in environment.read().split(b"\0"):
                    carriers.append(int(process))
        except OSError:  # gone, or another user's
            continue
    return carriers


def _close_requested(parent: int) -> bool:
    """Wait for ``close`` or the program's end; true for ``close``."""
    watched = [0]
    try:
        watched.append(
            os.pidfd_open(parent)
        )  # a fork of the program may outlive it, and hold the pipe
    except ProcessLookupError:
        return False
    except (OSError, AttributeError):
        pass
    ready, _, _ = select.select(watched, [], [])
    return 0 in ready and os.read(0, 3) == b"now"


def _end(mark: str, grace_s: float) -> None:
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and marked(mark):
        time.sleep(0.5)
    for _ in range(SWEEPS):
        left = marked(mark)
        if not left:
            return
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(PAUSE_S)


def main(mark: str, folder: str, parent: int, grace_s: float) -> None:
    _end(mark, 0.0 if _close_requested(parent) else grace_s)
    import shutil  # not before it is needed: this process is small

    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid").removeprefix("pid:[").removesuffix("]")
        for name in os.listdir(
            "/dev/shm"
        ):  # shared weights of processes that have ended, in this namespace
            writer, _, rest = name.removeprefix(WEIGHTS).partition("-")
            ours = name.startswith(WEIGHTS) and rest.startswith(f"{namespace}-")
            if ours and writer.isdigit() and not os.path.exists(f"/proc/{writer}"):
                with contextlib.suppress(OSError):
                    os.unlink(f"/dev/shm/{name}")


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
