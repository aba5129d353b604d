"""Saving the state of a run, and resuming from it.

Invariant: a checkpoint holds everything that decides the rest of the run except the data, of which
it has a digest: a run with other data does not resume. It is always the state between two steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Sequence
from math import isnan
from pathlib import Path
from typing import Any

from skyasync.callbacks import RunExtension
from skyasync.config.resume import Resume, saves
from skyasync.errors import UserError
from skyasync.trainer.checkpoint.checkpoints import (
    Checkpoints,
    TrainState,
    choose,
    is_small,
    load_state,
    refusal,
)
from skyasync.trainer.checkpoint.settings_check import check_recorded, record
from skyasync.trainer.context import Metrics, RunContext
from skyasync.trainer.extensions import is_documented, load_states, nearest_metric, save_states
from skyasync.trainer.extensions.prompt_ledger import PromptLedger
from skyasync.trainer.learner import Learner
from skyasync.utils import manifest
from skyasync.utils.manifest import Sums

log = logging.getLogger(__name__)

POLL_S = 0.2  # far below the seconds that a checkpoint takes


class Checkpointer:
    """The checkpoints of a run.

    | who waits                 | for what                                   | woken by                           |
    |---------------------------|--------------------------------------------|------------------------------------|
    | ``save``                  | the files; with ``ckpt_async`` their copy  | the workers                        |
    | ``save`` (``ckpt_async``) | the checkpoint before                      | its task, or ``step_timeout_s``    |
    | the task                  | the files                                  | the workers, asked every ``POLL_S``|
    | the end of the run        | the last task                              | its end; ``close`` cancels it      |

    Attributes:
        checkpoints: the folder of checkpoints; None if the run has none.
        complete: new checkpoints, until the trainer takes them.
        ledger: its open prompts are in the checkpoints.
        saved_step: of the newest checkpoint, or the one from which the run resumed.
        between_steps: false while a step changes weights and position, and if it failed at that.
        problem: why the newest checkpoint is missing; empty if it is not.
        saves_on_exit: a run that is cancelled saves its last complete step.
    """

    def __init__(
        self,
        context: RunContext,
        learner: Learner,
        ledger: PromptLedger,
        extensions: Sequence[RunExtension],
    ) -> None:
        self.checkpoints: Checkpoints | None = None
        self.complete: list[Path] = []
        self.ledger = ledger
        self.saved_step = 0
        self.between_steps = True
        self.problem = ""
        self._context = context
        self._cfg = context.cfg.trainer
        self._phases = context.phases
        self._learner = learner
        self._extensions = extensions
        self.saves_on_exit = context.cfg.trainer.ckpt_on_exit
        self._failures = 0  # in a row
        # The checkpoint that the user has named, until this run has saved one.
        self._resumed_from: Path | None = None
        self._task: asyncio.Task[Path] | None = None  # writes while training goes on
        self._task_step = 0
        self._write_s = 0.0
        self._metric_seen = False  # ``ckpt_best_metric``, in any step
        # Step -> ``ckpt_best_metric``, of steps that improved it and are not written yet.
        self._improvements: dict[int, float] = {}

    async def uninterrupted(self, step: Coroutine[Any, Any, object]) -> None:
        """Await a coroutine that changes the weights.

        With ``ckpt_on_exit`` a cancellation waits for its end: a policy in the middle of an update
        cannot be saved. A second cancellation does not wait.
        """
        if not saves(self._cfg):
            await step
            return
        task = asyncio.create_task(step)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not self.saves_on_exit:
                task.cancel()
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                task.cancel()
                raise
            task.result()
            raise

    def improves(self, metrics: Metrics, *, evaluated: bool) -> bool:
        """Whether the current step is the best so far by ``ckpt_best_metric``.

        Args:
            evaluated: the step has new values of ``eval/...`` metrics.

        Raises:
            UserError: if there is no such metric.
        """
        name = self._cfg.ckpt_best_metric
        step = self._context.progress.step
        if self.checkpoints is None or not name or (name.startswith("eval/") and not evaluated):
            return False
        best = self.checkpoints.best
        if best is not None and best.metric != name:  # of a run with another setting
            best = None
        if name not in metrics:
            if self._metric_seen or is_documented(name) or best is not None:
                return False  # no group of this step was worth training, for example
            hint = nearest_metric(name, metrics)
            raise UserError(
                f"trainer.ckpt_best_metric={name}: step {step} has no such metric: {hint}"
            )
        self._metric_seen = True
        value = metrics[name]
        if isnan(value):
            return False
        previous_values = list(self._improvements.values())
        # A checkpoint of this step, of an interrupted run, is written again.
        if best is not None and best.folder != f"step_{step:06d}":
            previous_values.append(best.value)
        if previous_values and self._cfg.ckpt_best_mode == "max":
            improved = value > max(previous_values)
        elif previous_values:
            improved = value < min(previous_values)
        else:
            improved = True
        if improved:
            self._improvements[step] = value
        return improved

    # ---------------------------------------------------------------- save

    async def save(self, *, patient: bool = True) -> Path | None:
        """Save model, optimizer, data position and versions; the checkpoint is complete or absent.

        Args:
            patient: a disk that does not take it is a warning, until it is the
                ``ckpt_patience``-th in a row.

        Returns:
            The folder, unless the checkpoint is missing or is written in the background.

        Raises:
            UserError: for one failure too many.
        """
        if self.checkpoints is None:
            return None
        progress = self._context.progress
        prompts = self._context.prompts
        with self._phases.timed("checkpoint"):
            async with self._phases.limited("checkpoint"):
                self._phases.metrics.update(await self.arrived(wait=True, patient=patient))
                state = TrainState(
                    step=progress.step,
                    position=progress.position,
                    seed=self._cfg.seed,
                    dataset_size=prompts.rows,
                    kl_coef=self._learner.kl_controller.value,
                    trained_early=sorted(progress.trained_early),
                    data=prompts.digest,
                    stream=prompts.mark(progress.position),
                )
                if not (self._cfg.ckpt_async and patient):
                    writing = self._write(self.checkpoints, state)
                    return await self._settle(writing, state.step, patient)
                copied = asyncio.Event()
                self._task_step = state.step
                self._task = asyncio.create_task(self._write(self.checkpoints, state, copied))
                # Also if it has failed: ``arrived`` raises the error.
                self._task.add_done_callback(lambda _: copied.set())
                await copied.wait()
                return None

    async def _write(
        self, checkpoints: Checkpoints, state: TrainState, copied: asyncio.Event | None = None
    ) -> Path:
        """Write all files.

        Args:
            copied: set when the workers have copied their state: training may go on.
        """
        dispatch = self._context.dispatch
        began_s = self._phases.now()
        with checkpoints.unfinished(state.step) as new_checkpoint:
            save_states(self._extensions, new_checkpoint.path)
            await self.ledger.save(new_checkpoint.path)
            self._context.replay_buffer.save(new_checkpoint.path)
            files: Sums | None
            if copied is None:
                files = await dispatch.save(new_checkpoint.path)
            else:
                await dispatch.begin_save(new_checkpoint.path)
                copied.set()
                while (files := await dispatch.saved()) is None:  # noqa: ASYNC110  (it is in other processes)
                    await asyncio.sleep(POLL_S)
            folder = new_checkpoint.finish(state, files, record(self._context.cfg))
        self._write_s = self._phases.now() - began_s
        return folder

    async def arrived(self, *, wait: bool = False, patient: bool = True) -> Metrics:
        """Take note of a checkpoint that was written in the background, if it is complete.

        Args:
            wait: until it is complete.

        Returns:
            The time that it took.
        """
        if self._task is None or not (wait or self._task.done()):
            return {}
        task = self._task
        step = self._task_step
        await asyncio.wait([task])
        self._task = None
        await self._settle(task, step, patient)
        return {"checkpoint/write_s": self._write_s}

    async def _settle(self, writing: Awaitable[Path], step: int, patient: bool) -> Path | None:
        """Await a checkpoint, and note that it is complete or why it is missing.

        Returns:
            None if the disk did not take it and the run continues.
        """
        try:
            folder = await writing
        except TimeoutError:  # an OSError too, but not of the disk
            raise
        except OSError as error:
            self._failures += 1
            self._improvements.pop(step, None)
            if self.saved_step:
                newest = f"the newest is of step {self.saved_step}"
            else:
                newest = "there is none yet"
            self.problem = f"the checkpoint of step {step} could not be saved: {error} ({newest})"
            if not patient:
                raise UserError(self.problem) from error
            if self._failures >= self._cfg.ckpt_patience:
                raise UserError(
                    f"{self.problem}; that is {self._failures} in a row (trainer.ckpt_patience): make room or another "
                    f"trainer.ckpt_path, then resume with trainer.resume_mode=latest"
                ) from error
            log.warning(
                "%s; the run continues, failure %d of %d in a row (trainer.ckpt_patience)",
                self.problem,
                self._failures,
                self._cfg.ckpt_patience,
            )
            return None
        self.saved_step = step
        self._failures = 0
        self.problem = ""
        self._resumed_from = None
        value = self._improvements.pop(step, None)
        if value is not None and self.checkpoints is not None:
            self.checkpoints.mark_best(folder, self._cfg.ckpt_best_metric, value)
        self.complete.append(folder)
        return folder

    async def close(self) -> None:
        """Cancel and remove a checkpoint that is still being written."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    # ---------------------------------------------------------------- load

    async def resume(self) -> bool:
        """Resume from the checkpoint that ``trainer.resume_mode`` names, if there is one."""
        resume = Resume.of(self._cfg)
        if self.checkpoints is None or not resume.requested:
            return False
        async with self._phases.limited("loading of the checkpoint"):
            folder = await self._undamaged(resume, self.checkpoints)
            if folder is None:
                return False
            context = self._context
            changes = check_recorded(folder, context.cfg)
            state = self._state(folder)
            # Before the models are read: it raises an error for another kind of data.
            context.prompts.seek(state.stream)
            log.info("going on from %s, after step %d", folder, state.step)
            for line in changes:
                log.info("changed since that checkpoint: %s", line)
            await self._load_models(folder, state)
            self.ledger.resume(folder)
            context.replay_buffer.resume(folder, context.prompts.of_identity)
            load_states(self._extensions, folder)
        context.progress.resumed(state.step, state.position, state.trained_early)
        context.prompts.resumed(self._cfg, state.step, state.position + len(state.trained_early))
        self.saved_step = state.step
        self._resumed_from = folder if resume.named else None
        return True

    async def roll_back(self) -> int:
        """Load the models of the newest undamaged checkpoint; the data position stays.

        Until this run has saved, it is the one that ``trainer.resume_mode`` names, if it names one.

        Returns:
            The step of the checkpoint.

        Raises:
            UserError: if there is no checkpoint.
        """
        async with self._phases.limited("loading of the checkpoint"):
            await self.arrived(wait=True)
            newest = Resume(requested=True, folder=self._resumed_from)
            folder: Path | None = None
            if self.checkpoints is not None:
                folder = await self._undamaged(newest, self.checkpoints)
            if folder is None:
                raise UserError("trainer.on_spike=rollback: there is no checkpoint to restore")
            state = self._state(folder)
            await self._load_models(folder, state)
            return state.step

    def _state(self, folder: Path) -> TrainState:
        prompts = self._context.prompts
        return load_state(
            folder, seed=self._cfg.seed, dataset_size=prompts.rows, data=prompts.digest
        )

    async def _load_models(self, folder: Path, state: TrainState) -> None:
        await self._context.dispatch.load(folder)
        # A fixed coefficient is that of this run's settings, which may have changed.
        if self._cfg.algorithm.kl_ctrl.type != "fixed":
            self._learner.kl_controller.value = state.kl_coef

    async def _undamaged(self, resume: Resume, checkpoints: Checkpoints) -> Path | None:
        """The checkpoint to resume from in which every byte is as it was written."""
        while folder := choose(resume, checkpoints):
            sums: Sums = {}
            if (folder / manifest.NAME).exists():
                sums = manifest.read(folder)
            if not sums:
                log.warning(
                    "checkpoint %s has no %s: its files cannot be checked", folder, manifest.NAME
                )
                return folder
            # ``choose`` has read the small files.
            large_files = {name: entry for name, entry in sums.items() if not is_small(name)}
            problems = await self._context.dispatch.verify(folder, large_files)
            if not problems:
                return folder
            if resume.named:
                raise refusal(folder, problems[0])
            checkpoints.skip(folder, problems[0])
        return None
