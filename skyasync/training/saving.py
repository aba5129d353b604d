"""What a trainer saves of a run, and goes on from.

Invariant: a checkpoint holds everything that decides the rest of the run but the data itself, and guards against
other data. It is of a moment between two steps: weights that a step has begun to change are never saved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from skyasync.state.checkpoint import Checkpoints, TrainState, load_state
from skyasync.training.phases import Phases


class Saving(Phases):
    """What ``RayPPOTrainer`` inherits: a step of its plans, and how they begin."""

    dispatch: Any
    tracker: Any
    kl_controller: Any
    checkpoints: Checkpoints | None
    dataset_size: int
    global_step: int
    position: int
    ahead: frozenset[int]
    phase_name: str
    _tell: Callable[..., None]
    _saved_step = 0  # in the newest checkpoint, or where the run began
    _between_steps = True  # false while a step changes weights and position, and if it failed at that

    async def whole(self, step: Coroutine[Any, Any, None]) -> None:
        """Await what changes weights and position together.

        With ``ckpt_on_exit`` a cancellation waits for its end: a policy in the middle of an update cannot be saved.
        """
        self._between_steps = False
        if self.cfg.trainer.ckpt_on_exit:
            await _to_its_end(asyncio.create_task(self._counted(step)))
        else:
            await self._counted(step)

    async def _counted(self, step: Coroutine[Any, Any, None]) -> None:
        await step
        self._between_steps = True

    async def _save_on_exit(self) -> None:
        """Leave a checkpoint of the last whole step, if that is wanted and there is none yet."""
        if self.cfg.trainer.ckpt_on_exit and self._between_steps and self.global_step > self._saved_step:
            self.phase_name = "saving"
            await self.save_checkpoint()
            if self.global_step >= self._step:  # trained, but its end was not reached
                self.tracker.log(self._metrics, step=self.global_step)

    async def save_checkpoint(self) -> Path | None:
        """Model, optimizer, data position and versions; complete or absent."""
        if self.checkpoints is None:
            return None
        guards, ahead = (self.cfg.trainer.seed, self.dataset_size), sorted(self.ahead)
        state = TrainState(self.global_step, self.position, *guards, self.kl_controller.value, ahead)
        with self.timed("checkpoint", self._metrics):
            async with self._limited("checkpoint"):
                folder = await self.checkpoints.save(state, lambda path: self.dispatch.save(path / "policy"))
        self._saved_step = self.global_step
        self._tell("on_checkpoint", folder)
        return folder

    async def _resume(self) -> bool:
        """Go on from the newest checkpoint, if that is wanted and there is one."""
        folder = self.checkpoints.latest() if self.checkpoints else None
        if self.cfg.trainer.resume_mode == "none" or folder is None:
            return False
        state = load_state(folder, seed=self.cfg.trainer.seed, dataset_size=self.dataset_size)
        async with self._limited("loading of the checkpoint"):
            await self.dispatch.load(folder / "policy")
        self.global_step = self._saved_step = state.step
        if self.cfg.trainer.algorithm.kl_ctrl.type == "adaptive":
            self.kl_controller.value = state.kl_coef
        self.position, self.ahead = state.position, frozenset(state.ahead)
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
