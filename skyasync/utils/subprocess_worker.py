"""Worker processes for functions that are not trusted: one call at a time, killed at a time limit.

Invariant: ``SubprocessWorker.call`` returns the result of its call or raises within the limit,
sending and receiving included. A function may hang, hold the interpreter lock, exit, crash, fork,
or write to the worker's socket.

- A result has the number of its call. A worker that sends anything else is killed.
- The worker's process group is killed with it, with all processes that its functions have started
  in that group.
- Results are data: reading one runs no code of the function.
- Functions run in the worker's main thread, so that their signals work as well.
- If its parent was killed, a worker ends too: at once if it is idle, else after the processor time
  that the limit allows.

| who waits                | for what            | woken by                                                        |
|--------------------------|---------------------|-----------------------------------------------------------------|
| ``SubprocessPool.alone`` | a free worker       | a caller that has finished, or a replacement that has loaded;    |
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
# Bytes of an answer: a function that sends more must not fill the memory of its caller.
MAX_BYTES = 64 << 20
# Head of a message: a mark, and the number of bytes after it.
_HEAD = struct.Struct("!4sQ")
_MARK = b"call"


class NoAnswerError(Exception):
    """There is no result, and the message says why. The worker is gone."""


class SubprocessWorker:
    """One worker, which starts at once."""

    def __init__(self) -> None:
        self.lost: Exception | None = None
        self._loaded_functions: set[bytes] = set()
        self._call_numbers = count(1)
        self._socket, worker_socket = socket.socketpair()
        handle = worker_socket.fileno()
        program = f"from skyasync.utils.subprocess_worker import serve; serve({handle})"
        # The worker imports the same modules, also those of the working directory ("").
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with worker_socket:
            process = subprocess.Popen(
                [sys.executable, "-c", program],
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=[handle],
                stdin=subprocess.DEVNULL,
                # A group that is killed with the worker; Ctrl-C in the terminal does not reach it.
                start_new_session=True,
            )
        self._stop = finalize(self, _kill, process)

    @property
    def is_quiet(self) -> bool:
        """Whether the worker is alive and has sent nothing between calls; else it is killed."""
        try:
            self._socket.settimeout(0)
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:  # nothing to read
            return True
        except OSError:  # the connection or this end of it is closed
            pass
        self.kill()
        return False

    def load(self, name: str, function: bytes) -> None:
        """Have it unpickle a callable, once.

        Raises:
            UserError: if that takes longer than ``START_S``, or ends the worker.
        """
        if function in self._loaded_functions:
            return
        try:
            self._request(function, None, START_S)
        except NoAnswerError as problem:
            raise UserError(f"the module of {name} cannot be loaded: {problem}") from problem
        self._loaded_functions.add(function)

    def call(self, name: str, function: bytes, arguments: dict[str, Any], limit_s: float) -> Any:
        """Return ``function(**arguments)``.

        Args:
            function: a pickled callable.

        Raises:
            NoAnswerError: if the function does not return within ``limit_s``, or the worker ends.
            UserError: if it cannot be loaded.
            Exception: the function's error, with a note that has its traceback.
        """
        self.load(name, function)
        return self._request(function, arguments, limit_s)

    def kill(self, problem: Exception | None = None) -> None:
        """End the worker and its process group, if it is not lost yet."""
        if self.lost is None:
            self.lost = problem or RuntimeError("it was ended")
            self._socket.close()
            self._stop()

    def _request(self, function: bytes, arguments: dict[str, Any] | None, limit_s: float) -> object:
        """Send a call, and return or raise its result; without arguments it loads the function."""
        number = next(self._call_numbers)
        request = pickle.dumps((number, function, arguments, limit_s))
        deadline_s = time.monotonic() + limit_s
        try:
            _send(self._socket, request, deadline_s)
            answer = _receive(self._socket, deadline_s, MAX_BYTES)
            answer_number, result, error = _read(answer)
            if answer_number != number:
                raise ValueError(f"the answer to call {answer_number!r} came to call {number}")
        except Exception as cause:
            if isinstance(cause, TimeoutError):
                problem = NoAnswerError(f"it did not return within {limit_s:g} s")
            elif isinstance(cause, EOFError | OSError):
                problem = NoAnswerError("it ended its process")
            else:
                problem = NoAnswerError(f"its process sent an invalid answer ({headline(cause)})")
            self.kill(problem)
            raise problem from cause
        if error is not None:
            raise error
        return result


class SubprocessPool:
    """Workers for several threads, each used by one caller at a time.

    They are started as they are needed, and replaced when they are lost.

    Args:
        size: workers at once.
        start: makes a worker.
    """

    def __init__(self, size: int, start: Callable[[], SubprocessWorker] = SubprocessWorker) -> None:
        self._start = start
        self._slots = threading.Semaphore(size)
        # Slots that were released so far: callers that wait see by it that other calls end.
        self._releases = 0
        self._longest_limit_s = 0.0  # of a call
        self._lock = threading.Lock()
        # Pickled function -> its name; every worker loads them before its first call.
        self._functions: dict[bytes, str] = {}
        self._free_workers: list[SubprocessWorker] = []
        self._workers: set[SubprocessWorker] = set()

    def load(self, name: str, function: bytes) -> None:
        """Load a function in one worker now, and in the others before their first call.

        Raises:
            UserError: if it cannot be loaded.
        """
        with self.alone() as worker:
            worker.load(name, function)
        self._functions[function] = name

    def call(self, name: str, function: bytes, arguments: dict[str, Any], limit_s: float) -> Any:
        """``SubprocessWorker.call`` of a free worker.

        Waiting and loading do not count towards the limit.
        """
        self._longest_limit_s = max(self._longest_limit_s, limit_s)
        if function not in self._functions:
            self.load(name, function)
        with self.alone() as worker:
            return worker.call(name, function, arguments, limit_s)

    @contextmanager
    def alone(self) -> Iterator[SubprocessWorker]:
        """Take a worker that has no other caller in the block.

        If it is lost in the block, it is replaced in a thread.

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
                    self._free_workers.append(worker)
                elif worker is not None:
                    self._workers.discard(worker)
            if worker is not None and is_open and worker.lost is not None:
                # The thread has the slot, until the new worker has loaded.
                thread = threading.Thread(
                    target=self._replace, name="replaces a worker", daemon=True
                )
                thread.start()
            else:
                self._release()

    def close(self) -> None:
        """Kill the workers. The next call starts others."""
        with self._lock:
            workers = self._workers
            self._workers = set()
            self._free_workers = []
        for worker in workers:
            worker.kill()

    def _acquire(self) -> None:
        while True:
            releases = self._releases
            limit_s = START_S + self._longest_limit_s
            if self._slots.acquire(timeout=limit_s):
                return
            # Else other callers were faster, and this one waits again.
            if self._releases == releases:
                raise TimeoutError(f"no worker process became free within {limit_s:g} s")

    def _release(self) -> None:
        with self._lock:
            self._releases += 1
        self._slots.release()

    def _take(self) -> SubprocessWorker:
        """A free worker that is quiet, or a new one that has loaded all functions."""
        while True:
            with self._lock:
                if not self._free_workers:
                    worker = self._start()
                    self._workers.add(worker)
                    break
                worker = self._free_workers.pop()
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
        """Replace a worker, in a thread: loading takes time."""
        try:
            with suppress(Exception):  # the next caller tries too, and gets the error
                worker = self._take()
                with self._lock:
                    if worker in self._workers:  # else the pool was closed
                        self._free_workers.append(worker)
        finally:
            self._release()


def serve(handle: int) -> None:
    """Answer calls until the other end is closed: the worker's program.

    Args:
        handle: file descriptor of the worker's socket.
    """
    # Processes that a function starts or forks must not have the socket: it would stay open after
    # the worker's end, and the caller would not notice that.
    os.set_inheritable(handle, False)
    connection = socket.socket(fileno=handle)
    worker_pid = os.getpid()
    os.register_at_fork(after_in_child=connection.close)
    while True:
        try:
            number, *message = pickle.loads(_receive(connection))
        except EOFError:
            # Ends the processes that functions have started, and runs no exit handler of theirs.
            os.killpg(os.getpgrp(), signal.SIGKILL)
        answer = _answer(number, *message)
        # The function may have forked, and return in both processes: one of them answers.
        if os.getpid() != worker_pid:
            os._exit(0)
        _send(connection, answer)


def _answer(
    number: int, function: bytes, arguments: dict[str, Any] | None, limit_s: float
) -> bytes:
    """The pickled answer to a call: its number, its result, and its error."""
    # A limit of processor time, which ends the worker if its parent was killed. The kernel acts on
    # it, also if no Python code can run. Functions use this timer less than an alarm.
    signal.setitimer(signal.ITIMER_PROF, limit_s * (os.cpu_count() or 1) + 1)
    try:
        call = _load(function)
        result = None if arguments is None else call(**arguments)
        return pickle.dumps((number, result, None))
    except SystemExit:  # it ends the process, as the function wants
        raise
    except BaseException as error:
        error.add_note(f"in a process of its own:\n{traceback.format_exc()}")
        return pickle.dumps((number, None, portable(error, _read)))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _send(connection: socket.socket, message: bytes, deadline_s: float | None = None) -> None:
    """Send a message. Raises TimeoutError after the deadline (``time.monotonic``)."""
    connection.settimeout(_remaining_s(deadline_s))
    connection.sendall(_HEAD.pack(_MARK, len(message)) + message)


def _receive(
    connection: socket.socket, deadline_s: float | None = None, max_bytes: int = sys.maxsize
) -> bytes:
    """Receive a message.

    Raises:
        EOFError: if the other end is closed.
        TimeoutError: after the deadline (``time.monotonic``).
        ValueError: for bytes that are no message, or too many.
    """
    mark, length = _HEAD.unpack(_receive_bytes(_HEAD.size, connection, deadline_s))
    if mark != _MARK:
        raise ValueError(f"it begins with {mark!r}")
    if length > max_bytes:
        raise ValueError(f"it has {length} bytes, more than {max_bytes}")
    return _receive_bytes(length, connection, deadline_s)


def _receive_bytes(size: int, connection: socket.socket, deadline_s: float | None) -> bytes:
    content = bytearray()
    while len(content) < size:
        connection.settimeout(_remaining_s(deadline_s))
        chunk = connection.recv(min(size - len(content), CHUNK))
        if not chunk:
            raise EOFError
        content += chunk
    return bytes(content)


def _remaining_s(deadline_s: float | None) -> float | None:
    """Seconds until the deadline. Raises TimeoutError if it has passed."""
    if deadline_s is None:
        return None
    remaining_s = deadline_s - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError
    return remaining_s


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles plain data, this library's dataclasses, and its errors and Python's."""

    def find_class(self, module: str, name: str) -> object:
        # Other classes and functions would run code of the worker in this process.
        if module.partition(".")[0] in ("builtins", "skyasync"):
            member = super().find_class(module, name)
            if isinstance(member, type) and (issubclass(member, Exception) or is_dataclass(member)):
                return member
        raise pickle.UnpicklingError(f"{module}.{name} is no data")


def _read(answer: bytes) -> Any:
    return _PlainUnpickler(io.BytesIO(answer)).load()


@cache
def _load(function: bytes) -> Callable[..., Any]:
    result: Callable[..., Any] = pickle.loads(function)
    return result


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker's process group."""
    # The worker has not been waited for, so no other group can have its number.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
