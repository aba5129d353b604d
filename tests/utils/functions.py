"""Behaviour of functions in a subprocess worker."""

from __future__ import annotations

import os
import signal
import stat
import struct
import subprocess
import sys
import threading
import time

from skyasync.errors import TransientError


class Unreadable:
    """Can be pickled, but not unpickled in another process."""

    def __reduce__(self):
        return int, ("not a number",)


class RunsWhereItIsRead:
    """Code that runs when an answer is unpickled."""

    def __init__(self, function, *arguments):
        self.run = function, arguments

    def __reduce__(self):
        return self.run


class Own(BaseException):
    pass


class HangsWhereItIsRead(TransientError):
    def __init__(self, mark):
        super().__init__(mark)
        if sys.argv[0] != "-c":  # in the calling process
            time.sleep(1000)


def behave(what, mark, payload=b""):
    """Returns the mark, unless the arguments select something else."""
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
    elif what == "return what exits":
        return RunsWhereItIsRead(sys.exit, 3)
    elif what == "return what ends":
        return RunsWhereItIsRead(os._exit, 3)
    elif what == "raise what hangs":
        raise HangsWhereItIsRead(mark)
    elif what == "start a program and end":
        os.system("sleep 1000 &")
        os._exit(3)
    elif what == "say too much":
        for handle in _sockets():
            os.write(handle, struct.pack("!4sQ", b"call", 1 << 40))
            while True:
                os.write(handle, b"x" * (1 << 20))
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
