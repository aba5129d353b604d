"""Watch a plan while its ``train`` is awaited: no task fails unseen, and every wait has a limit.

Invariant: an error in a task that the plan has made ends the run as it was raised, unless some code
asks for the task's result. That may be later: the error ends the run when the plan has ended, or
when no step of the trainer was under way for ``GRACE_S``. The plan then waits for work that the
failed task has not done. Tasks that a step of the trainer makes belong to that step
(``Phases.under_way``).

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

# For a task that is cancelled to end, and for code to ask for the result of a failed task.
GRACE_S = 5.0


class RunStopped(Exception):
    """Ends the plan after its last step: ``trainer.stop()`` was called, or no prompt is left."""


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
    """Runs one plan, and watches its tasks.

    Args:
        plan: the name of the plan's class.
    """

    def __init__(self, plan: str, phases: Phases) -> None:
        self._plan = plan
        self._phases = phases
        self._unfinished_tasks: set[PlanTask[Any]] = set()
        self._errors: dict[PlanTask[Any], BaseException] = {}
        self._stall: TimeoutError | None = None
        self._is_cancelled = False  # by ``_check``

    async def run(self, train: Callable[[], Awaitable[None]]) -> None:
        """Await ``train``, then cancel the tasks that it has left.

        Raises:
            TimeoutError: if the plan waits and no step is under way.
            BaseException: the first error, of ``train`` or of a task; others are notes on it.
        """
        loop = asyncio.get_running_loop()
        self._loop = loop
        main_task = asyncio.current_task()
        assert main_task is not None
        self._main_task = main_task
        self._latest_event_s = loop.time()
        cancellations = main_task.cancelling()
        factory = loop.get_task_factory()
        self._timer: asyncio.Handle = loop.call_soon(self._check)
        loop.set_task_factory(self._make_task)  # type: ignore[arg-type]
        PLAN_CODE.set(True)
        plan_error: BaseException | None = None
        try:
            await train()
        except (Exception, asyncio.CancelledError) as error:
            # Raised below: inside this handler it would be the context of another error.
            plan_error = error
        finally:
            PLAN_CODE.set(False)
            loop.set_task_factory(factory)
            self._timer.cancel()
        for task in self._unfinished_tasks:
            task.cancel()
        if self._unfinished_tasks:
            await asyncio.wait(self._unfinished_tasks, timeout=GRACE_S)
        errors = self._unseen_errors()
        if self._stall is not None:
            self._stall.__cause__ = plan_error  # has the line at which the plan waits
            errors.append(self._stall)
        # ``_check`` may have cancelled the plan; a cancellation from outside is raised.
        cancelled_here = self._is_cancelled and main_task.uncancel() <= cancellations
        if cancelled_here and isinstance(plan_error, asyncio.CancelledError):
            plan_error = None
        if plan_error is not None:
            errors.insert(0, plan_error)
        if errors:
            raise_first(errors)

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: CoroutineType[Any, Any, Any],
        **options: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """The task factory of the event loop while the plan runs."""
        if not PLAN_CODE.get():
            return asyncio.Task(coroutine, loop=loop, **options)
        task = PlanTask(_without_exit(coroutine), loop=loop, **options)
        # A task that is cancelled before it begins never awaits the coroutine.
        task.add_done_callback(lambda _: coroutine.close())
        task.add_done_callback(self._note_end)
        self._unfinished_tasks.add(task)
        return task

    def _note_end(self, task: PlanTask[Any]) -> None:
        self._unfinished_tasks.discard(task)
        if task.cancelled():
            return
        error = asyncio.Task.exception(task)  # ``PlanTask.exception`` would count as seen
        if error is not None:
            self._errors[task] = error
            self._latest_event_s = self._loop.time()
            self._check()

    def _unseen_errors(self) -> list[BaseException]:
        """The errors of tasks whose result no code has asked for."""
        return [error for task, error in self._errors.items() if not task.awaited]

    def _check(self) -> None:
        """Cancel the plan if no code asks for an error, or if nothing happens.

        Else check again at the time when that may be the case.
        """
        self._timer.cancel()
        now_s = self._loop.time()
        errors = self._unseen_errors()
        limit_s = GRACE_S if errors else self._phases.stall_s
        latest_s = max(self._latest_event_s, now_s - self._phases.idle_s())
        deadline_s = latest_s + limit_s
        if now_s < deadline_s < math.inf:
            self._timer = self._loop.call_at(deadline_s, self._check)
        elif now_s >= deadline_s and not self._is_cancelled:
            if not errors:
                limit = f"{limit_s:g} s (trainer.step_timeout_s)"
                self._stall = TimeoutError(
                    f"{self._plan}.train waits, and no step was under way for {limit}"
                )
            self._is_cancelled = self._main_task.cancel()


async def _without_exit(coroutine: CoroutineType[Any, Any, T]) -> T:
    """Await a coroutine in which ``sys.exit`` is an error.

    It would end the event loop, and with it all code that could report it.
    """
    try:
        return await coroutine
    except SystemExit as exit:
        reason = exit.__context__
        error = RuntimeError(f"{coroutine.__qualname__} called sys.exit({exit.code!r})")
    # Code that exits on an error has it as the context, and it is what the user looks for.
    raise reason if isinstance(reason, Exception) else error
