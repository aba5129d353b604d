"""Watch over a plan while its ``train`` is awaited: no task fails unseen, and no wait is without a limit.

Invariant: an error in a task that the plan has made ends the run as it was raised, unless some code asks for the task's
result. That may be later: the error ends the run when the plan has ended, or when no step of the trainer was under way
for ``GRACE_S``. The plan then waits for what the task has not done. Tasks that a step of the trainer makes belong to
that step.

| who waits     | for what                   | woken by                                                           |
|---------------|----------------------------|--------------------------------------------------------------------|
| a failed task | code that asks for it      | ``GRACE_S`` without a step, at most ``trainer.step_timeout_s``     |
| the plan      | anything                   | a cancellation, after ``trainer.step_timeout_s`` without a step    |
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import ContextVar
from functools import wraps
from types import CoroutineType
from typing import Any, Concatenate, ParamSpec, TypeVar

from skyasync.trainer.context import Phases

T = TypeVar("T")
P = ParamSpec("P")
Trainer = TypeVar("Trainer")

GRACE_S = 5.0


class RunStopped(Exception):
    """The plan is over and its last step has ended: ``trainer.stop()`` was called, or no prompt is left."""


class PlanTask(asyncio.Task[T]):
    """A task of a plan, which notes whether any code asks for its result."""

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

    def untaken_error(self) -> BaseException | None:
        """The error that ended the task, if no code has asked for it."""
        if self.awaited or not self.done() or self.cancelled():
            return None
        return super().exception()


class PlanTasks:
    """Runs one plan, and watches it meanwhile.

    Args:
        plan: the name of its class.
    """

    def __init__(self, plan: str, phases: Phases) -> None:
        self._plan, self._phases = plan, phases
        self._unfinished: set[PlanTask[Any]] = set()
        self._failed: dict[PlanTask[Any], float] = {}  # and when
        self._timer: asyncio.TimerHandle | None = None
        self._gave_up = False

    async def run(self, train: Callable[[], Awaitable[None]]) -> None:
        """Await ``train``; then the tasks that it has left are cancelled.

        Raises:
            TimeoutError: if the plan waits and no step is under way.
            BaseException: the first error, of ``train`` or of a task; others are notes on it.
        """
        self._loop, main = asyncio.get_running_loop(), asyncio.current_task()
        assert main is not None
        self._main, self._began = main, self._loop.time()
        cancellations = main.cancelling()
        factory = self._loop.get_task_factory()
        self._loop.set_task_factory(self._make)  # type: ignore[arg-type]
        _PLAN.set(self)
        self._check()
        ended: BaseException | None = None
        try:
            await train()
        except (Exception, asyncio.CancelledError) as error:
            ended = error  # raised below: inside of this handler it would be the context of another error
        finally:
            _PLAN.set(None)
            self._loop.set_task_factory(factory)
            if self._timer is not None:
                self._timer.cancel()
        await self._cancel_unfinished()
        errors = [error for error in map(PlanTask.untaken_error, self._failed) if error is not None]
        if self._gave_up:
            stopped_from_outside = main.uncancel() > cancellations
            if stopped_from_outside and isinstance(ended, asyncio.CancelledError):
                raise ended
            if not errors:
                limit = f"{self._phases.stall_s:g} s (trainer.step_timeout_s)"
                raise TimeoutError(f"{self._plan}.train waits, and no step was under way for {limit}") from ended
            if isinstance(ended, asyncio.CancelledError):
                ended = None
        if ended is not None:
            errors.insert(len(errors) if self._gave_up else 0, ended)
        if errors:
            first, *others = errors
            for other in others:
                if other is not first.__cause__:
                    first.add_note(f"at the same time: {other!r}")
            raise first

    def _make(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: CoroutineType[Any, Any, Any],
        **options: Any,  # noqa: ANN401
    ) -> asyncio.Task[Any]:
        """The task factory of the event loop while the plan runs."""
        if _PLAN.get() is not self:
            return asyncio.Task(coroutine, loop=loop, **options)
        task = PlanTask(_without_exit(coroutine), loop=loop, **options)
        task.add_done_callback(lambda _: coroutine.close())  # of a task that was cancelled before it began
        task.add_done_callback(self._note_end)
        self._unfinished.add(task)
        return task

    def _note_end(self, task: PlanTask[Any]) -> None:
        self._unfinished.discard(task)
        if task.untaken_error() is not None:
            self._failed[task] = self._loop.time()
            self._check()

    def _check(self) -> None:
        """Cancel the plan if an error was left to itself, or if nothing happens; else look again when that may be."""
        if self._gave_up:
            return
        if self._timer is not None:
            self._timer.cancel()
        now = self._loop.time()
        last_step = max(self._began, now - self._phases.idle_s())
        deadline = last_step + self._phases.stall_s
        for task, failed in self._failed.items():
            if task.untaken_error() is not None:
                patience = min(max(last_step, failed) + GRACE_S, failed + self._phases.limit_s)
                deadline = min(deadline, patience)
        if now >= deadline:
            self._gave_up = True
            self._main.cancel()
        elif deadline < math.inf:
            self._timer = self._loop.call_at(deadline, self._check)

    async def _cancel_unfinished(self) -> None:
        for task in self._unfinished:
            task.cancel()
        if self._unfinished:
            await asyncio.wait(self._unfinished, timeout=GRACE_S)


_PLAN: ContextVar[PlanTasks | None] = ContextVar("the plan whose code runs", default=None)


def trainer_step(
    method: Callable[Concatenate[Trainer, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Trainer, P], Coroutine[Any, Any, T]]:
    """Mark a step of the trainer, whose tasks are not the plan's."""

    @wraps(method)
    async def run(trainer: Trainer, /, *args: P.args, **options: P.kwargs) -> T:
        plan = _PLAN.get()
        _PLAN.set(None)
        try:
            return await method(trainer, *args, **options)
        finally:
            _PLAN.set(plan)

    return run


async def _without_exit(coroutine: CoroutineType[Any, Any, T]) -> T:
    """``sys.exit`` in a task would end the event loop, and with it all that could report it."""
    try:
        return await coroutine
    except SystemExit as exit:
        reason = exit.__context__
        error = RuntimeError(f"{coroutine.__qualname__} called sys.exit({exit.code!r})")
    raise reason if isinstance(reason, Exception) else error
