"""An event loop whose clock jumps to the next timer: hours pass in milliseconds, the same way every
time.

Invariant: nothing outside the loop can wake it (no threads, no sockets). So a moment with neither a
ready callback nor a timer is a deadlock; the error says which task waits where.
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
    """Every task waits and no timer is set; the message has a line for each task, from its start to
    where it waits."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at second 0."""

    def __init__(self) -> None:
        super().__init__(_JumpingSelector(self))
        self.now = 0.0

    def time(self) -> float:
        return self.now


def run_virtual(coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result, in simulated time that starts at 0.

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
        loop = self._loop
        if timeout is None:
            waiting = sorted(_awaits(task) for task in asyncio.all_tasks(loop))
            raise Deadlock(
                f"at {loop.now:g} s nothing can happen any more; waiting:\n  "
                + "\n  ".join(waiting)
            )
        loop.now += max(timeout, 0.0)
        # asyncio runs what is due within this of now; below the spacing of floats it would wait for
        # ever.
        loop._clock_resolution = max(1e-9, 2 * math.ulp(loop.now))  # type: ignore[attr-defined]
        return []


def _awaits(task: asyncio.Task[Any]) -> str:
    """The coroutines of a task, from its own to the innermost, each with the line at which it
    waits."""
    names: list[str] = []
    coroutine: Any = task.get_coro()
    while inspect.iscoroutine(coroutine):
        if coroutine.cr_frame is not None:
            names.append(f"{coroutine.__qualname__}:{coroutine.cr_frame.f_lineno}")
        coroutine = coroutine.cr_await
    return " > ".join(names)
