"""A number of processes, kept at work.

Invariant: whoever asks gets a process that lives and is not stuck. One that is lost is replaced at once; one in which
too many calls hang gets no new work, another takes its place, and it is ended when its last work has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

MOST_HUNG = 4  # calls that may hang in a process before it is replaced


class Process(Protocol):
    """What a pool knows of a process. ``keys``: what it works on."""

    keys: set[str]
    lost: Exception | None
    hung: int

    @property
    def ready(self) -> bool:
        """Whether it can begin at once."""

    @property
    def idle(self) -> bool: ...

    def kill(self) -> None: ...


P = TypeVar("P", bound=Process)


class Pool(Generic[P]):
    """``start(look_at)`` starts a process, which calls ``look_at(itself)`` when it is ready, lost or has hanging calls.

    May be used from several threads.
    """

    def __init__(self, start: Callable[[Callable[[P], None]], P], count: int) -> None:
        self._start, self._count = start, count
        self._changed = threading.Condition(threading.RLock())
        self.processes: list[P] = []
        self.replaced = 0

    def fill(self) -> None:
        """Start all of them, so that they are there when they are needed."""
        with self._changed:
            self.processes += [self._start(self.look_at) for _ in range(self._count - len(self.processes))]

    def take(self, key: str) -> P:
        """The process with the least work, which has this as well until it is given back."""
        self.fill()
        process = min(self.processes, key=lambda process: len(process.keys))
        process.keys.add(key)
        return process

    def give_back(self, process: P, key: str) -> None:
        process.keys.discard(key)
        self.look_at(process)

    @contextmanager
    def alone(self) -> Iterator[P]:
        """A process that works for nobody else meanwhile; waits for one. More start where many ask at once."""
        with self._changed:
            while not (free := [process for process in self.processes if process.ready and not process.keys]):
                if len(self.processes) < self._count:
                    self.processes.append(self._start(self.look_at))
                    if self.processes[-1].ready:
                        continue
                self._changed.wait()
            free[0].keys.add("")
        try:
            yield free[0]
        finally:
            self.give_back(free[0], "")

    def look_at(self, process: P) -> None:
        """Replace a process that is lost or stuck; end one that was replaced and is needed no more."""
        with self._changed:
            if process in self.processes:
                if process.lost is not None or process.hung >= MOST_HUNG:
                    self.processes[self.processes.index(process)] = self._start(self.look_at)
                    self.replaced += 1
            elif process.idle and process.lost is None:
                process.kill()
            self._changed.notify_all()

    def close(self) -> None:
        """Kill all of them."""
        for process in self.let_go():
            process.kill()

    def let_go(self) -> list[P]:
        """All of them, whose end is no longer looked at."""
        with self._changed:
            processes, self.processes = self.processes, []
        return processes
