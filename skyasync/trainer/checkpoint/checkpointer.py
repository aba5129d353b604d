"""Saving the state of a run, and resuming from it.

Invariant: a checkpoint holds everything that decides the rest of the run except the data, of which
it has a digest: a run with other data does not resume. It is always the state between two steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from skyasync.callbacks import RunExtension
from skyasync.config.resume import Resume, saves
from skyasync.errors import UserError
from skyasync.trainer.checkpoint.checkpoints import (
    Checkpoints,
    TrainState,
    choose,
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

POLL_S = 0.2


class Checkpointer:
    """The checkpoints of a run.

    | who waits                 | for what                                   | woken by                           |
    |---------------------------|--------------------------------------------|------------------------------------|
    | ``save``                  | the files; with ``ckpt_async`` their copy  | the workers                        |
    | ``save`` (``ckpt_async``) | the checkpoint before                      | its task, or ``step_timeout_s``    |
    | the task                  | the files                                  | the workers, asked every ``POLL_S``|
    | the end of the run        | the last task                              | its end; ``close`` cancels it      |

    Attributes:
        checkpoints: where they are; None if the run keeps none.
        complete: those that are new, until they are taken from here.
        ledger: the prompts, whose open ones checkpoints keep.
        saved_step: of the newest checkpoint, or where the run began.
        between_steps: false while a step changes weights and position, and if it failed at that.
        problem: why the newest checkpoint is missing; empty if it is not.
        saves_on_exit: a run that is cancelled saves its last whole step.
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
        self._resumed_from: Path | None = (
            None  # the checkpoint that the user has named, until this run has saved
        )
        self._task: asyncio.Task[Path] | None = None  # writes while training goes on
        self._task_step = 0
        self._write_s = 0.0
        self._metric_seen = False  # ``ckpt_best_metric``, ever
        self._better: dict[
            int, float
        ] = {}  # steps that were better than all before, not written yet: the metric

    async def uninterrupted(self, step: Coroutine[Any, Any, object]) -> None:
        """Await what changes the weights.

        With ``ckpt_on_exit`` a cancellation waits for its end: a policy in the middle of an update
        cannot be saved. A second one ends it too.
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
        """Whether the current step is the best so far by ``ckpt_best_metric``: then its checkpoint
        is to be kept.

        Raises:
            UserError: if there is no such metric.
        """
        name = self._cfg.ckpt_best_metric
        step = self._context.progress.step
        if self.checkpoints is None or not name or (name.startswith("eval/") and not evaluated):
            return False
        if name not in metrics:
            best = self.checkpoints.best
            if (
                self._metric_seen
                or is_documented(name)
                or (best is not None and best.metric == name)
            ):
                return False  # no group of this step was worth training, for example
            hint = nearest_metric(name, metrics)
            raise UserError(
                f"trainer.ckpt_best_metric={name}: step {step} has no such metric: {hint}"
            )
        self._metric_seen = True
        value = metrics[name]
        before = list(self._better.values())
        best = self.checkpoints.best
        if (
            best is not None and best.metric == name and best.folder != f"step_{step:06d}"
        ):  # which is written again
            before.append(best.value)
        better = max if self._cfg.ckpt_best_mode == "max" else min
        if value != value or (before and better([value, *before]) in before):
            return False
        self._better[step] = value
        return True

    # ---------------------------------------------------------------- save

    async def save(self, *, patient: bool = True) -> Path | None:
        """Write model, optimizer, data position and versions; complete or absent. The folder, if
        there is one now.

        Args:
            patient: a disk that does not take it is a warning until it is the ``ckpt_patience``-th
                in a row.

        Raises:
            UserError: if it is one too many.
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
                    return await self._settle(
                        self._write(self.checkpoints, state), state.step, patient
                    )
                copied = asyncio.Event()  # or failed
                self._task_step = state.step
                self._task = asyncio.create_task(self._write(self.checkpoints, state, copied))
                self._task.add_done_callback(lambda _: copied.set())
                await copied.wait()
                return None

    async def _write(
        self, checkpoints: Checkpoints, state: TrainState, copied: asyncio.Event | None = None
    ) -> Path:
        """Write all files. With ``copied``, which is set when there is a copy to be written,
        training goes on."""
        dispatch = self._context.dispatch
        began = self._phases.now()
        with checkpoints.unfinished(state.step) as unfinished:
            save_states(self._extensions, unfinished.path)
            await self.ledger.save(unfinished.path)
            self._context.solved.save(unfinished.path)
            files: Sums | None
            if copied is None:
                files = await dispatch.save(unfinished.path)
            else:
                await dispatch.begin_save(unfinished.path)
                copied.set()
                while (files := await dispatch.saved()) is None:  # noqa: ASYNC110  (it is in other processes)
                    await asyncio.sleep(POLL_S)
            folder = unfinished.finish(state, files, record(self._context.cfg))
        self._write_s = self._phases.now() - began
        return folder

    async def arrived(self, *, wait: bool = False, patient: bool = True) -> Metrics:
        """Take note of a checkpoint that was written during training, if it is done: what it took,
        and its error."""
        if self._task is None or not (wait or self._task.done()):
            return {}
        task = self._task
        step = self._task_step
        await asyncio.wait([task])
        self._task = None
        await self._settle(task, step, patient)
        return {"checkpoint/write_s": self._write_s}

    async def _settle(self, writing: Awaitable[Path], step: int, patient: bool) -> Path | None:
        """The folder that was written; None if the disk did not take it and the run continues."""
        try:
            folder = await writing
        except TimeoutError:  # an OSError too, and none of the disk's
            raise
        except OSError as error:
            self._failures += 1
            self._better.pop(step, None)
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
        value = self._better.pop(step, None)
        if value is not None and self.checkpoints is not None:
            self.checkpoints.is_best(folder, self._cfg.ckpt_best_metric, value)
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
            changes = check_recorded(folder, self._context.cfg)
            state = self._state(folder)
            self._context.prompts.seek(
                state.stream
            )  # refuses another kind of data, before the models are read
            log.info("going on from %s, after step %d", folder, state.step)
            for line in changes:
                log.info("changed since that checkpoint: %s", line)
            await self._load_models(folder, state)
            self.ledger.resume(folder)
            self._context.solved.resume(folder, self._context.prompts.of_identity)
            load_states(self._extensions, folder)
        self._context.progress.resumed(state.step, state.position, state.trained_early)
        self._context.prompts.resumed(
            self._cfg, state.step, state.position + len(state.trained_early)
        )
        self.saved_step = state.step
        self._resumed_from = folder if resume.named else None
        return True

    async def roll_back(self) -> int:
        """Make the models what they were in the newest whole checkpoint, and skip the current data;
        its step.

        Until this run has saved, it is the one that ``trainer.resume_mode`` names, if it names one.

        Raises:
            UserError: if there is none.
        """
        async with self._phases.limited("loading of the checkpoint"):
            await self.arrived(wait=True)
            newest = Resume(requested=True, folder=self._resumed_from)
            folder = self.checkpoints and await self._undamaged(newest, self.checkpoints)
            if not folder:
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
        if self._cfg.algorithm.kl_ctrl.type != "fixed":
            self._learner.kl_controller.value = state.kl_coef

    async def _undamaged(self, resume: Resume, checkpoints: Checkpoints) -> Path | None:
        """The checkpoint to resume from in which every byte is as it was written."""
        while folder := choose(resume, checkpoints):
            if (folder / manifest.NAME).exists():
                sums = manifest.read(folder)
            else:
                sums = {}
            if not sums:
                log.warning(
                    "checkpoint %s has no %s: its files cannot be checked", folder, manifest.NAME
                )
                return folder
            large = {
                name: entry
                for name, entry in sums.items()
                if "/" in name or not name.endswith(".json")
            }
            wrong = await self._context.dispatch.verify(
                folder, large
            )  # the others were read at a glance
            if not wrong:
                return folder
            if resume.named:
                raise refusal(folder, wrong[0])
            checkpoints.skip(folder, wrong[0])
        return None
