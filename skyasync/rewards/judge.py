"""A process of its own for functions that read what a model wrote.

Invariant: whatever a function does with a response (hang, hold the interpreter's lock, exit, crash), ``Judge.call``
returns or raises within the limit, and the next call finds a working process. Functions run one at a time, in the
process's main thread, so that their own signals work as well. A process whose starter was killed ends too: when it
is idle, at once; when it computes, after the processor time that the limit could have meant.

| who waits     | for what              | woken by                                                 |
|---------------|-----------------------|----------------------------------------------------------|
| ``call``      | the judge's process   | its return, or its end                                   |
| ``call``      | its verdict           | the verdict, the process's end, or ``limit_s``: it is killed |
| the process   | the next call         | the call, or the end of the process that started it      |
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

from skyasync.errors import UserError
from skyasync.rewards.registry import find
from skyasync.rewards.score import Score, as_score

START_S = 50.0  # imports included; less than environment.step_timeout_s, so that this error is the one to be seen


class Unjudged(Exception):
    """There is no verdict, and the message says why."""


class Judge:
    """Calls functions in a process that is started when first needed, and anew after it was lost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._stop: Callable[[], Any] = lambda: None
        self._known: set[bytes] = set()

    def call(self, name: str, function: bytes, arguments: dict[str, Any], limit_s: float) -> Score:
        """``function(**arguments)``, where ``function`` is what ``portable`` made.

        Raises:
            Unjudged: if the function does not return within ``limit_s``, or the process ends.
            UserError: if its module cannot be loaded within ``START_S``.
            Exception: what the function raised, with a note that holds its traceback.
        """
        with self._lock:
            self._load(name, function)
            return self._ask(function, name, arguments, limit_s)

    def load(self, name: str, function: bytes) -> None:
        """Import the function's module, as the first call would.

        Raises:
            UserError: if that takes longer than ``START_S``, or ends the process.
        """
        with self._lock:
            self._load(name, function)

    def close(self) -> None:
        """Kill the process, if there is one. The next call starts another."""
        with self._lock:
            self._lose()

    def _load(self, name: str, function: bytes) -> None:
        if self._connection is None:
            self._start()
        if function in self._known:
            return
        try:
            self._ask(function, name, None, START_S)
        except Unjudged as problem:
            raise UserError(f"the module of reward function {name} cannot be loaded: {problem}") from problem
        self._known.add(function)

    def _ask(self, function: bytes, name: str, arguments: dict[str, Any] | None, limit_s: float) -> Any:
        assert self._connection is not None
        try:
            self._connection.send((function, name, arguments, limit_s))
            if not self._connection.poll(limit_s):
                self._lose()
                raise Unjudged(f"it did not return within {limit_s:g} s")
            result, error = self._connection.recv()
        except (EOFError, OSError) as gone:
            self._lose()
            raise Unjudged("it ended its process") from gone
        if error is not None:
            raise error
        return result

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        program = f"from skyasync.rewards.judge import serve; serve({theirs.fileno()})"
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", program],
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal is not for it
            )
        self._connection, self._known = Connection(ours.detach()), set()
        self._stop = weakref.finalize(self, _kill, process)

    def _lose(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._stop()


def portable(function: Callable[..., Any], name: str) -> bytes:
    """What another process finds the function by: its name, or, for one that the program registered, itself."""
    if ":" in name or getattr(function, "__module__", "").startswith("skyasync.rewards."):
        return pickle.dumps(name)
    from ray import cloudpickle  # also for functions of the program's own file

    return cloudpickle.dumps(function)


def serve(handle: int) -> None:
    """The judge's program: answer calls until the other end is closed."""
    connection = Connection(handle)
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        connection.send(_answer(*message))


def _answer(
    function: bytes, name: str, arguments: dict[str, Any] | None, limit_s: float
) -> tuple[Score | None, Exception | None]:
    # The kernel acts on this one, also where no Python code can run. Unused by anybody's own limits, unlike an alarm.
    signal.setitimer(signal.ITIMER_PROF, limit_s * (os.cpu_count() or 1) + 1)
    try:
        found = _load(function)
        return (None if arguments is None else as_score(name, found(**arguments))), None
    except Exception as error:  # a SystemExit ends the process, as it says
        return None, _sendable(error, f"in the judge's process:\n{traceback.format_exc()}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@cache
def _load(function: bytes) -> Callable[..., Any]:
    found = pickle.loads(function)
    return find(found) if isinstance(found, str) else found


def _sendable(error: Exception, note: str) -> Exception:
    error.add_note(note)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(note)
    return error


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
