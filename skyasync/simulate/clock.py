"""An event loop whose clock jumps to the next timer: hours pass in milliseconds, the same way every time.

Invariant: nothing outside the loop can wake it (no threads, no sockets), so a moment with neither a ready
callback nor a timer is a deadlock, and is raised as one that says who waits for whom.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Every task waits and no timer is set; the message has a line for each task, from its start to where it waits."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at second 0."""

    def __init__(self) -> None:
        super().__init__(_JumpingSelector(self))
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        self._now += seconds
        # asyncio runs what is due within this of now; below the spacing of floats it would wait for ever.
        self._clock_resolution = max(1e-9, 2 * math.ulp(self._now))

    def deadlock(self) -> Deadlock:
        waiting = sorted(" > ".join(_awaits(task)) for task in asyncio.all_tasks(self))
        return Deadlock(f"at {self._now:g} s nothing can happen any more; waiting:\n  " + "\n  ".join(waiting))


def run_virtual(coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result, on virtual time that starts at 0.

    Raises:
        Deadlock: if nothing can happen any more and the coroutine has not ended.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)


class _JumpingSelector(selectors.SelectSelector):
    """Instead of sleeping until the next timer it moves the clock there."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise self._loop.deadlock()
        self._loop.jump(max(timeout, 0.0))
        return []


def _awaits(task: asyncio.Task[Any]) -> Iterator[str]:
    """The coroutines of a task, from its own to the innermost, each with the line at which it waits."""
    coroutine: Any = task.get_coro()
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)
        name = getattr(coroutine, "__qualname__", None)
        if name and frame is not None:
            yield f"{name}:{frame.f_lineno}"
        coroutine = getattr(coroutine, "cr_await", None)
