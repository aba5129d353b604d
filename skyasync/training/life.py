"""The life of a run around its plan: the parts start, the first weights go out, and what is left at the end is saved.

Invariant: whatever happens inside ``running``, trackers and timeline are flushed and closed behind it; the errors that
are raised are the plan's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from skyasync.cleanup import afterwards
from skyasync.errors import UserError
from skyasync.training.hooks import AlgorithmHooks
from skyasync.workers.roles import POLICY

if TYPE_CHECKING:
    from skyasync.training.cadence import Cadence
    from skyasync.training.marks import Marks
    from skyasync.training.parts import Client
    from skyasync.training.phases import Metrics
    from skyasync.training.profiling import Profiling
    from skyasync.training.saving import Saving


class Life(AlgorithmHooks):
    """``RayPPOTrainer`` inherits it, and has the steps that are called here."""

    saving: Saving
    marks: Marks
    cadence: Cadence
    profiling: Profiling
    inference_engine_client: Client

    if TYPE_CHECKING:

        async def evaluate(self) -> Metrics: ...
        async def save_checkpoint(self, *, patient: bool = True) -> Path | None: ...
        async def sync_policy_weights_to_inference_engines(self) -> None: ...
        def _tell_of_checkpoints(self) -> None: ...

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Around every plan: start the parts, resume, sync, evaluate; at the end flush, whatever happened."""
        self.phases.plan_runs = True
        async with afterwards(self._close):
            await self._begin()
            async with afterwards(self._save_on_exit, grace_s=self.cfg.trainer.step_timeout_s):
                yield
            self.phases.name = "finishing"
            if self.saving.exports:
                await self.handover.make_way_for_training()
                for role, folder in self.saving.exports.items():
                    await self._export(Path(folder), role)
            self.reporting.tell("on_train_end", self)
            self.saving.check_end()
            self.phases.name = "finished"

    async def _begin(self) -> None:
        resumed = await self.saving.resume()
        if (unlogged := await self.marks.go_on(resumed=resumed)) is not None:
            step, metrics = unlogged
            self.reporting.log(metrics, step)
        resumed = resumed or self.global_step > 0
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
