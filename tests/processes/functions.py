"""What functions in a process of their own may do."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import threading
import time


class Unreadable:
    """Leaves its process, and is no answer in another one."""

    def __reduce__(self):
        return int, ("not a number",)


class Own(BaseException):
    pass


def behave(what, mark, payload=b""):
    """Returns the mark, unless it does something else."""
    if what == "fork":
        os.fork()
    elif what == "fork and stay" and os.fork() == 0:
        time.sleep(1000)
    elif what == "start a child and hang":
        subprocess.Popen(["sleep", "1000"])
        time.sleep(1000)
    elif what == "hang":
        time.sleep(1000)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "stop behind the answer":
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGSTOP]).start()
    elif what == "exit":
        raise SystemExit(3)
    elif what == "end":
        os._exit(3)
    elif what == "interrupt":
        raise KeyboardInterrupt
    elif what == "raise":
        raise ZeroDivisionError(mark)
    elif what == "raise its own":
        raise Own(mark)
    elif what == "return what cannot travel":
        return lambda: mark
    elif what == "return what cannot be read":
        return Unreadable()
    elif what in ("garbage", "close"):
        for handle in _sockets():
            os.close(handle) if what == "close" else os.write(handle, payload or b"\0" * 7)
    return mark, payload


def _sockets():
    handles = [int(name) for name in os.listdir("/proc/self/fd")]
    return [handle for handle in handles if _is_socket(handle)]


def _is_socket(handle):
    try:
        return stat.S_ISSOCK(os.fstat(handle).st_mode)
    except OSError:  # that of the listing
        return False
