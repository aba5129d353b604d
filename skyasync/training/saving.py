"""What a trainer saves of a run, and goes on from.

Invariant: a checkpoint holds everything that decides the rest of the run, except the data, which it recognises: with
other data the run does not go on. It is always the state between two steps, never that of a step half done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from skyasync.config.schema import Config
from skyasync.state.checkpoint import Checkpoints, TrainState, load_state
from skyasync.training.learner import Learner
from skyasync.training.phases import Phases
from skyasync.training.progress import Progress


class Saving:
    """The checkpoints of a run.

    Attributes:
        checkpoints: where they lie; None where a run keeps none.
    """

    def __init__(self, cfg: Config, dataset_size: int, progress: Progress, phases: Phases, learner: Learner) -> None:
        self.checkpoints: Checkpoints | None = None
        self._cfg, self._dataset_size = cfg.trainer, dataset_size
        self._progress, self._phases, self._learner = progress, phases, learner
        self._saved_step = 0  # in the newest checkpoint, or where the run began
        self._between_steps = True  # false while a step changes weights and position, and if it failed at that

    async def whole(self, step: Coroutine[Any, Any, None]) -> None:
        """Await what changes weights and position together.

        With ``ckpt_on_exit`` a cancellation waits for its end: a policy in the middle of an update cannot be saved.
        """
        self._between_steps = False
        await self.uninterrupted(step)

    async def uninterrupted(self, step: Coroutine[Any, Any, None]) -> None:
        """Await what may change the weights before its end; with ``ckpt_on_exit`` a cancellation waits for that."""
        if self._cfg.ckpt_on_exit:
            await _to_its_end(asyncio.create_task(step))
        else:
            await step

    def step_done(self) -> None:
        """Weights and position belong together again."""
        self._between_steps = True

    @property
    def wanted_on_exit(self) -> bool:
        """A run that ends now should leave a checkpoint of its last whole step, and has none of it yet."""
        return self._cfg.ckpt_on_exit and self._between_steps and self._progress.step > self._saved_step

    async def save(self) -> Path | None:
        """Model, optimizer, data position and versions; complete or absent. The folder, if there is one."""
        if self.checkpoints is None:
            return None
        progress, dispatch = self._progress, self._learner.dispatch
        state = TrainState(
            step=progress.step,
            position=progress.position,
            seed=self._cfg.seed,
            dataset_size=self._dataset_size,
            kl_coef=self._learner.kl_controller.value,
            ahead=sorted(progress.ahead),
        )
        with self._phases.timed("checkpoint"):
            async with self._phases.limited("checkpoint"):
                folder = await self.checkpoints.save(state, dispatch.save)
        self._saved_step = progress.step
        return folder

    async def resume(self) -> bool:
        """Go on from the newest checkpoint, if that is wanted and there is one."""
        folder = self.checkpoints.latest() if self.checkpoints else None
        if self._cfg.resume_mode == "none" or folder is None:
            return False
        state = load_state(folder, seed=self._cfg.seed, dataset_size=self._dataset_size)
        async with self._phases.limited("loading of the checkpoint"):
            await self._learner.dispatch.load(folder)
        if self._cfg.algorithm.kl_ctrl.type == "adaptive":
            self._learner.kl_controller.value = state.kl_coef
        self._progress.resumed(state.step, state.position, state.ahead)
        self._saved_step = state.step
        return True


async def _to_its_end(task: asyncio.Task[None]) -> None:
    """The task's result or error; if this is cancelled, the task goes on and ends first. A second time ends it too."""
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            raise
        task.result()
        raise
