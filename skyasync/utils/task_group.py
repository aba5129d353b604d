"""Coroutines that run and end together, time limits, and cleaning up without hiding errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from types import CoroutineType
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

GRACE_S = 10.0  # for cleaning up after an error


class StrictTaskGroup(asyncio.TaskGroup):
    """A task group in which a task that is cancelled from within is an error, not a quiet end."""

    def start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine as a task of the group."""

        async def run() -> T:
            task = asyncio.current_task()
            try:
                return await coroutine
            except asyncio.CancelledError as error:
                if task is None or task.cancelling():  # the task itself was cancelled
                    raise
                name = coroutine.__qualname__ if isinstance(coroutine, CoroutineType) else coroutine
                raise RuntimeError(
                    f"{name} ended with CancelledError although the run was not stopped: something "
                    f"that it awaited was cancelled (a task, a timeout, a closed client)"
                ) from error

        task = self.create_task(run())
        # A task that is cancelled before it begins never awaits the coroutine.
        task.add_done_callback(lambda _: coroutine.close())
        return task


@asynccontextmanager
async def together() -> AsyncIterator[StrictTaskGroup]:
    """Wait at the end of the block for all tasks of the group; see ``run_together`` for errors."""
    try:
        async with StrictTaskGroup() as tasks:
            yield tasks
        return
    except BaseExceptionGroup as group:
        errors = group.exceptions
    # Outside the handler, which would replace the context of the error by the group.
    raise_first(errors)


def raise_first(errors: Sequence[BaseException]) -> NoReturn:
    """Raise the first error; the others are notes on it, once each: many may fail alike."""
    primary = errors[0]
    descriptions = [repr(error) for error in errors if error is not primary]
    for description in dict.fromkeys(descriptions):
        primary.add_note(f"at the same time: {description}")
    raise primary


async def run_together(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run coroutines until all have ended; the first error cancels the others and is raised.

    An exception group would hide the error a user is looking for, so the group is opened: the first
    error is raised with its traceback, cause and context, and further ones are noted on it.

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
    """Await ``call(*args)`` at the end of the block, also after an error in it.

    With ``try`` and ``finally`` an error of ``call`` would replace the error of the block. Here it
    becomes a note on it.

    Args:
        grace_s: time limit of the call after an error. Without an error it has no limit here.
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
    """``asyncio.run``, in another thread if this one has an event loop, as in a notebook.

    Ctrl-C cancels the coroutine there.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # no event loop
        return asyncio.run(coroutine)
    # At most one entry, set by the other thread.
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
    limit_s: float, phase: str, key: str = "trainer.step_timeout_s"
) -> AsyncIterator[None]:
    """End a block that takes longer than the limit.

    Args:
        phase: for the error.
        key: of the setting that is the limit.

    Raises:
        TimeoutError: naming the phase and the key.
    """
    try:
        async with asyncio.timeout(limit_s) as timer:
            yield
    except TimeoutError as error:
        if not timer.expired():  # raised in the block
            raise
        raise TimeoutError(f"{phase} did not end within {limit_s:g} s ({key})") from error


async def not_halfway(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine that must not stop in the middle.

    A cancellation is raised after its end.
    """
    task = asyncio.create_task(coroutine)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
