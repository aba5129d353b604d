"""An event loop whose clock jumps to the next timer: hours pass in milliseconds, reproducibly.

Invariant: nothing outside the loop can wake it (no threads, no sockets). So a moment without a
ready callback and without a timer is a deadlock; the error says which task waits where.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Every task waits and no timer is set; the message has a line for each task."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop in simulated time, which starts at second 0."""

    def __init__(self) -> None:
        super().__init__(_JumpingSelector(self))
        self.now = 0.0

    def time(self) -> float:
        return self.now


def run_virtual(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in simulated time that starts at 0; returns its result.

    Raises:
        Deadlock: if nothing can happen any more and the coroutine has not ended.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)


class _JumpingSelector(selectors.SelectSelector):
    """Moves the clock to the next timer instead of sleeping until then."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        loop = self._loop
        if timeout is None:  # asyncio has no timer
            waiting = sorted(_awaited_lines(task) for task in asyncio.all_tasks(loop))
            raise Deadlock(
                f"at {loop.now:g} s nothing can happen any more; waiting:\n  "
                + "\n  ".join(waiting)
            )
        loop.now += max(timeout, 0.0)
        # asyncio runs timers within this time of now. Below the spacing of floats it would wait for
        # ever.
        loop._clock_resolution = max(1e-9, 2 * math.ulp(loop.now))  # type: ignore[attr-defined]
        return []


def _awaited_lines(task: asyncio.Task[Any]) -> str:
    """The coroutines of a task, from the outermost on, each with the line at which it waits."""
    names: list[str] = []
    coroutine: Any = task.get_coro()
    while inspect.iscoroutine(coroutine):
        if coroutine.cr_frame is not None:
            names.append(f"{coroutine.__qualname__}:{coroutine.cr_frame.f_lineno}")
        coroutine = coroutine.cr_await
    return " > ".join(names)
