"""An event loop whose clock jumps to the next timer: hours pass in milliseconds, the same way every time.

Nothing outside the loop can wake it (no threads, no sockets), so a moment with neither a ready callback nor a
timer is a deadlock, and is raised as one at once.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(AssertionError):
    """Every task waits and no timer is set; the message names the tasks and where they wait."""


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__(_JumpingSelector(self))
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        self._now += seconds

    def deadlock(self) -> Deadlock:
        tasks = sorted(_where(task) for task in asyncio.all_tasks(self))
        return Deadlock(f"at {self._now:g} s nothing can happen any more; waiting: {', '.join(tasks)}")


class _JumpingSelector(selectors.SelectSelector):
    """Instead of sleeping until the next timer it moves the clock there."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise self._loop.deadlock()
        self._loop.jump(max(timeout, 0.0))
        return []


def run_virtual(coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result, on virtual time that starts at 0."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


def virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Turn an async test into one that runs on virtual time."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        run_virtual(test(*args, **kwargs))

    return run


def _where(task: asyncio.Task[Any]) -> str:
    """The task's coroutine and the innermost frame of ours that it waits in."""
    frames = task.get_stack()
    name = getattr(task.get_coro(), "__qualname__", task.get_name())
    return f"{name} (line {frames[-1].f_lineno})" if frames else name
