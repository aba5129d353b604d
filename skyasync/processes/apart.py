"""A child process for functions that may do anything: it calls one at a time, and is killed when that takes too long.

Invariant: whatever a function does (hang, hold the interpreter's lock, exit, crash, fork, write to the child's socket),
``Apart.call`` returns its own answer or raises within the limit, sending and receiving included: an answer has the
number of its call, and a child that says anything else is killed. With the child its process group is killed: what
its functions have started, unless that has given itself a group. An answer is data: reading it runs nothing of the
function's. Functions run in the child's main thread, so that
their own signals work as well. A child whose starter was killed ends too: when it is idle, at once; when it computes,
after the processor time that the limit could have meant.

| who waits       | for what           | woken by                                                    |
|-----------------|--------------------|-------------------------------------------------------------|
| ``Pool.alone``  | a child that is up | its loading's end, in a thread of its own                   |
| ``call``        | the answer         | the child (answer, end), or ``limit_s``: the child is killed |
| the child       | the next call      | the call, or the end of the process that started it         |
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache
from itertools import count
from typing import Any
from weakref import finalize

from skyasync.errors import UserError, headline
from skyasync.processes.calls import START_S, portable

CHUNK = 1 << 20  # bytes that are read at once
MOST = 64 << 20  # bytes of an answer
_HEAD, _MARK = struct.Struct("!4sQ"), b"call"  # of a message; the number of bytes behind it


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
        self._numbers = count(1)
        self._socket, theirs = socket.socketpair()
        program = f"from skyasync.processes.apart import serve; serve({theirs.fileno()})"
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", program],
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal is not for it; and a group, which is killed with it
            )
        self._stop = finalize(self, _kill, process)
        threading.Thread(target=self._begin, args=[list(functions)], name="child", daemon=True).start()

    @property
    def idle(self) -> bool:
        return not self.keys

    @property
    def is_quiet(self) -> bool:
        """Whether it lives and has said nothing unasked; else it is killed, for what an earlier call has left."""
        try:
            self._socket.settimeout(0)
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        self.kill()
        return False

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
        number, limit_s = next(self._numbers), message[-1]
        asked, deadline = pickle.dumps((number, *message)), time.monotonic() + limit_s
        try:
            _send(self._socket, asked, deadline)
            answered, result, error = _read(_receive(self._socket, deadline, MOST))
            if answered != number:
                raise ValueError(f"the answer to call {answered!r} came to call {number}")
        except TimeoutError as late:
            self._lose(problem := NoAnswerError(f"it did not return within {limit_s:g} s"))
            raise problem from late
        except (EOFError, OSError) as gone:
            self._lose(problem := NoAnswerError("it ended its process"))
            raise problem from gone
        except Exception as garbage:
            self._lose(problem := NoAnswerError(f"its process said what is no answer ({headline(garbage)})"))
            raise problem from garbage
        if error is not None:
            raise error
        return result

    def _lose(self, problem: Exception) -> None:
        if self.lost is None:
            self.lost = problem
            self._socket.close()
            self._stop()


def serve(handle: int) -> None:
    """The child's program: answer calls until the other end is closed."""
    os.set_inheritable(handle, False)  # else a program that a function has started would not tell of the child's end
    connection, own = socket.socket(fileno=handle), os.getpid()
    os.register_at_fork(after_in_child=connection.close)  # else it would not tell of the child's end
    while True:
        try:
            number, *message = pickle.loads(_receive(connection))
        except EOFError:  # without the functions' threads and exit handlers, and with what they have started
            os.killpg(os.getpgrp(), signal.SIGKILL)
        answer = _answer(number, *message)
        if os.getpid() != own:  # the function has forked, and both have returned: one answers
            os._exit(0)
        _send(connection, answer)


def _answer(number: int, function: bytes, arguments: dict[str, Any] | None, limit_s: float) -> bytes:
    """What is sent: the call's number, its result, and its error."""
    # The kernel acts on this one, also where no Python code can run. Unused by anybody's own limits, unlike an alarm.
    signal.setitimer(signal.ITIMER_PROF, limit_s * (os.cpu_count() or 1) + 1)
    try:
        found = _load(function)
        return pickle.dumps((number, None if arguments is None else found(**arguments), None))
    except SystemExit:  # it ends the process, as it says
        raise
    except BaseException as error:
        error.add_note(f"in a process of its own:\n{traceback.format_exc()}")
        return pickle.dumps((number, None, portable(error, _read)))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _send(connection: socket.socket, message: bytes, deadline: float | None = None) -> None:
    """Raises TimeoutError behind the deadline (``time.monotonic``)."""
    connection.settimeout(_left(deadline))
    connection.sendall(_HEAD.pack(_MARK, len(message)) + message)


def _receive(connection: socket.socket, deadline: float | None = None, most: int = sys.maxsize) -> bytes:
    """Raises EOFError where the other end is closed, TimeoutError behind the deadline, ValueError for garbage."""
    mark, length = _HEAD.unpack(_exactly(_HEAD.size, connection, deadline))
    if mark != _MARK:
        raise ValueError(f"it begins with {mark!r}")
    if length > most:
        raise ValueError(f"it has {length} bytes, more than {most}")
    return _exactly(length, connection, deadline)


def _exactly(size: int, connection: socket.socket, deadline: float | None) -> bytes:
    found = bytearray()
    while len(found) < size:
        connection.settimeout(_left(deadline))
        chunk = connection.recv(min(size - len(found), CHUNK))
        if not chunk:
            raise EOFError
        found += chunk
    return bytes(found)


def _left(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class _Answer(pickle.Unpickler):
    """Reads plain data, this library's, and its errors and Python's."""

    def find_class(self, module: str, name: str) -> object:
        found = super().find_class(module, name) if module.partition(".")[0] in ("builtins", "skyasync") else None
        if isinstance(found, type) and (issubclass(found, Exception) or is_dataclass(found)):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no data")


def _read(answer: bytes) -> Any:
    return _Answer(io.BytesIO(answer)).load()


@cache
def _load(function: bytes) -> Callable[..., Any]:
    found: Callable[..., Any] = pickle.loads(function)
    return found


def _kill(process: subprocess.Popen[bytes]) -> None:
    """It has not been waited for, so its number is still its group's."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
