"""Ends Ray's processes when the program that started them ends, however it ends.

    the program ── its pidfd, a pipe ──▶ watchdog ──(gone)──▶ 10 s ──▶ SIGKILL, and the folder is
    removed

Invariant: it ends processes that were started while ``variables`` stood in the environment, and no
others: no process of a cluster that was joined. Ray's processes notice the program's end by
themselves, but its agents, which hold no model, first try for more than a minute to report it. Only
this user can enter ``folder``: Ray makes everything inside it readable, and writable, for all.

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
GRACE_S = 10.0  # for processes that end by themselves, and release their resources
CLOSE_S = 30.0  # after which a stopped or stuck watchdog is left alone
# A killed process may have started another one: the processes are looked for several times.
SWEEPS = 20
PAUSE_S = 0.1
# Characters of the folder's name: the addresses of Ray's sockets, which begin with it, have at most
# 107.
LONGEST = 36
WEIGHTS = "skyasync-weights-"  # the beginning of the names of files with shared weights


class Watchdog:
    """A small process next to this one.

    Args:
        grace_s: seconds for processes to end by themselves, if this one ends without ``close``.

    Attributes:
        folder: for temporary files; it is removed by ``close``, or when this process ends.
        variables: for the environment of processes that are to be ended.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        import subprocess
        import uuid

        self.folder = private_folder()
        self.mark = f"{os.getpid()}-{uuid.uuid4().hex}"
        # SPT_NOENV: else Ray's workers and agents write their titles over the environment that
        # /proc shows.
        self.variables = {VARIABLE: self.mark, "SPT_NOENV": "1"}
        # -I and -S: a small process that starts fast, without the user's site packages.
        command = [sys.executable, "-I", "-S", __file__]
        command += [self.mark, self.folder, str(os.getpid()), str(grace_s)]
        # Its own session: Ctrl-C in the terminal is for the program, which then ends the watchdog.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._process.wait()  # it has forked, and continues as a grandchild, which is not awaited

    def close(self) -> None:
        """End the remaining processes at once. Blocks; safe to call twice."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if not self._process.stdin.closed:
            try:
                self._process.stdin.write(b"now")
                self._process.stdin.close()
            except BrokenPipeError:  # the watchdog was killed
                pass
            select.select([self._process.stdout], [], [], CLOSE_S)  # the end of its output
            self._process.stdout.close()


def private_folder() -> str:
    """Make a folder for temporary files that this user alone can enter, with a short name."""
    import tempfile

    temporary = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    for parent in (temporary, "/tmp", "/dev/shm"):
        length = len(parent) + len("/skyasync-12345678")
        if length <= LONGEST and os.access(parent, os.W_OK):
            return tempfile.mkdtemp(prefix="skyasync-", dir=parent)
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
    watched = [0]  # standard input, the pipe
    try:
        # The pipe is not enough: a fork of the program may outlive it, and hold the pipe open.
        watched.append(os.pidfd_open(parent))
    except ProcessLookupError:  # the program has ended already
        return False
    except (OSError, AttributeError):  # an old kernel, or a Python without it
        pass
    ready, _, _ = select.select(watched, [], [])
    return 0 in ready and os.read(0, 3) == b"now"


def _end(mark: str, grace_s: float) -> None:
    """End the marked processes: wait for them for ``grace_s`` seconds, then kill them."""
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and marked(mark):
        time.sleep(0.5)
    for _ in range(SWEEPS):
        remaining = marked(mark)
        if not remaining:
            return
        for process in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(PAUSE_S)


def main(mark: str, folder: str, parent: int, grace_s: float) -> None:
    """Wait for the program's end, end the marked processes, and remove their files."""
    _end(mark, 0.0 if _close_requested(parent) else grace_s)
    import shutil  # not before it is needed: this process is small

    shutil.rmtree(folder, ignore_errors=True)
    _remove_shared_weights()


def _remove_shared_weights() -> None:
    """Remove shared weights whose writer has ended.

    The name of such a file has the writer's number and its namespace of processes: in another
    container the number belongs to another process.
    """
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid").removeprefix("pid:[").removesuffix("]")
        for name in os.listdir("/dev/shm"):
            writer, _, rest = name.removeprefix(WEIGHTS).partition("-")
            is_here = name.startswith(WEIGHTS) and rest.startswith(f"{namespace}-")
            if is_here and writer.isdigit() and not os.path.exists(f"/proc/{writer}"):
                with contextlib.suppress(OSError):
                    os.unlink(f"/dev/shm/{name}")


if __name__ == "__main__":
    if os.fork():  # the child is adopted by the system: the program need not wait for it
        os._exit(0)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
