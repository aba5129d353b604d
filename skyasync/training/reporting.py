"""What a run tells: trackers, callbacks, samples, how busy its parts were.

Invariant: a step is logged once, when all of it is done, with everything that was found out about it. One that is saved
has its line in the run's folder before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from skyasync.callbacks import TrainerCallback
from skyasync.errors import UserError
from skyasync.observe.run_dir import RunDirectory
from skyasync.observe.sample import Sample
from skyasync.observe.trackers import Tracker
from skyasync.observe.usage import Engines, UsageMeter, Workers
from skyasync.rollout import recorded
from skyasync.rollout.metrics import rollout_metrics, sample_records
from skyasync.rollout.repeats import repeat_metrics, repeat_warning, repeats_of
from skyasync.rollout.types import Group, Rollout
from skyasync.training.phases import Metrics
from skyasync.training.trained import TrainedRows

if TYPE_CHECKING:  # torch is imported when training starts, so that a wrong setting is refused at once
    from skyasync.models.batch import UpdateBatch

log = logging.getLogger(__name__)


class Reporting:
    """Where the metrics of steps go.

    Attributes:
        last_metrics: the newest value of every metric that was logged.
        last_sample: the newest of those that were written down, in short.
        run_dir: where samples are written; None where a run has no folder.

    Args:
        samples: written per step.
        trajectories: all of them are written, as Parquet files.
    """

    def __init__(
        self,
        tracker: Tracker,
        callbacks: Sequence[TrainerCallback] | None,
        samples: int,
        *,
        trajectories: bool = False,
    ) -> None:
        self.tracker, self.callbacks = tracker, list(callbacks or [])
        self.last_metrics: Metrics = {}
        self.last_sample: Sample | None = None
        self.run_dir: RunDirectory | None = None
        self._samples, self._trajectories, self._trained = samples, trajectories, 0
        self._failed: set[str] = set()  # which is told once, until it is written again
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

    async def trained(
        self,
        step: int,
        total_steps: int,
        rollout: Rollout,
        decode: Callable[..., str] | None,
        parts: Sequence[UpdateBatch] = (),
    ) -> None:
        """This was trained in this step: a few samples of it are written down, or all trajectories.

        Args:
            parts: the batches that it became, for what the trainer thought of the tokens.
        """
        self._trained = sum(len(group.trajectories) for group in rollout.groups)
        if self.run_dir is None:
            return
        rows = TrainedRows(parts)
        if self._samples and decode is not None:
            await self._write("samples", step, self._write_samples(step, rollout.groups, decode, rows))
        if self._trajectories:
            whole = recorded.Recorded(step, rollout.groups, rollout.position, rollout.ahead, total_steps)
            path = recorded.path_of(self.run_dir.path, step)
            await self._write("trajectories", step, asyncio.to_thread(recorded.write, path, whole, rows.logprobs))

    async def keep_bad(self, step: int, total_steps: int, rollout: Rollout, parts: Sequence[UpdateBatch]) -> None:
        """What could not be learnt from is written down, for ``skyasync replay RUN --nonfinite``."""
        if self.run_dir is None:
            return
        whole = recorded.Recorded(step, rollout.groups, rollout.position, rollout.ahead, total_steps)
        path = recorded.path_of(self.run_dir.path, step, recorded.NONFINITE)
        try:
            recorded.need_pyarrow()
        except UserError:
            log.warning("the batch of step %d is not written: that takes pyarrow (uv pip install pyarrow)", step)
            return
        await self._write("batch", step, asyncio.to_thread(recorded.write, path, whole, TrainedRows(parts).logprobs))

    async def ended(self, step: int, prompts: Mapping[str, object]) -> None:
        """How the prompts of this step ended."""
        if self.run_dir is not None:
            await self._write("ledger's line", step, self._write_ledger(step, prompts))

    async def _write_ledger(self, step: int, prompts: Mapping[str, object]) -> None:
        assert self.run_dir is not None
        self.run_dir.write_ledger(step, prompts)

    async def _write_samples(
        self, step: int, groups: Sequence[Group], decode: Callable[..., str], rows: TrainedRows
    ) -> None:
        assert self.run_dir is not None
        records = sample_records(list(groups), self._samples, decode, rows.logprobs)
        self.last_sample = Sample.of(step, records[0]) if records else None
        self.run_dir.write_samples(step, records)

    async def _write(self, what: str, step: int, writing: Awaitable[None]) -> None:
        """What the disk does not take is left out, and the run goes on."""
        try:
            await writing
            self._failed.discard(what)
        except OSError as error:
            if what not in self._failed:
                log.warning("the %s of step %d were not written, and the run goes on: %s", what, step, error)
            self._failed.add(what)

    def keep(self, metrics: Metrics, step: int) -> None:
        """Before a checkpoint of this step: a run that goes on from it does not make the step again."""
        if hasattr(self.tracker, "keep"):
            self.tracker.keep(metrics, step)

    def log(self, metrics: Metrics, step: int) -> None:
        self.tracker.log(metrics, step=step)
        self.last_metrics = {**self.last_metrics, **metrics}

    def tell(self, event: str, *args: object) -> None:
        """Call the method of this name on every callback."""
        for callback in self.callbacks:
            getattr(callback, event)(*args)
