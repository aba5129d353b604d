"""The life of a run around its plan: the parts start, the first weights go out, and what is left at the end is saved.

Invariant: whatever happens inside ``running``, trackers and timeline are flushed and closed behind it; the errors that
are raised are the plan's.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyasync.cleanup import afterwards
from skyasync.errors import UserError
from skyasync.training.attended import attended
from skyasync.training.one_ahead import OneAhead
from skyasync.workers.roles import POLICY

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from skyasync.data.prompts import PromptStream
    from skyasync.training.cadence import Cadence
    from skyasync.training.parts import Client
    from skyasync.training.phases import Metrics
    from skyasync.training.profiling import Profiling
    from skyasync.training.saving import Saving


class Life(OneAhead):
    """``RayPPOTrainer`` inherits it, and has the steps that are called here."""

    prompts: PromptStream
    saving: Saving
    cadence: Cadence
    profiling: Profiling
    inference_engine_client: Client

    if TYPE_CHECKING:

        async def evaluate(self) -> Metrics: ...
        async def save_checkpoint(self, *, patient: bool = True) -> Path | None: ...
        async def sync_policy_weights_to_inference_engines(self) -> None: ...
        def _tell_of_checkpoints(self) -> None: ...

    def __init_subclass__(cls, **more: object) -> None:
        super().__init_subclass__(**more)
        if "train" in vars(cls):
            cls.train = _attended(vars(cls)["train"])  # type: ignore[attr-defined]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Around every plan: start the parts, resume, sync, evaluate; at the end flush, whatever happened."""
        self.phases.plan_runs = True
        async with afterwards(self._close):
            await self._begin()
            async with afterwards(self._save_on_exit, grace_s=self.cfg.trainer.step_timeout_s):
                yield
            self.phases.name = "finishing"
            self._tell_of_short_data()
            if self.saving.exports:
                await self.handover.make_way_for_training()
                for role, folder in self.saving.exports.items():
                    await self._export(Path(folder), role)
            self.reporting.tell("on_train_end", self)
            self.saving.check_end()
            self.phases.name = "finished"

    def _tell_of_short_data(self) -> None:
        steps = self.cfg.trainer.max_training_steps
        if self.global_step < steps and not self.prompts.steps(self.progress.position, self.progress.ahead):
            log.warning("the data has ended with step %d of trainer.max_training_steps=%d", self.global_step, steps)

    async def _begin(self) -> None:
        resumed = await self.saving.resume()
        if self.learner.numbers.rolls_back and not resumed:
            await self.save_checkpoint()  # of what it began as: the first step may be one to undo
        await self.sync_policy_weights_to_inference_engines()
        self.reporting.tell("on_train_begin", self)
        if self.cfg.trainer.eval_before_train and not resumed:
            self.reporting.log(await self.evaluate(), 0)
        self.cadence.begin()
        await self._begin_step()

    async def _begin_step(self) -> None:
        async with self.phases.limited("report of the engines"):  # the work of an evaluation belongs to no step
            await self.reporting.start(self.inference_engine_client, self.dispatch)
        self.phases.begin_step(self.global_step + 1)
        await self.profiling.begin_step(self.global_step + 1, self.dispatch, self.run_dir)

    async def _export(self, folder: Path, role: str = POLICY) -> None:
        async with self.phases.limited("export"):
            await self.dispatch.export(folder, role)

    async def _save_on_exit(self) -> None:
        """Leave a checkpoint of the last whole step, if that is wanted and there is none yet."""
        self.phases.name = "saving"
        async with self.phases.limited("checkpoint"):
            await self.saving.arrived(wait=True)
        self._tell_of_checkpoints()
        if self.saving.wanted_on_exit:
            unlogged = self.global_step >= self.phases.step  # trained, but its end was not reached
            if unlogged:
                self.reporting.keep(self.metrics, self.global_step)
            await self.save_checkpoint(patient=False)
            if unlogged:
                self.reporting.log(self.metrics, self.global_step)

    async def _close(self) -> None:
        try:
            await self.saving.close()
            self.tracker.close()
        finally:
            self.phases.timeline.close()

    def _check_running(self, step: str) -> None:
        if not self.phases.plan_runs:
            raise UserError(
                f"{type(self).__name__}.train calls {step} outside of `async with self.running():`, which starts the "
                f"parts, syncs the first weights and ends the run: put the plan's steps inside it"
            )


def _attended(train: Callable[[Any], Awaitable[None]]) -> Callable[[Any], Awaitable[None]]:
    """A plan whose tasks do not fail unseen, begun and ended here if it is made of ``OneAhead``'s loops alone."""
    names = inspect.unwrap(train).__code__.co_names
    loops_alone = "_run_generate_loop" in names and "running" not in names

    @wraps(train)
    async def plan(self: Life) -> None:
        if self.phases.attended:  # super().train()
            return await train(self)
        self.phases.attended = True
        begun_here = loops_alone and type(self)._run_generate_loop is OneAhead._run_generate_loop
        try:
            modules = {base.__module__ for base in type(self).__mro__}
            async with attended(self.phases, modules), self.beginning() if begun_here else nullcontext():
                await train(self)
        finally:
            self.phases.attended = False

    return plan
