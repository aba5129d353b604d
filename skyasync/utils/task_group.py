"""Coroutines that run and end together, time limits, and cleaning up without hiding why."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from types import CoroutineType
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

GRACE_S = 10.0


class StrictTaskGroup(asyncio.TaskGroup):
    """A task group in which a task that is cancelled from within is an error, not a quiet end."""

    def start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        async def run() -> T:
            task = asyncio.current_task()
            try:
                return await coroutine
            except asyncio.CancelledError as error:
                if task is None or task.cancelling():
                    raise
                name = coroutine.__qualname__ if isinstance(coroutine, CoroutineType) else coroutine
                raise RuntimeError(
                    f"{name} ended with CancelledError although the run was not stopped: something "
                    f"that it awaited was cancelled (a task, a timeout, a closed client)"
                ) from error

        task = self.create_task(run())
        task.add_done_callback(
            lambda _: coroutine.close()
        )  # of a task that was cancelled before it began
        return task


@asynccontextmanager
async def together() -> AsyncIterator[StrictTaskGroup]:
    """Whatever is started on the yielded group has ended when the block has; see ``run_together``
    for errors."""
    try:
        async with StrictTaskGroup() as tasks:
            yield tasks
        return
    except BaseExceptionGroup as group:
        errors = group.exceptions
    raise_first(
        errors
    )  # outside the handler, which would put the group in the place of the error's own context


def raise_first(errors: Sequence[BaseException]) -> NoReturn:
    """Raise the first error. The others are notes on it, once each: many may fail alike."""
    first, *others = errors
    for other in dict.fromkeys(repr(other) for other in others if other is not first):
        first.add_note(f"at the same time: {other}")
    raise first


async def run_together(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run until all have ended; the first error cancels the others and is raised as it was.

    An exception group would hide the error a user is looking for, so the group is opened: the first
    error is raised with its own traceback, cause and context, and further ones are noted on it.

    Raises:
        RuntimeError: if a coroutine ends by a cancellation that was not requested (something it
            awaited was cancelled); the others would wait for it for ever.
    """
    async with together() as tasks:
        for coroutine in coroutines:
            tasks.start(coroutine)


@asynccontextmanager
async def afterwards(
    call: Callable[..., Awaitable[Any]], *args: object, grace_s: float = GRACE_S
) -> AsyncIterator[None]:
    """Await ``call(*args)`` at the end, also after an error inside.

    ``try`` and ``finally`` would raise the error of ``call`` in the place of the one from inside;
    here it becomes a note on that.

    Args:
        grace_s: how long the call may take after an error. If all went well its own limits hold.
    """
    try:
        yield
    except BaseException as error:
        try:
            async with asyncio.timeout(grace_s):
                await call(*args)
        except Exception as another:
            error.add_note(f"and then, while cleaning up: {another!r}")
        raise
    await call(*args)


def run_in_own_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run``, in another thread if an event loop runs in this one (a notebook's); Ctrl-C
    cancels it there."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    started: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []
    interrupted = threading.Event()

    async def run() -> T:
        task = asyncio.current_task()
        assert task is not None
        started.append((asyncio.get_running_loop(), task))
        if interrupted.is_set():  # before there was a task to cancel
            coroutine.close()
            raise asyncio.CancelledError
        return await coroutine

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(asyncio.run, run())
        try:
            return running.result()
        except KeyboardInterrupt:
            interrupted.set()
            for loop, task in started:
                with suppress(RuntimeError):  # it has just ended
                    loop.call_soon_threadsafe(task.cancel)
            raise


@asynccontextmanager
async def within(
    limit_s: float, what: str, key: str = "trainer.step_timeout_s"
) -> AsyncIterator[None]:
    """End what takes longer than the limit.

    Raises:
        TimeoutError: naming what it was, and the key.
    """
    try:
        async with asyncio.timeout(limit_s) as timer:
            yield
    except TimeoutError as error:
        if not timer.expired():
            raise
        raise TimeoutError(f"{what} did not end within {limit_s:g} s ({key})") from error


async def not_halfway(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine that must not stop in the middle: a cancellation is raised after its
    end."""
    task = asyncio.create_task(coroutine)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
