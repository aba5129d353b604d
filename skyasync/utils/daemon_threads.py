"""Threads for calls that may block or hang.

Invariant: jobs are started in the order given, and each is answered exactly once: with its result, or with None when it
has run for ``limit_s``. A thread that hangs cannot be ended; another one takes its place. (``ThreadPoolExecutor`` waits
for its threads at exit, so that one that hangs would keep its process alive.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from math import isfinite
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class DaemonThreads(Generic[T, R]):
    """Runs ``work(job)`` in threads and passes what it returns to ``answer(job, result)``.

    Args:
        work: must not raise.
        answer: called in any thread; with None for a job that hangs (what its ``work`` returns later is dropped).
        most: threads at once, those that hang not counted.
    """

    def __init__(
        self, work: Callable[[T], R], answer: Callable[[T, R | None], None], *, most: int, limit_s: float
    ) -> None:
        self._work, self._answer = work, answer
        self._most, self._limit_s = most, limit_s
        self._jobs: SimpleQueue[tuple[T] | None] = SimpleQueue()  # None ends a thread
        self._running: dict[object, tuple[T, float]] = {}  # since when; who removes a job answers it
        self._lock = threading.Lock()
        self._unfinished = self._threads = 0  # those that hang not counted
        self._closed = threading.Event()
        self.hung = 0  # threads stuck in a job that has been answered for them
        if isfinite(limit_s):
            _start(self._watch)

    def submit(self, jobs: Iterable[T]) -> None:
        with self._lock:
            for job in jobs:
                self._jobs.put((job,))
                self._unfinished += 1
                if self._threads < min(self._unfinished, self._most):
                    self._threads += 1
                    _start(self._serve)

    def close(self) -> None:
        """Threads end after the jobs that they have."""
        self._closed.set()
        for _ in range(self._threads):
            self._jobs.put(None)

    def _serve(self) -> None:
        while (taken := self._jobs.get()) is not None:
            (job,), number = taken, object()
            self._running[number] = (job, time.monotonic())
            result = self._work(job)
            if self._running.pop(number, None) is None:
                with self._lock:
                    self.hung -= 1
                return  # its place has been taken
            with self._lock:
                self._unfinished -= 1
            self._answer(job, result)

    def _watch(self) -> None:
        """Find jobs that hang. A job that starts later is due later, so it sleeps until the first one is due."""
        sleep_s = self._limit_s
        while not self._closed.wait(sleep_s):
            latest = time.monotonic() - self._limit_s
            for number, (job, since) in self._running.copy().items():
                if since <= latest and self._running.pop(number, None) is not None:
                    with self._lock:
                        self.hung += 1
                        self._unfinished -= 1
                        _start(self._serve)  # in its place
                    self._answer(job, None)
            sleep_s = (
                min((since for _, since in self._running.copy().values()), default=latest + self._limit_s) - latest
            )


def _start(target: Callable[[], None]) -> None:
    threading.Thread(target=target, name="calls", daemon=True).start()
