"""A child process for functions that may do anything: it calls one at a time, and is killed when that takes too long.

Invariant: whatever a function does (hang, hold the interpreter's lock, exit, crash), ``Apart.call`` returns or raises
within the limit. Functions run in the child's main thread, so that their own signals work as well. A child whose
starter was killed ends too: when it is idle, at once; when it computes, after the processor time that the limit could
have meant.

| who waits       | for what           | woken by                                                    |
|-----------------|--------------------|-------------------------------------------------------------|
| ``Pool.alone``  | a child that is up | its loading's end, in a thread of its own                   |
| ``call``        | the answer         | the child (answer, end), or ``limit_s``: the child is killed |
| the child       | the next call      | the call, or the end of the process that started it         |
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
from collections.abc import Callable, Iterable
from functools import cache
from multiprocessing.connection import Connection
from typing import Any
from weakref import finalize

from skyasync.errors import UserError
from skyasync.processes.calls import START_S, portable


class NoAnswerError(Exception):
    """There is no answer, and the message says why. The child is gone."""


class Apart:
    """One child, which starts at once.

    Args:
        functions: pickled callables, by name, that it loads before it is ready.
        on_news: called, in any thread, when it is ready and when it is lost.
    """

    hung = 0

    def __init__(
        self, functions: Iterable[tuple[str, bytes]] = (), on_news: Callable[[Apart], None] = lambda _: None
    ) -> None:
        self.keys: set[str] = set()
        self.lost: Exception | None = None
        self.ready = False
        self._failed: Exception | None = None  # at its start
        self._on_news, self._known = on_news, set[bytes]()
        ours, theirs = socket.socketpair()
        program = f"from skyasync.processes.apart import serve; serve({theirs.fileno()})"
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", program],
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal is not for it
            )
        self._connection = Connection(ours.detach())
        self._stop = finalize(self, _kill, process)
        threading.Thread(target=self._begin, args=[list(functions)], name="child", daemon=True).start()

    @property
    def idle(self) -> bool:
        return not self.keys

    def load(self, name: str, function: bytes) -> None:
        """Unpickle a callable there, once.

        Raises:
            UserError: if that takes longer than ``START_S``, or ends the child.
        """
        if function in self._known:
            return
        try:
            self._ask((function, None, START_S))
        except NoAnswerError as problem:
            raise UserError(f"the module of {name} cannot be loaded: {problem}") from problem
        self._known.add(function)

    def call(self, name: str, function: bytes, arguments: dict[str, Any], limit_s: float) -> Any:
        """``function(**arguments)``.

        Raises:
            NoAnswerError: if the function does not return within ``limit_s``, or the child ends.
            UserError: if it cannot be loaded.
            Exception: what the function raised, with a note that holds its traceback.
        """
        if self._failed is not None:
            self._lose(self._failed)
            raise self._failed
        self.load(name, function)
        return self._ask((function, arguments, limit_s))

    def kill(self) -> None:
        self._lose(RuntimeError("it was ended"))

    def _begin(self, functions: list[tuple[str, bytes]]) -> None:
        try:
            for name, function in functions:
                self.load(name, function)
        except Exception as problem:
            self._failed, self.lost = problem, None  # for the next caller to hear of, before another one starts
        self.ready = True
        self._on_news(self)

    def _ask(self, message: tuple[bytes, dict[str, Any] | None, float]) -> object:
        limit_s = message[-1]
        try:
            self._connection.send(message)
            if not self._connection.poll(limit_s):
                self._lose(problem := NoAnswerError(f"it did not return within {limit_s:g} s"))
                raise problem
            result, error = self._connection.recv()
        except (EOFError, OSError) as gone:
            self._lose(problem := NoAnswerError("it ended its process"))
            raise problem from gone
        if error is not None:
            raise error
        return result

    def _lose(self, problem: Exception) -> None:
        if self.lost is None:
            self.lost = problem
            self._connection.close()
            self._stop()


def serve(handle: int) -> None:
    """The child's program: answer calls until the other end is closed."""
    connection = Connection(handle)
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        connection.send(_answer(*message))


def _answer(function: bytes, arguments: dict[str, Any] | None, limit_s: float) -> tuple[Any, Exception | None]:
    # The kernel acts on this one, also where no Python code can run. Unused by anybody's own limits, unlike an alarm.
    signal.setitimer(signal.ITIMER_PROF, limit_s * (os.cpu_count() or 1) + 1)
    try:
        found = _load(function)
        return (None if arguments is None else found(**arguments)), None
    except Exception as error:  # a SystemExit ends the process, as it says
        error.add_note(f"in a process of its own:\n{traceback.format_exc()}")
        return None, portable(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@cache
def _load(function: bytes) -> Callable[..., Any]:
    found: Callable[..., Any] = pickle.loads(function)
    return found


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
