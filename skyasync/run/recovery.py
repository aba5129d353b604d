"""Restarts after failures: of workers by the controller, of the controller by the program.

Invariant: both resume from the newest checkpoint of the run's folder, in the same command; engines,
Ray and all other processes stay. Workers and the controller draw on one budget,
``trainer.max_restarts`` in an hour of one command; ``restarts.jsonl`` in the run's folder has a
line for each restart. Without a checkpoint of this command they resume from its beginning.
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
        folder: of the run.
        per_hour: the largest number in an hour; 0 is none.
        began: the command's beginning, in seconds since 1970.
    """

    folder: Path
    per_hour: int
    began: float = field(default_factory=time.time)
    # Times of this process's restarts, should the file not be written.
    _restart_times: list[float] = field(default_factory=list)

    def take(self, part: str, step: int, error: BaseException) -> bool:
        """Count a restart after ``step``.

        Args:
            part: the process that failed, for messages.
            error: gets a note if no restart is left.

        Returns:
            False if the budget of the hour is used.
        """
        used = self.used()
        if used >= self.per_hour:
            if self.per_hour:
                error.add_note(
                    f"{part} is not started again: {used} of {self.per_hour} restarts this hour "
                    "are used (trainer.max_restarts)"
                )
            return False
        now = time.time()
        self._restart_times.append(now)
        row = {"step": step, "time": now, "what": part, "error": headline(error)}
        try:
            append_rows(self.folder / NAME, [row])
        except OSError as problem:  # a full disk must not prevent the restart
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
        logged_times = [row["time"] for row in read_rows(self.folder / NAME)]
        logged = sum(restart >= since for restart in logged_times)
        # The file has also those of other processes, and this list those that were not written.
        return max(logged, sum(restart >= since for restart in self._restart_times))

    def resume_mode(self, checkpoints: Path, configured: str) -> str:
        """The ``trainer.resume_mode`` of a restart; ``configured`` is that of the command."""
        for path in checkpoints.glob("step_*"):
            # A folder with a suffix is not complete.
            if not path.suffix and (written_ns(path) or 0) >= self.began * 1e9:
                return "latest"
        return configured


class Recovery:
    """Restarts of one run. The controller's process has a copy, in its experiment."""

    def __init__(self, experiment: BasePPOExp, folder: Path) -> None:
        self._experiment = experiment
        self._budget = Restarts(folder, experiment.cfg.trainer.max_restarts)
        # Of the program, which makes this object; the controller has a copy.
        self._program = os.getpid(), born(os.getpid())

    @property
    def possible(self) -> bool:
        """Whether restarts are configured, and the run writes checkpoints to resume from."""
        return self._budget.per_hour > 0 and keeps_checkpoints(self._experiment.cfg.trainer)

    def lost_workers(self, step: int) -> bool:
        """Whether a worker's process has ended the run, and the workers may be started again."""
        from skyasync.weight_sync.sync import WeightSync

        components = self._experiment.components
        lost = components.dispatch.lost if components.dispatch else None
        if lost is None or not self.possible:
            return False
        program, began = self._program
        if born(program) != began:  # with the program all its processes end, in any order
            return False
        role, error = lost
        if not isinstance(components.weight_sync, WeightSync):
            error.add_note(
                "workers are not started again: the weight sync of this run is not a WeightSync"
            )
            return False
        return self._budget.take(f"a process of the {role}", step, error)

    async def restart_workers(self) -> RayPPOTrainer:
        """Start new processes for all roles; returns a trainer that resumes. Engines stay."""
        from skyasync.observability.timeline import Timeline, wall_clock

        experiment = self._experiment
        components = experiment.components
        colocation = components.colocation
        began = wall_clock()
        # Before the new processes, which need the devices of the former ones.
        await components.dispatch.shutdown()
        if colocation is not None:
            await colocation.policy_is_lost()
        self._resume_from_newest()
        components.dispatch = await asyncio.to_thread(experiment.get_dispatch)
        trainer = await asyncio.to_thread(components.make_trainer)
        await components.dispatch.start(trainer.context.length.updates)
        source = components.dispatch
        if colocation is not None:
            colocation.restart(components.dispatch)
            source = colocation.source
        components.weight_sync.restart(source)
        assert experiment.run_dir is not None
        timeline = Timeline(experiment.run_dir.timeline, began=began)
        timeline.add_span("workers are started again", "trainer", began, timeline.now())
        if components.supervisor is not None:
            components.supervisor.timeline = timeline
        components.attach(trainer, timeline)
        log.info("the workers are back after %.1f s", timeline.now() - began)
        return trainer

    def lost_controller(self, step: int, error: BaseException) -> bool:
        """Whether the program may start the controller again, whose process has failed."""
        if not self.possible or not self._budget.take("the controller", step, error):
            return False
        # Another name: Ray may still be freeing the devices of the former controller.
        self._experiment.placement_name = f"skyasync-{uuid4().hex}"
        self._resume_from_newest()
        return True

    def _resume_from_newest(self) -> None:
        """Set the experiment to resume from its newest checkpoint in its folder."""
        experiment = self._experiment
        assert experiment.run_dir is not None
        trainer = experiment.cfg.trainer
        folder = experiment.run_dir.path
        checkpoints = Path(trainer.ckpt_path or experiment.run_dir.checkpoints)
        mode = self._budget.resume_mode(checkpoints, trainer.resume_mode)
        # A copy: the configuration is read-only.
        experiment.cfg = replace(experiment.cfg, trainer=replace(trainer, resume_mode=mode))
        freeze(experiment.cfg)
        secrets = experiment.run_dir.secrets
        experiment.run_dir = RunDirectory(folder.parent, folder.name, resume=True)
        experiment.run_dir.secrets = secrets
