"""Supervision of a plan: the tasks that are made while it runs, and its end.

Invariant: an error in a task that the plan, or what it calls, has made is taken by somebody or ends the run, as it was
raised. Code that awaits the task, now or later, takes it. It is taken by nobody if the plan ends before, if for
``GRACE_S`` no step of the trainer was under way (the plan then waits for what the task was to bring), or in any case
after ``trainer.step_timeout_s``.

| who waits    | for what                 | woken by                                                 |
|--------------|--------------------------|----------------------------------------------------------|
| a failure    | code that takes it       | a timer: ``GRACE_S``, at most ``trainer.step_timeout_s`` |
| the plan     | what it awaits           | a cancellation, if the failure is taken by nobody        |
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import sysconfig
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from contextlib import asynccontextmanager, nullcontext
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from skyasync.trainer import default_loops as one_ahead
from skyasync.trainer.context import Phases
from skyasync.trainer.extensions import notify

if TYPE_CHECKING:
    from skyasync.trainer.trainer import RayPPOTrainer

T = TypeVar("T")
Train = Callable[["RayPPOTrainer"], Awaitable[None]]

GRACE_S = 5.0
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


class RunStopped(Exception):
    """``trainer.stop()`` was called, and the step is over: raised through a plan, to its ``running()``."""


def supervised(train: Any) -> Any:  # noqa: ANN401  (a method of the same form)
    """A plan's ``train`` whose tasks do not fail unseen; a plan made of ``one_ahead``'s loops alone is whole too."""
    names = inspect.unwrap(train).__code__.co_names
    loops_alone = "_run_generate_loop" in names and "running" not in names

    @wraps(train)
    async def plan(self: RayPPOTrainer) -> None:
        context = self.context
        if context.supervised:  # super().train()
            return await train(self)
        context.supervised = True
        whole = not loops_alone or type(self)._run_generate_loop is not one_ahead.run_generate_loop
        modules = {base.__module__ for base in type(self).__mro__}
        try:
            async with attended(context.phases, modules), nullcontext() if whole else one_ahead.beginning(self):
                await train(self)
        except RunStopped:  # in a task of the plan's that nobody has awaited
            return
        except Exception as error:
            try:
                await notify(self, "on_failure", error)
            except Exception as another:
                error.add_note(f"and then, in on_failure: {another!r}")
            raise
        finally:
            context.supervised = False

    return plan


@asynccontextmanager
async def attended(phases: Phases, modules: Collection[str]) -> AsyncIterator[None]:
    """Around a plan. Its own tasks that are still there at the end are cancelled.

    Args:
        modules: those of the plan's classes.

    Raises:
        Exception: of a task whose error nobody has taken.
    """
    tasks = _Tasks(phases, modules)
    failed: BaseException | None = None
    with tasks:
        try:
            yield
        except BaseException as error:
            failed = error
        finally:
            await tasks.close()
    found = [error for error in tasks.first_and_others(failed) if error is not None]
    if not found:
        return
    first, *others = found
    for other in others:
        if other is not first and other is not first.__cause__:
            first.add_note(f"at the same time: {other!r}")
    raise first  # outside the handler, which would put the cancellation in the place of the error's own context


class _Tasks:
    """Every task that is made inside of ``with``."""

    def __init__(self, phases: Phases, modules: Collection[str]) -> None:
        self._phases, self._modules = phases, frozenset(modules)
        self._packages = {module.partition(".")[0] for module in modules}
        self._own: set[asyncio.Task[Any]] = set()
        self._failed: list[asyncio.Task[Any]] = []
        self._errors: list[BaseException] = []

    def __enter__(self) -> None:
        self._loop, main = asyncio.get_running_loop(), asyncio.current_task()
        assert main is not None
        self._main, self._cancelled = main, 0
        self._before: Callable[..., asyncio.Task[Any]] | None = self._loop.get_task_factory()  # type: ignore[assignment]
        self._loop.set_task_factory(self._make)  # type: ignore[arg-type]

    def __exit__(self, *error: object) -> None:
        self._loop.set_task_factory(self._before)

    def first_and_others(self, failed: BaseException | None) -> list[BaseException | None]:
        """What ended the plan, then other errors that nobody has taken. ``failed`` is what the plan raised."""
        left = [task.exception() for task in self._failed if task._log_traceback]  # asking takes them
        if not self._errors:
            return [failed, *left]
        from_outside = self._main.uncancel() > self._cancelled
        if isinstance(failed, asyncio.CancelledError):
            return [failed] if from_outside else [*self._errors, *left]
        return [*self._errors, failed, *left]

    async def close(self) -> None:
        for task in self._own:
            task.cancel()
        if self._own:
            await asyncio.wait(self._own, timeout=GRACE_S)

    def _make(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: object
    ) -> asyncio.Task[Any]:
        maker = _maker(sys._getframe(1))
        module, file = (maker.f_globals.get("__name__", ""), maker.f_code.co_filename) if maker else ("", "")
        foreign = file.startswith(_INSTALLED) and module.partition(".")[0] not in self._packages
        make = self._before or (lambda loop, coroutine, **options: asyncio.Task(coroutine, loop=loop, **options))
        if maker is None or foreign:
            return make(loop, coroutine, **options)
        task = make(loop, _without_exit(coroutine), **options)
        task.add_done_callback(lambda _: coroutine.close())  # of a task that was cancelled before it began
        task.add_done_callback(self._ended)
        if module in self._modules:
            self._own.add(task)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._own.discard(task)
        if task._log_traceback:  # it failed; those who await it are told in this turn of the loop
            self._failed.append(task)
            self._loop.call_soon(self._look, task, self._loop.time())

    def _look(self, task: asyncio.Task[Any], since: float) -> None:
        if not task._log_traceback or task not in self._failed:
            return
        now = self._loop.time()
        quiet, most = min(self._phases.quiet_s(), now - since), since + self._phases.limit_s
        if quiet < GRACE_S and now < most:
            self._loop.call_at(min(now + GRACE_S - quiet, most), self._look, task, since)
            return
        error = task.exception()
        assert error is not None
        self._errors.append(error)
        self._cancelled = self._main.cancelling()
        self._main.cancel()


def _maker(frame: FrameType | None) -> FrameType | None:
    """The code that has made a task; None if it was a callback of asyncio's own, which passes on its result."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith("asyncio."):
        if frame.f_code.co_name == "_run" and frame.f_globals["__name__"] == "asyncio.events":
            return None
        frame = frame.f_back
    return frame


async def _without_exit(coroutine: Coroutine[Any, Any, T]) -> T:
    """``sys.exit`` in a task would end the event loop, and with it all that could report it."""
    try:
        return await coroutine
    except SystemExit as exit:
        reason = exit.__context__
        error = RuntimeError(f"{getattr(coroutine, '__qualname__', coroutine)} called sys.exit({exit.code!r})")
    raise reason if isinstance(reason, Exception) else error
