"""Threads for blocking calls, as few as keep the calls flowing.

Invariant: jobs are started in the order given, and each is answered exactly once: with its result, or with None when it
has run for ``limit_s``. A thread that hangs cannot be ended; another one takes its place.

Quick jobs run one after the other in one thread; more threads would only take turns. A watchdog looks every few
milliseconds. While jobs wait and the process does not compute, the running jobs wait for something else, and the
number of threads doubles. A process that is busy computing gets fewer again. Threads end when no job is left.

| who waits     | for what           | woken by                                                     |
|---------------|--------------------|--------------------------------------------------------------|
| the watchdog  | jobs to watch      | ``submit``; then it looks every ``TICK_S``                    |
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

TICK_S = 0.005
BUSY = 0.5  # share of a core from which on the process counts as computing
LONG_S = 1.0  # a job that runs so long leaves its place to another one, also if the process is busy
MOST_LONG = 4  # at once


@dataclass(eq=False)
class _Running(Generic[T]):
    job: T
    since: float
    hung: bool = False


def next_width(width: int, most: int, *, waiting: bool, busy: float) -> int:
    """Threads to work at once from now on.

    Args:
        waiting: whether jobs are left that no thread has started.
        busy: CPU time that the process has used since the last look, as a share of the time passed.
    """
    if busy > BUSY:
        return max(width // 2, 1)
    return min(width * 2, most) if waiting else width


class AdaptiveThreads(Generic[T, R]):
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
        self._lock = threading.Lock()
        self._waiting: deque[T] = deque()
        self._running: set[_Running[T]] = set()
        self._width, self._long = 1, 0
        self._threads = 0  # that take jobs: those that hang are not counted
        self._closed = False
        self._watching = threading.Event()
        self._watchdog: threading.Thread | None = None
        self.hung = 0  # threads stuck in a job that has been answered for them

    def submit(self, jobs: Iterable[T]) -> None:
        with self._lock:
            self._waiting.extend(jobs)
            self._start_threads()
            if self._watchdog is None:
                self._watchdog = _start(self._watch, "watchdog of calls")
        self._watching.set()

    def close(self) -> None:
        """Drop the jobs that wait; threads end after the job that they run."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
        self._watching.set()

    @property
    def _room(self) -> int:
        return min(self._width + self._long, self._most)

    def _start_threads(self) -> None:
        for _ in range(min(self._room - self._threads, len(self._waiting))):
            self._threads += 1
            _start(self._serve, "calls")

    def _serve(self) -> None:
        while (running := self._next()) is not None:
            result = self._work(running.job)
            with self._lock:
                self._running.discard(running)
                if running.hung:
                    self.hung -= 1
                    return  # its place has been taken
            self._answer(running.job, result)

    def _next(self) -> _Running[T] | None:
        """A job for the calling thread; None ends the thread."""
        with self._lock:
            if not self._waiting or self._threads > self._room:
                self._threads -= 1
                return None
            running = _Running(self._waiting.popleft(), time.monotonic())
            self._running.add(running)
            return running

    def _watch(self) -> None:
        while not self._closed:
            self._watching.wait()
            computed, looked = time.process_time(), time.monotonic()
            time.sleep(TICK_S)
            busy = (time.process_time() - computed) / (time.monotonic() - looked)
            for job in self._adjust(busy):
                self._answer(job, None)

    def _adjust(self, busy: float) -> list[T]:
        """Set the number of threads; returns the jobs that have just been found to hang."""
        now = time.monotonic()
        with self._lock:
            hanging = [r for r in self._running if not r.hung and now - r.since > self._limit_s]
            for running in hanging:
                running.hung = True
            self.hung += len(hanging)
            self._threads -= len(hanging)
            self._long = min(sum(not r.hung and now - r.since > LONG_S for r in self._running), MOST_LONG)
            self._width = next_width(self._width, self._most, waiting=bool(self._waiting), busy=busy)
            self._start_threads()
            if not self._waiting and len(self._running) == self.hung and not self._closed:
                self._watching.clear()
        return [running.job for running in hanging]


def _start(target: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread
