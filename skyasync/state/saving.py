"""What a trainer saves of a run, and goes on from.

Invariant: a checkpoint holds everything that decides the rest of the run but the data itself, and guards against
other data.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from skyasync.phases import Phases
from skyasync.state.checkpoint import Checkpoints, TrainState, load_state


class Saving(Phases):
    """What ``RayPPOTrainer`` inherits: a step of its plans, and how they begin."""

    dispatch: Any
    kl_controller: Any
    checkpoints: Checkpoints | None
    dataset_size: int
    global_step: int
    position: int
    ahead: frozenset[int]
    _tell: Callable[..., None]

    async def save_checkpoint(self) -> Path | None:
        """Model, optimizer, data position and versions; complete or absent."""
        if self.checkpoints is None:
            return None
        guards, ahead = (self.cfg.trainer.seed, self.dataset_size), sorted(self.ahead)
        state = TrainState(self.global_step, self.position, *guards, self.kl_controller.value, ahead)
        with self.timed("checkpoint", {}):
            async with self._limited("checkpoint"):
                folder = await self.checkpoints.save(state, lambda path: self.dispatch.save(path / "policy"))
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
        self.global_step = state.step
        if self.cfg.trainer.algorithm.kl_ctrl.type == "adaptive":
            self.kl_controller.value = state.kl_coef
        self.position, self.ahead = state.position, frozenset(state.ahead)
        return True
