"""Worker processes for functions that may do anything: each calls one at a time, and is killed at
its time limit.

Invariant: ``SubprocessWorker.call`` returns its own result or raises within the limit, sending and
receiving included; a function may hang, hold the interpreter lock, exit, crash, fork, or write to
the worker's socket. A result has the number of its call, and a worker that sends anything else is
killed. The worker's process group is killed with it: all that its functions have started, unless
that has a group of its own. Results are data: reading one runs no code of the function. Functions
run in the worker's main thread, so that their own signals work as well. If its parent was killed, a
worker ends too: at once if it is idle, else after the processor time that the limit allows.

| who waits                | for what            | woken by                                                        |
|--------------------------|---------------------|-----------------------------------------------------------------|
| ``SubprocessPool.alone`` | a free worker       | another caller that is done, or a replacement that has loaded;   |
|                          |                     | an error if none is free for longer than a call may take         |
| ``call``                 | the result          | the worker (result, end), or ``limit_s``: the worker is killed   |
| the worker               | the next call       | the call, or the end of its parent                              |
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from functools import cache
from itertools import count
from typing import Any
from weakref import finalize

from skyasync.errors import UserError, headline
from skyasync.utils.rpc import START_S, portable

CHUNK = 1 << 20  # bytes that are read at once
MOST = 64 << 20  # bytes of an answer
# of a message: a mark, and the number of bytes after it
_HEAD = struct.Struct("!4sQ")
_MARK = b"call"


class NoAnswerError(Exception):
    """There is no result, and the message says why. The worker is gone."""


class SubprocessWorker:
    """One worker, which starts at once."""

    def __init__(self) -> None:
        self.lost: Exception | None = None
        self._loaded = set[bytes]()
        self._numbers = count(1)
        self._socket, theirs = socket.socketpair()
        program = f"from skyasync.utils.subprocess_worker import serve; serve({theirs.fileno()})"
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", program],
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Ctrl-C in the terminal is not for it; and a group, which is killed with it
                start_new_session=True,
            )
        self._stop = finalize(self, _kill, process)

    @property
    def is_quiet(self) -> bool:
        """Whether it is alive and has sent nothing between calls; else it is killed, for what an
        earlier call left."""
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
        """Have it unpickle a callable, once.

        Raises:
            UserError: if that takes longer than ``START_S``, or ends the worker.
        """
        if function in self._loaded:
            return
        try:
            self._ask((function, None, START_S))
        except NoAnswerError as problem:
            raise UserError(f"the module of {name} cannot be loaded: {problem}") from problem
        self._loaded.add(function)

    def call(self, name: str, function: bytes, arguments: dict[str, Any], limit_s: float) -> Any:
        """``function(**arguments)``.

        Raises:
            NoAnswerError: if the function does not return within ``limit_s``, or the worker ends.
            UserError: if it cannot be loaded.
            Exception: what the function raised, with a note that holds its traceback.
        """
        self.load(name, function)
        return self._ask((function, arguments, limit_s))

    def kill(self, problem: Exception | None = None) -> None:
        if self.lost is None:
            self.lost = problem or RuntimeError("it was ended")
            self._socket.close()
            self._stop()

    def _ask(self, message: tuple[bytes, dict[str, Any] | None, float]) -> object:
        number = next(self._numbers)
        limit_s = message[-1]
        request = pickle.dumps((number, *message))
        deadline = time.monotonic() + limit_s
        try:
            _send(self._socket, request, deadline)
            answered, result, error = _read(_receive(self._socket, deadline, MOST))
            if answered != number:
                raise ValueError(f"the answer to call {answered!r} came to call {number}")
        except Exception as caught:
            if isinstance(caught, TimeoutError):
                problem = NoAnswerError(f"it did not return within {limit_s:g} s")
            elif isinstance(caught, EOFError | OSError):
                problem = NoAnswerError("it ended its process")
            else:
                problem = NoAnswerError(f"its process sent an invalid answer ({headline(caught)})")
            self.kill(problem)
            raise problem from caught
        if error is not None:
            raise error
        return result


class SubprocessPool:
    """Workers that are started as they are needed, replaced when they are lost, and used by one
    caller at a time.

    May be used from several threads.

    Args:
        most: workers at once.
        start: makes one.
    """

    def __init__(self, most: int, start: Callable[[], SubprocessWorker] = SubprocessWorker) -> None:
        self._start = start
        self._slots = threading.Semaphore(most)
        self._released = (
            0  # slots, so far: shows those who wait for one that the calls before theirs end
        )
        self._longest_limit_s = 0.0  # of a call
        self._lock = threading.Lock()
        #: Pickled, with their names; every worker loads them before its first call.
        self._functions: dict[bytes, str] = {}
        self._free: list[SubprocessWorker] = []
        self._workers: set[SubprocessWorker] = set()

    def load(self, name: str, function: bytes) -> None:
        """Have a function loaded, now in one worker and before their first call in all others.

        Raises:
            UserError: if it cannot be loaded.
        """
        with self.alone() as worker:
            worker.load(name, function)
        self._functions[function] = name

    def call(self, name: str, function: bytes, arguments: dict[str, Any], limit_s: float) -> Any:
        """``SubprocessWorker.call`` in a worker that is free; waiting and loading do not count
        towards the limit."""
        self._longest_limit_s = max(self._longest_limit_s, limit_s)
        if function not in self._functions:
            self.load(name, function)
        with self.alone() as worker:
            return worker.call(name, function, arguments, limit_s)

    @contextmanager
    def alone(self) -> Iterator[SubprocessWorker]:
        """A worker that has no other caller meanwhile; one that is lost then is replaced in a
        thread.

        Raises:
            TimeoutError: if all workers are in use and none becomes free for longer than a call and
                its loading may take.
        """
        self._acquire()
        worker = None
        try:
            worker = self._take()
            yield worker
        finally:
            with self._lock:
                is_open = worker in self._workers  # else the pool was closed
                if worker is not None and is_open and worker.lost is None:
                    self._free.append(worker)
                elif worker is not None:
                    self._workers.discard(worker)
            if worker is not None and is_open and worker.lost is not None:
                threading.Thread(
                    target=self._replace, name="replaces a worker", daemon=True
                ).start()
            else:
                self._release()

    def close(self) -> None:
        """Kill the workers. The next call starts others."""
        with self._lock:
            workers = self._workers
            self._workers = set()
            self._free = []
        for worker in workers:
            worker.kill()

    def _acquire(self) -> None:
        while True:
            released = self._released
            limit_s = START_S + self._longest_limit_s
            if self._slots.acquire(timeout=limit_s):
                return
            if self._released == released:
                raise TimeoutError(f"no worker process became free within {limit_s:g} s")

    def _release(self) -> None:
        with self._lock:
            self._released += 1
        self._slots.release()

    def _take(self) -> SubprocessWorker:
        while True:
            with self._lock:
                if not self._free:
                    worker = self._start()
                    self._workers.add(worker)
                    break
                worker = self._free.pop()
            if worker.is_quiet:
                return worker
            self._workers.discard(worker)
        try:
            for function, name in list(self._functions.items()):
                worker.load(name, function)
        except BaseException:
            worker.kill()
            self._workers.discard(worker)
            raise
        return worker

    def _replace(self) -> None:
        """Replace a worker, in a thread, since loading takes time. If this fails, the next caller's
        own try raises."""
        try:
            with suppress(Exception):
                worker = self._take()
                with self._lock:
                    if worker in self._workers:  # else the pool was closed
                        self._free.append(worker)
        finally:
            self._release()


def serve(handle: int) -> None:
    """The worker's program: answer calls until the other end is closed."""
    os.set_inheritable(
        handle, False
    )  # else a program that a function has started would hide the worker's end
    connection = socket.socket(fileno=handle)
    own = os.getpid()
    os.register_at_fork(after_in_child=connection.close)  # else a fork would hide the worker's end
    while True:
        try:
            number, *message = pickle.loads(_receive(connection))
        except (
            EOFError
        ):  # without the functions' threads and exit handlers, and with what they have started
            os.killpg(os.getpgrp(), signal.SIGKILL)
        answer = _answer(number, *message)
        if os.getpid() != own:  # the function has forked, and both have returned: one answers
            os._exit(0)
        _send(connection, answer)


def _answer(
    number: int, function: bytes, arguments: dict[str, Any] | None, limit_s: float
) -> bytes:
    """What is sent: the call's number, its result, and its error."""
    # The kernel acts on this one, also where no Python code can run. Unused by anybody's own
    # limits, unlike an alarm.
    signal.setitimer(signal.ITIMER_PROF, limit_s * (os.cpu_count() or 1) + 1)
    try:
        call = _load(function)
        return pickle.dumps((number, None if arguments is None else call(**arguments), None))
    except SystemExit:  # it ends the process, as it says
        raise
    except BaseException as error:
        error.add_note(f"in a process of its own:\n{traceback.format_exc()}")
        return pickle.dumps((number, None, portable(error, _read)))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _send(connection: socket.socket, message: bytes, deadline: float | None = None) -> None:
    """Raises TimeoutError after the deadline (``time.monotonic``)."""
    connection.settimeout(_remaining(deadline))
    connection.sendall(_HEAD.pack(_MARK, len(message)) + message)


def _receive(
    connection: socket.socket, deadline: float | None = None, most: int = sys.maxsize
) -> bytes:
    """Raises EOFError where the other end is closed, TimeoutError after the deadline, ValueError
    for garbage."""
    mark, length = _HEAD.unpack(_exactly(_HEAD.size, connection, deadline))
    if mark != _MARK:
        raise ValueError(f"it begins with {mark!r}")
    if length > most:
        raise ValueError(f"it has {length} bytes, more than {most}")
    return _exactly(length, connection, deadline)


def _exactly(size: int, connection: socket.socket, deadline: float | None) -> bytes:
    received = bytearray()
    while len(received) < size:
        connection.settimeout(_remaining(deadline))
        chunk = connection.recv(min(size - len(received), CHUNK))
        if not chunk:
            raise EOFError
        received += chunk
    return bytes(received)


def _remaining(deadline: float | None) -> float | None:
    if deadline is None:
        remaining = None
    else:
        remaining = deadline - time.monotonic()
    if remaining is not None and remaining <= 0:
        raise TimeoutError
    return remaining


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain data, this library's, and its errors and Python's."""

    def find_class(self, module: str, name: str) -> object:
        if module.partition(".")[0] in ("builtins", "skyasync"):
            plain = super().find_class(module, name)
        else:
            plain = None
        if isinstance(plain, type) and (issubclass(plain, Exception) or is_dataclass(plain)):
            return plain
        raise pickle.UnpicklingError(f"{module}.{name} is no data")


def _read(answer: bytes) -> Any:
    return _PlainUnpickler(io.BytesIO(answer)).load()


@cache
def _load(function: bytes) -> Callable[..., Any]:
    loaded: Callable[..., Any] = pickle.loads(function)
    return loaded


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker's group. The worker has not been waited for, so its number is still the
    group's."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
