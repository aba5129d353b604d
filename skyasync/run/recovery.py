"""What has died is started again: a worker's process by the controller, the controller by the program.

Invariant: both go on from the newest checkpoint of the run's own folder, in the same command; engines, Ray and whatever
else lives stays. ``Restarts`` says how often.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from skyasync.config.frozen import freeze
from skyasync.config.resume import keeps_checkpoints
from skyasync.observability.run_dir import RunDirectory
from skyasync.run.recovery import Restarts

if TYPE_CHECKING:
    from skyasync.run.experiment import BasePPOExp
    from skyasync.trainer import RayPPOTrainer

log = logging.getLogger(__name__)


class Recovery:
    """Of one run; comes to the controller's process with its experiment.

    Args:
        folder: the run's, where ``restarts.jsonl`` tells what was started again.
    """

    def __init__(self, experiment: BasePPOExp, folder: Path) -> None:
        from skyasync.utils.process_identity import born

        self._experiment = experiment
        self._budget = Restarts(folder, experiment.cfg.trainer.max_restarts)
        self._program = os.getpid(), born(os.getpid())  # where this is made

    @property
    def possible(self) -> bool:
        """There is, or will be, a checkpoint to go on from."""
        return self._budget.per_hour > 0 and keeps_checkpoints(self._experiment.cfg.trainer)

    def lost_workers(self, step: int) -> bool:
        """Whether the run has failed since a worker's process died, and may start the workers again."""
        run = self._experiment
        lost = getattr(run.parts.dispatch, "lost", None)
        if lost is None or not self.possible or self._program_ended:
            return False
        if not hasattr(run.parts.weight_sync, "restart"):
            lost[1].add_note("workers are not started again: the weight sync of this run has no restart(source)")
            return False
        return self._budget.take(f"a process of the {lost[0]}", step, lost[1])

    @property
    def _program_ended(self) -> bool:
        """With which all its processes end, in any order: the controller may see workers die before it does."""
        from skyasync.utils.process_identity import born

        number, began = self._program
        return born(number) != began

    async def restart_workers(self) -> RayPPOTrainer:
        """New processes for all roles, and a trainer that resumes from the newest checkpoint; engines stay."""
        from skyasync.observability.timeline import Timeline, wall_clock

        run, turns, began = self._experiment, self._experiment.parts.turns, wall_clock()
        await run.parts.dispatch.shutdown()
        if turns is not None:
            await turns.policy_is_lost()
        self._resume_anew()
        run.parts.dispatch = await asyncio.to_thread(run.get_dispatch)
        trainer = await asyncio.to_thread(run.parts.make_trainer)
        await run.parts.dispatch.start(trainer.context.length.updates)
        if turns is not None:
            turns.restart(run.parts.dispatch)
        run.parts.weight_sync.restart(turns.source if turns else run.parts.dispatch)
        assert run.run_dir is not None
        timeline = Timeline(run.run_dir.timeline)
        timeline.add_span("workers are started again", "trainer", began, timeline.now())
        if run.parts.supervisor is not None:
            run.parts.supervisor.write_to(timeline)
        run.parts.attach(trainer, timeline)
        log.info("the workers are back after %.1f s", timeline.now() - began)
        return trainer

    def lost_controller(self, step: int, error: BaseException) -> bool:
        """In the program: the controller's process has died. Whether there may be another, which is then to be run."""
        if not self.possible or not self._budget.take("the controller", step, error):
            return False
        self._experiment.placement_name = f"skyasync-{uuid4().hex}"
        self._resume_anew()
        return True

    def _resume_anew(self) -> None:
        """What is made from here on goes on from the newest checkpoint, in the run's own folder."""
        run = self._experiment
        assert run.run_dir is not None
        trainer, folder = run.cfg.trainer, run.run_dir.path
        checkpoints = Path(trainer.ckpt_path or run.run_dir.checkpoints)
        mode = self._budget.resume_mode(checkpoints, trainer.resume_mode)
        run.cfg = replace(run.cfg, trainer=replace(trainer, resume_mode=mode))
        freeze(run.cfg)
        run.run_dir = RunDirectory(folder.parent, folder.name, resume=True)
