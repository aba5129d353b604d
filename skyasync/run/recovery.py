"""Restarts after failures: of workers' processes by the controller, of the controller by the
program.

Invariant: both resume from the newest checkpoint of the run's own folder, in the same command;
engines, Ray and all other processes stay. Workers and the controller draw on one budget,
``trainer.max_restarts`` in an hour of one command, whichever process counts; ``restarts.jsonl`` in
the run's folder has a line for each. Without a checkpoint that this command has written, they
resume from where it began.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from skyasync.config.frozen import freeze
from skyasync.config.resume import keeps_checkpoints, written_ns
from skyasync.errors import headline
from skyasync.observability.jsonl import append_rows, read_rows
from skyasync.observability.run_dir import RunDirectory
from skyasync.processes import born

if TYPE_CHECKING:
    from skyasync.run.experiment import BasePPOExp
    from skyasync.trainer import RayPPOTrainer

log = logging.getLogger(__name__)

NAME = "restarts.jsonl"
HOUR_S = 3600.0


@dataclass
class Restarts:
    """The restarts of one command.

    Args:
        folder: the run's.
        per_hour: 0 is none.
        began: seconds since 1970.
    """

    folder: Path
    per_hour: int
    began: float = field(default_factory=time.time)
    _taken: list[float] = field(
        default_factory=list
    )  # by this process, should the file not be written

    def take(self, part: str, step: int, error: BaseException) -> bool:
        """Count one, after ``step``; false if the budget of the hour is used, which is added to the
        error as a note."""
        used = self.used()
        if used >= self.per_hour:
            if self.per_hour:
                budget = (
                    f"{used} of {self.per_hour} restarts this hour are used (trainer.max_restarts)"
                )
                error.add_note(f"{part} is not started again: {budget}")
            return False
        now = time.time()
        self._taken.append(now)
        row = {"step": step, "time": now, "what": part, "error": headline(error)}
        try:
            append_rows(self.folder / NAME, [row])
        except OSError as problem:
            log.warning("%s was not written: %s", self.folder / NAME, problem)
        this_hour = f"{used + 1} of {self.per_hour} this hour"
        log.warning(
            "%s has failed after step %d and is started again (%s): %s",
            part,
            step,
            this_hour,
            headline(error),
        )
        return True

    def used(self) -> int:
        """The number of restarts in the last hour."""
        since = max(self.began, time.time() - HOUR_S)
        logged = [row["time"] for row in read_rows(self.folder / NAME)]
        return max(sum(when >= since for when in times) for times in (logged, self._taken))

    def resume_mode(self, checkpoints: Path, configured: str) -> str:
        """``trainer.resume_mode`` from here on, if it was ``first`` when the command began."""
        folders = (path for path in checkpoints.glob("step_*") if not path.suffix)
        if any((written_ns(path) or 0) >= self.began * 1e9 for path in folders):
            return "latest"
        return configured


class Recovery:
    """Restarts of one run. The controller's process has a copy, in its experiment."""

    def __init__(self, experiment: BasePPOExp, folder: Path) -> None:
        self._experiment = experiment
        self._budget = Restarts(folder, experiment.cfg.trainer.max_restarts)
        self._program = os.getpid(), born(os.getpid())  # which makes this

    @property
    def possible(self) -> bool:
        """There is, or will be, a checkpoint to resume from."""
        return self._budget.per_hour > 0 and keeps_checkpoints(self._experiment.cfg.trainer)

    def lost_workers(self, step: int) -> bool:
        """Whether the run failed because a worker's process did, and the workers may be started
        again."""
        from skyasync.weight_sync.sync import WeightSync

        run, (program, began) = self._experiment, self._program
        lost = run.components.dispatch.lost if run.components.dispatch else None
        if lost is None or not self.possible:
            return False
        if born(program) != began:  # with the program all its processes end, in any order
            return False
        if not isinstance(run.components.weight_sync, WeightSync):
            lost[1].add_note(
                "workers are not started again: the weight sync of this run is not a WeightSync"
            )
            return False
        return self._budget.take(f"a process of the {lost[0]}", step, lost[1])

    async def restart_workers(self) -> RayPPOTrainer:
        """New processes for all roles, and a trainer that resumes from the newest checkpoint;
        engines stay."""
        from skyasync.observability.timeline import Timeline, wall_clock

        run = self._experiment
        colocation = self._experiment.components.colocation
        began = wall_clock()
        await run.components.dispatch.shutdown()
        if colocation is not None:
            await colocation.policy_is_lost()
        self._resume_from_newest()
        run.components.dispatch = await asyncio.to_thread(run.get_dispatch)
        trainer = await asyncio.to_thread(run.components.make_trainer)
        await run.components.dispatch.start(trainer.context.length.updates)
        if colocation is not None:
            colocation.restart(run.components.dispatch)
        run.components.weight_sync.restart(
            colocation.source if colocation else run.components.dispatch
        )
        assert run.run_dir is not None
        timeline = Timeline(run.run_dir.timeline, began=began)
        timeline.add_span("workers are started again", "trainer", began, timeline.now())
        if run.components.supervisor is not None:
            run.components.supervisor.timeline = timeline
        run.components.attach(trainer, timeline)
        log.info("the workers are back after %.1f s", timeline.now() - began)
        return trainer

    def lost_controller(self, step: int, error: BaseException) -> bool:
        """In the program: whether the controller may be started again, now that its process has
        failed."""
        if not self.possible or not self._budget.take("the controller", step, error):
            return False
        self._experiment.placement_name = f"skyasync-{uuid4().hex}"
        self._resume_from_newest()
        return True

    def _resume_from_newest(self) -> None:
        run = self._experiment
        assert run.run_dir is not None
        trainer = run.cfg.trainer
        folder = run.run_dir.path
        checkpoints = Path(trainer.ckpt_path or run.run_dir.checkpoints)
        mode = self._budget.resume_mode(checkpoints, trainer.resume_mode)
        run.cfg = replace(run.cfg, trainer=replace(trainer, resume_mode=mode))
        freeze(run.cfg)
        secrets = run.run_dir.secrets
        run.run_dir = RunDirectory(folder.parent, folder.name, resume=True)
        run.run_dir.secrets = secrets
