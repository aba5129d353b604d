"""Supervision of a plan: the tasks that are made while it runs, and its end.

Invariant: an error in a task that the plan, or what it calls, has made is taken by some code or ends the run, as it was
raised. Code that awaits the task, now or later, takes it. The error ends the run if the plan has ended before it was
taken, or if for ``GRACE_S`` no step of the trainer was under way: the plan then waits for the result of the task. After
``trainer.step_timeout_s`` it ends the run in any case.

| who waits    | for what                 | woken by                                                 |
|--------------|--------------------------|----------------------------------------------------------|
| a failure    | code that takes it       | a timer: ``GRACE_S``, at most ``trainer.step_timeout_s`` |
| the plan     | what it awaits           | a cancellation, if no code takes the failure             |

The default loops are those of SkyRL's tutorial "Async Training: One-Step Off-Policy Pipelining", for a ``train()`` that
does not define its own:

    generation_buffer = asyncio.Queue(maxsize=1)
    generator_task = asyncio.create_task(self._run_generate_loop(generation_buffer))
    for idx in range(len(self.train_dataloader)):
        status = await self._run_training(generation_buffer)
        if idx != len(self.train_dataloader) - 1:
            await self.generation_ack.wait()
        await self.async_sync_policy_weights_to_inference_engines()
        self.sync_finished.set()
        self.generation_ack.clear()

| who waits              | for what                               | woken by                                        |
|------------------------|----------------------------------------|-------------------------------------------------|
| ``_run_generate_loop`` | space in the buffer; ``sync_finished`` | the plan, which takes a batch; which has synced |
| ``_run_training``      | a batch in the buffer                  | ``_run_generate_loop``                          |
| the plan               | ``generation_ack``                     | ``_run_generate_loop``, whose batch is there    |

Such a plan is whole: it resumes, evaluates, saves and logs as any other, and trains all steps of the run. What ends a
step comes before the next one, or after the plan.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import sysconfig
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from itertools import islice
from types import CoroutineType, FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from skyasync.data.prompts import PromptBatch
from skyasync.rollout.types import Rollout
from skyasync.trainer.context import Metrics, Phases
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
    """A plan's ``train`` whose tasks do not fail unseen. Around a plan of default loops alone is ``running()`` too."""
    names = inspect.unwrap(train).__code__.co_names
    loops_alone = "_run_generate_loop" in names and "running" not in names

    @wraps(train)
    async def plan(self: RayPPOTrainer) -> None:
        context = self.context
        if context.supervised:  # super().train()
            return await train(self)
        context.supervised = True
        of_default_loops = loops_alone and type(self)._run_generate_loop is run_generate_loop
        modules = {base.__module__ for base in type(self).__mro__}
        try:
            async with (
                PlanTasks(context.phases, modules),
                running_default_loops(self) if of_default_loops else nullcontext(),
            ):
                await train(self)
        except RunStopped:  # in a task of the plan's that was never awaited
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


class PlanTasks:
    """Watches every task that is made inside of ``async with``; the plan's own that are left at the end are cancelled.

    The first error is raised: of the plan, or of a task whose error no code has taken. Others are notes on it.

    Args:
        modules: those of the plan's classes.
    """

    def __init__(self, phases: Phases, modules: Collection[str]) -> None:
        self._phases, self._modules = phases, frozenset(modules)
        self._packages = {module.partition(".")[0] for module in modules}
        self._own: set[asyncio.Task[Any]] = set()
        self._failed: list[asyncio.Task[Any]] = []
        self._errors: list[BaseException] = []

    async def __aenter__(self) -> None:
        self._loop, main = asyncio.get_running_loop(), asyncio.current_task()
        assert main is not None
        self._main, self._cancelled = main, 0
        self._before: Callable[..., asyncio.Task[Any]] | None = self._loop.get_task_factory()  # type: ignore[assignment]
        self._loop.set_task_factory(self._make)  # type: ignore[arg-type]

    async def __aexit__(self, kind: object, failed: BaseException | None, trace: object) -> None:
        try:
            for task in self._own:
                task.cancel()
            if self._own:
                await asyncio.wait(self._own, timeout=GRACE_S)
        finally:
            self._loop.set_task_factory(self._before)
        not_taken = [task.exception() for task in self._failed if task._log_traceback]  # asking takes them
        errors = [*self._errors, failed, *not_taken]
        if self._errors:
            from_outside = self._main.uncancel() > self._cancelled
            if isinstance(failed, asyncio.CancelledError):
                errors = [failed] if from_outside else [*self._errors, *not_taken]
        raised = [error for error in errors if error is not None]
        if not raised:
            return
        first, *others = raised
        for other in others:
            if other is not first and other is not first.__cause__:
                first.add_note(f"at the same time: {other!r}")
        if first is not failed:
            # the cancellation must not take the place of the error's own context
            context = first.__context__
            try:
                raise first
            finally:
                first.__context__ = context

    def _make(
        self, loop: asyncio.AbstractEventLoop, coroutine: CoroutineType[Any, Any, Any], **options: object
    ) -> asyncio.Task[Any]:
        maker: FrameType | None = sys._getframe(1)
        while maker is not None and maker.f_globals.get("__name__", "").startswith("asyncio."):
            callback = maker.f_code.co_name == "_run" and maker.f_globals["__name__"] == "asyncio.events"
            maker = None if callback else maker.f_back  # a callback of asyncio's own passes on the task's result
        module, file = (maker.f_globals.get("__name__", ""), maker.f_code.co_filename) if maker else ("", "")
        foreign = file.startswith(_INSTALLED) and module.partition(".")[0] not in self._packages
        make = self._before or (lambda loop, coroutine, **options: asyncio.Task(coroutine, loop=loop, **options))
        if maker is None or foreign:
            return make(loop, coroutine, **options)
        task = make(loop, _without_exit(coroutine), **options)
        task.add_done_callback(lambda _: coroutine.close())  # of a task that was cancelled before it began
        task.add_done_callback(self._note_end)
        if module in self._modules:
            self._own.add(task)
        return task

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._own.discard(task)
        if task._log_traceback:  # it failed; code that awaits it is resumed in this turn of the loop
            self._failed.append(task)
            self._loop.call_soon(self._check_taken, task, self._loop.time())

    def _check_taken(self, task: asyncio.Task[Any], since: float) -> None:
        if not task._log_traceback or task not in self._failed:
            return
        now = self._loop.time()
        quiet, most = min(self._phases.idle_s(), now - since), since + self._phases.limit_s
        if quiet < GRACE_S and now < most:
            self._loop.call_at(min(now + GRACE_S - quiet, most), self._check_taken, task, since)
            return
        error = task.exception()
        assert error is not None
        self._errors.append(error)
        self._cancelled = self._main.cancelling()
        self._main.cancel()


async def _without_exit(coroutine: CoroutineType[Any, Any, T]) -> T:
    """``sys.exit`` in a task would end the event loop, and with it all that could report it."""
    try:
        return await coroutine
    except SystemExit as exit:
        reason = exit.__context__
        error = RuntimeError(f"{coroutine.__qualname__} called sys.exit({exit.code!r})")
    raise reason if isinstance(reason, Exception) else error


class RemainingBatches:
    """The batches that are left. Their number is that of the time when a loop over them began."""

    def __init__(self, trainer: RayPPOTrainer) -> None:
        self._trainer = trainer
        self.begin()

    def begin(self) -> None:
        self._left = self._trainer.total_steps - self._trainer.global_step

    def __len__(self) -> int:
        return self._left

    def __iter__(self) -> Iterator[PromptBatch]:
        return islice(self._trainer.remaining_prompts(), self._left)


@asynccontextmanager
async def running_default_loops(trainer: RayPPOTrainer) -> AsyncIterator[None]:
    """Around a plan that is made of these loops: what a plan of its own has in ``running``.

    A loop over ``trainer.epochs`` is gone through once at least: the first pass has all batches of the run.
    """
    if not trainer.cfg.trainer.epochs:
        trainer.cfg = replace(trainer.cfg, trainer=replace(trainer.cfg.trainer, epochs=1))
    trainer.generation_ack, trainer.sync_finished = asyncio.Event(), asyncio.Event()
    async with trainer.running():
        trainer.train_dataloader = RemainingBatches(trainer)
        yield
        await _end_last_step(trainer)


def run_generate_loop(trainer: RayPPOTrainer, generation_buffer: asyncio.Queue[Rollout]) -> Coroutine[Any, Any, None]:
    """Generate one batch before it is trained. The batches left are counted when this is called."""
    trainer.train_dataloader.begin()

    async def generate() -> None:
        for index, prompts in enumerate(trainer.train_dataloader):
            await generation_buffer.put(await trainer.generate(prompts))
            if index:
                trainer.generation_ack.set()
                await trainer.sync_finished.wait()
                trainer.sync_finished.clear()

    return generate()


async def run_training(trainer: RayPPOTrainer, generation_buffer: asyncio.Queue[Rollout]) -> Metrics:
    """Train the next batch of the buffer."""
    await _end_last_step(trainer)
    rollout = await trainer.waiting("data", generation_buffer.get())
    trainer.unfinished_step = await trainer.train_on(rollout)
    return dict(trainer.unfinished_step)


async def _end_last_step(trainer: RayPPOTrainer) -> None:
    status, trainer.unfinished_step = trainer.unfinished_step, None
    if status is not None:
        await trainer.end_step(status)
