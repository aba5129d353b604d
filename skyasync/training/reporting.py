"""What a run tells: trackers, callbacks, samples, how busy its parts were.

Invariant: a step is logged once, when all of it is done, with everything that was found out about it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skyasync.callbacks import TrainerCallback
from skyasync.observe.run_dir import RunDirectory
from skyasync.observe.trackers import Tracker
from skyasync.observe.usage import Engines, UsageMeter, Workers
from skyasync.rollout.metrics import rollout_metrics, sample_records
from skyasync.rollout.repeats import repeat_metrics, repeat_warning, repeats_of
from skyasync.rollout.types import Group
from skyasync.training.phases import Metrics

log = logging.getLogger(__name__)


class Reporting:
    """Where the metrics of steps go.

    Attributes:
        last_metrics: the newest value of every metric that was logged.
        run_dir: where samples are written; None where a run has no folder.
    """

    def __init__(self, tracker: Tracker, callbacks: Sequence[TrainerCallback] | None, samples: int) -> None:
        self.tracker, self.callbacks = tracker, list(callbacks or [])
        self.last_metrics: Metrics = {}
        self.run_dir: RunDirectory | None = None
        self._samples, self._trained = samples, 0
        self._failed: set[str] = set()  # what could not be written, until it is again
        self._usage: UsageMeter | None = None

    async def start(self, client: Engines, dispatch: Workers) -> None:
        """From here on the parts' work is measured."""
        self._usage = UsageMeter(client, dispatch)
        await self._usage.start()

    async def usage(self, wall_s: float) -> Metrics:
        """How busy engines and trainer were since the last call."""
        assert self._usage is not None, "start() comes first"
        return await self._usage.lap(wall_s, self._trained)

    def rolled_out(self, groups: Sequence[Group]) -> Metrics:
        """Metrics of what has been sampled; a warning if samples repeat as chance would not."""
        repeats = repeats_of(groups)
        if problem := repeat_warning(repeats):
            log.warning("%s", problem)
        return rollout_metrics(groups) | repeat_metrics(repeats)

    def trained(self, step: int, groups: Sequence[Group], decode: Callable[..., str] | None) -> None:
        """These groups were trained in this step; a few samples of them are written down."""
        self._trained = sum(len(group.trajectories) for group in groups)
        if self.run_dir is not None and self._samples and decode is not None:
            records = sample_records(list(groups), self._samples, decode)
            self._write("samples", self.run_dir.write_samples, step, records)

    def ended(self, step: int, prompts: Mapping[str, object]) -> None:
        """How the prompts of this step ended."""
        if self.run_dir is not None:
            self._write("ledger's line", self.run_dir.write_ledger, step, prompts)

    def _write(self, what: str, write: Callable[[int, Any], None], step: int, records: object) -> None:
        """A disk that does not take it is told once, and the run goes on."""
        try:
            write(step, records)
            self._failed.discard(what)
        except OSError as error:
            if what not in self._failed:
                log.warning("the %s of step %d were not written, and the run goes on: %s", what, step, error)
            self._failed.add(what)

    def log(self, metrics: Metrics, step: int) -> None:
        self.tracker.log(metrics, step=step)
        self.last_metrics = {**self.last_metrics, **metrics}

    def tell(self, event: str, *args: object) -> None:
        """Call the method of this name on every callback."""
        for callback in self.callbacks:
            getattr(callback, event)(*args)
