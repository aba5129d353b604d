"""One thread that alternates between work and commands.

Invariant: a command runs between two units of work, never during one, and its future always ends: with its
result, with its own error, or with the error that ended the thread's work.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class WorkerThread:
    """Calls ``work`` as long as it returns true, and commands in between; waits for a command otherwise.

    If ``work`` raises, ``on_failure`` hears of it in the thread, no work is done any more, and that error is the
    answer to every later command.
    """

    def __init__(self, name: str, work: Callable[[], bool], on_failure: Callable[[BaseException], None]) -> None:
        self._work = work
        self._on_failure = on_failure
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._closed = False
        self._lock = threading.Lock()  # nothing is posted after the closing mark
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, command: Callable[[], T]) -> Future[T]:
        """Run ``command`` in the thread. Raises RuntimeError once the thread is closed."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._thread.name} has been shut down")
            self._commands.put((command, future))
        return future

    def close(self) -> None:
        """Let the thread end after the commands posted so far. Safe to call twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._commands.put(None)

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        more = False
        while self._run_commands(wait=not more):
            more = self._failure is None and self._run_work()

    def _run_work(self) -> bool:
        try:
            return self._work()
        except BaseException as error:
            self._failure = error
            self._on_failure(error)
            return False

    def _run_commands(self, wait: bool) -> bool:
        """Run what has been posted (wait for one if asked); false when the thread is to end."""
        while wait or not self._commands.empty():
            posted = self._commands.get()
            if posted is None:
                return False
            self._answer(*posted)
            wait = False
        return True

    def _answer(self, command: Callable[[], Any], future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            if self._failure is not None:
                raise self._failure
            future.set_result(command())
        except BaseException as error:
            future.set_exception(error)
