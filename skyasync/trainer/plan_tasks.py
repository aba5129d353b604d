"""Watch over a plan while its ``train`` is awaited: no task fails unseen, and no wait is without a
limit.

Invariant: an error in a task that the plan has made ends the run as it was raised, unless some code
asks for the task's result. That may be later: the error ends the run when the plan has ended, or
when no step of the trainer was under way for ``GRACE_S``. The plan then waits for what the task has
not done. Tasks that a step of the trainer makes belong to that step (``Phases.under_way``).

| who waits     | for what                   | woken by                                                           |
|---------------|----------------------------|--------------------------------------------------------------------|
| a failed task | code that asks for it      | a cancellation of the plan, after ``GRACE_S`` without a step       |
| the plan      | anything                   | a cancellation, after ``trainer.step_timeout_s`` without a step    |
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Generator
from types import CoroutineType
from typing import Any, TypeVar

from skyasync.trainer.context import PLAN_CODE, Phases
from skyasync.utils.task_group import raise_first

T = TypeVar("T")

GRACE_S = 5.0


class RunStopped(Exception):
    """The plan is over and its last step has ended: ``trainer.stop()`` was called, or no prompt is
    left."""


class PlanTask(asyncio.Task[T]):
    """A task of a plan, which notes that some code asks for its result."""

    awaited = False

    def __await__(self) -> Generator[Any, None, T]:
        self.awaited = True
        return super().__await__()

    def result(self) -> T:
        self.awaited = True
        return super().result()

    def exception(self) -> BaseException | None:
        self.awaited = True
        return super().exception()


class PlanTasks:
    """Runs one plan, and watches it meanwhile.

    Args:
        plan: the name of its class.
    """

    def __init__(self, plan: str, phases: Phases) -> None:
        self._plan = plan
        self._phases = phases
        self._unfinished: set[PlanTask[Any]] = set()
        self._failed: dict[PlanTask[Any], BaseException] = {}
        self._stall: TimeoutError | None = None
        self._cancelled = False  # by ``_check``

    async def run(self, train: Callable[[], Awaitable[None]]) -> None:
        """Await ``train``; then the tasks that it has left are cancelled.

        Raises:
            TimeoutError: if the plan waits and no step is under way.
            BaseException: the first error, of ``train`` or of a task; others are notes on it.
        """
        self._loop = asyncio.get_running_loop()
        main = asyncio.current_task()
        assert main is not None
        self._main, self._since = main, self._loop.time()
        cancellations = main.cancelling()
        factory = self._loop.get_task_factory()
        self._timer: asyncio.Handle = self._loop.call_soon(self._check)
        self._loop.set_task_factory(self._make)  # type: ignore[arg-type]
        PLAN_CODE.set(True)
        ended: BaseException | None = None
        try:
            await train()
        except (Exception, asyncio.CancelledError) as error:
            # raised below: inside of this handler it would be the context of another error
            ended = error
        finally:
            PLAN_CODE.set(False)
            self._loop.set_task_factory(factory)
            self._timer.cancel()
        for task in self._unfinished:
            task.cancel()
        if self._unfinished:
            await asyncio.wait(self._unfinished, timeout=GRACE_S)
        errors = self._untaken()
        if self._stall is not None:
            self._stall.__cause__ = ended  # has the line at which the plan waits
            errors.append(self._stall)
        from_here = self._cancelled and main.uncancel() <= cancellations
        if ended is not None and not (from_here and isinstance(ended, asyncio.CancelledError)):
            errors.insert(0, ended)
        if errors:
            raise_first(errors)

    def _make(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: CoroutineType[Any, Any, Any],
        **options: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """The task factory of the event loop while the plan runs."""
        if not PLAN_CODE.get():
            return asyncio.Task(coroutine, loop=loop, **options)
        task = PlanTask(_without_exit(coroutine), loop=loop, **options)
        task.add_done_callback(
            lambda _: coroutine.close()
        )  # of a task that was cancelled before it began
        task.add_done_callback(self._note_end)
        self._unfinished.add(task)
        return task

    def _note_end(self, task: PlanTask[Any]) -> None:
        self._unfinished.discard(task)
        if task.cancelled():
            error = None
        else:
            error = asyncio.Task.exception(task)
        if error is not None:
            self._failed[task], self._since = error, self._loop.time()
            self._check()

    def _untaken(self) -> list[BaseException]:
        """The errors of tasks whose result no code has asked for."""
        return [error for task, error in self._failed.items() if not task.awaited]

    def _check(self) -> None:
        """Cancel the plan if an error was left to itself, or if nothing happens; else look again
        when that may be."""
        self._timer.cancel()
        now = self._loop.time()
        errors = self._untaken()
        limit_s = GRACE_S if errors else self._phases.stall_s
        deadline = max(self._since, now - self._phases.idle_s()) + limit_s
        if now < deadline < math.inf:
            self._timer = self._loop.call_at(deadline, self._check)
        elif now >= deadline and not self._cancelled:
            if not errors:
                limit = f"{limit_s:g} s (trainer.step_timeout_s)"
                self._stall = TimeoutError(
                    f"{self._plan}.train waits, and no step was under way for {limit}"
                )
            self._cancelled = self._main.cancel()


async def _without_exit(coroutine: CoroutineType[Any, Any, T]) -> T:
    """``sys.exit`` in a task would end the event loop, and with it all that could report it."""
    try:
        return await coroutine
    except SystemExit as exit:
        reason = exit.__context__
        error = RuntimeError(f"{coroutine.__qualname__} called sys.exit({exit.code!r})")
    raise reason if isinstance(reason, Exception) else error
