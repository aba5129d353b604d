"""The reports of a run: metrics to trackers, samples and trajectories to files, and profiles.

Invariant: a step is logged once, when all of it is done, with all its metrics. A step that is saved
has its line in the run's folder before. A file that the disk does not take is left out, and the run
continues.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from skyasync.arrays import Floats, Ints, ints
from skyasync.callbacks import RunExtension, Watched
from skyasync.errors import UserError
from skyasync.observability.progress import LatestSample
from skyasync.observability.trackers import JsonlTracker, MultiTracker
from skyasync.observability.usage import UsageMeter
from skyasync.rollout import trajectory_files as recorded
from skyasync.rollout.metrics import repeated_samples, rollout_metrics, sample_records
from skyasync.rollout.types import Group, Rollout
from skyasync.trainer.context import Metrics, RunContext

if TYPE_CHECKING:
    from skyasync.models.batch import UpdateBatch

log = logging.getLogger(__name__)


class Reporter(RunExtension):
    """Writes the metrics, samples and trajectories of steps.

    Attributes:
        last_metrics: the newest value of every metric that was logged.
        last_sample: the newest sample that was written, in short.
    """

    def __init__(self, context: RunContext, decode: Callable[..., str] | None) -> None:
        self.last_metrics: Metrics = {}
        self.last_sample: LatestSample | None = None
        self._context = context
        self._decode = decode
        self._samples = context.cfg.trainer.save_samples  # per step
        self._trajectories = context.cfg.trainer.dump_trajectories
        self._trained_trajectories = 0  # of the previous step
        # Names of groups that the current step has trained together.
        self._batches: list[list[str]] = []
        # Files that could not be written: logged once, until they are written again.
        self._failed_labels: set[str] = set()
        self._usage: UsageMeter | None = None

    async def start_clock(self) -> None:
        """Begin the first step: its time counts from here, and the work of engines and trainer."""
        self._usage = UsageMeter(self._context.client, self._context.dispatch, self._context.phases)
        await self._usage.start()

    async def end_interval(self) -> Metrics:
        """End a step's time. Returns its times, and how busy engines and trainer were."""
        assert self._usage is not None, "start_clock() comes first"
        return await self._usage.lap(self._trained_trajectories)

    def rolled_out(self, groups: Sequence[Group]) -> Metrics:
        """Metrics of sampled groups."""
        return rollout_metrics(groups) | repeated_samples(groups)

    def prepared(self, groups: Sequence[Group]) -> None:
        """Note that these groups are trained together."""
        # ``skyasync replay`` chooses the groups of the replay buffer again.
        sampled = self._context.replay_buffer.without_replayed(groups)
        self._batches.append([str(group.prompt.id) for group in sampled])

    async def trained(
        self, step: int, rollout: Rollout, update_batches: Sequence[UpdateBatch] = ()
    ) -> None:
        """Write a few samples of what a step has trained, or all trajectories.

        Args:
            update_batches: with the trainer's log-probabilities of the tokens.
        """
        self._trained_trajectories = sum(len(group.trajectories) for group in rollout.groups)
        batches = self._batches
        self._batches = []
        run_dir = self._context.run_dir
        rows = TrainedRows(update_batches)
        if run_dir is None:
            return
        if self._samples and self._decode is not None:
            records = sample_records(
                list(rollout.groups), self._samples, self._decode, rows.logprobs
            )
            self.last_sample = LatestSample.of(step, records[0]) if records else None
            await self._write("samples", step, run_dir.write_samples, step, records)
        if self._trajectories:
            await self._write_trajectories("trajectories", step, rollout, rows, batches=batches)

    async def evaluated(self, step: int, groups: Sequence[Group]) -> None:
        """Write a few samples of each set of an evaluation."""
        run_dir = self._context.run_dir
        if run_dir is None or self._decode is None or not self._samples:
            return
        sets: dict[str, list[Group]] = {}
        for group in groups:
            sets.setdefault(group.prompt.eval_set, []).append(group)
        records = []
        for name, set_groups in sets.items():
            for record in sample_records(set_groups, self._samples, self._decode):
                if name:
                    record["eval_set"] = name
                records.append(record)
        write = partial(run_dir.write_samples, evaluation=True)
        await self._write("samples of the evaluation", step, write, step, records)

    async def keep_bad(self, rollout: Rollout, update_batches: Sequence[UpdateBatch]) -> None:
        """Write a batch that is not finite, for ``skyasync replay RUN --nonfinite``."""
        if self._context.run_dir is None:
            return
        step = self._context.phases.step
        rows = TrainedRows(update_batches)
        try:
            recorded.need_pyarrow()
        except UserError:
            log.warning(
                "the batch of step %d is not written: that takes pyarrow (uv pip install pyarrow)",
                step,
            )
            return
        await self._write_trajectories("batch", step, rollout, rows, folder=recorded.NONFINITE)

    async def ended(self, step: int, prompts: Mapping[str, object]) -> None:
        """Write how the prompts of this step ended."""
        if self._context.run_dir is not None:
            await self._write(
                "ledger's line", step, self._context.run_dir.write_ledger, step, prompts
            )

    async def _write_trajectories(
        self,
        label: str,
        step: int,
        rollout: Rollout,
        rows: TrainedRows,
        *,
        folder: str = recorded.FOLDER,
        batches: Sequence[list[str]] = (),
    ) -> None:
        run_dir = self._context.run_dir
        assert run_dir is not None
        rollout_names = [str(group.prompt.id) for group in rollout.groups]
        # Most plans train the rollout in one batch, which needs no record.
        content = recorded.RecordedStep(
            step,
            rollout.groups,
            tuple(rollout.positions),
            self._context.length.steps,
            batches=[] if list(batches) == [rollout_names] else list(batches),
        )
        path = recorded.path_of(run_dir.path, step, folder)
        await self._write(
            label, step, asyncio.to_thread, recorded.write, path, content, rows.logprobs
        )

    async def _write(self, label: str, step: int, write: Callable[..., Any], *args: object) -> None:
        """Write a file; the run continues if the disk does not take it.

        Args:
            label: of the file's content, for the warning.
        """
        try:
            result = write(*args)
            if inspect.isawaitable(result):
                await result
            self._failed_labels.discard(label)
        except OSError as error:
            if label not in self._failed_labels:
                log.warning(
                    "the %s of step %d were not written, and the run continues: %s",
                    label,
                    step,
                    error,
                )
            self._failed_labels.add(label)

    def write_now(self, metrics: Metrics, step: int) -> None:
        """Write the step's line into the run's folder, before a checkpoint of the step.

        A run that resumes from the checkpoint does not make the step again.
        """
        if isinstance(self._context.tracker, MultiTracker | JsonlTracker):
            self._context.tracker.keep(metrics, step)

    def log(self, metrics: Metrics, step: int) -> None:
        self._context.tracker.log(metrics, step=step)
        self.last_metrics = {**self.last_metrics, **metrics}


class Profiler(RunExtension):
    """Profiles the workers' processes in some steps (``trainer.profile_steps``).

    A profile, by torch's profiler, covers all work from the beginning of its step to its last
    update.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._steps = frozenset(context.cfg.trainer.profile_steps)
        self._folder: Path | None = None  # of the profile that is being recorded

    async def on_step_begin(self, trainer: Watched, step: int) -> None:
        if step in self._steps and self._context.run_dir is not None:
            self._folder = self._context.run_dir.path / "profile" / f"step_{step:06d}"
            await self._context.dispatch.begin_profile()

    async def on_step_end(self, trainer: Watched, metrics: dict[str, float]) -> None:
        if self._folder is not None:
            folder = self._folder
            self._folder = None
            await self._context.dispatch.end_profile(folder)


class TrainedRows:
    """The trainer's log-probabilities of the sequences that it trained in a step.

    A sequence is found by its tokens alone, so neither filters, nor micro-batches, nor the order of
    rows can mix up two of them. Equal sequences have equal log-probabilities, being of one policy.

    Args:
        update_batches: in the order of training; of a row that was trained twice the first counts.
    """

    def __init__(self, update_batches: Sequence[UpdateBatch] = ()) -> None:
        self._batches = [batch for batch in update_batches if batch.proximal_logprobs is not None]
        # Length -> digest of the tokens -> number of the batch, row in it. Filled as lengths are
        # requested.
        self._rows: dict[int, dict[int, tuple[int, int]]] = {}

    def logprobs(self, tokens: Ints) -> Floats | None:
        """The proximal policy's log-probabilities of a sequence, 0 if they were not computed.

        Args:
            tokens: ``[length]``.

        Returns:
            ``[length]``; None for a sequence that was not trained.
        """
        length = len(tokens)
        if length not in self._rows:
            self._rows[length] = self._rows_of(length)
        position = self._rows[length].get(_digest(tokens))
        if position is None:
            return None
        number, row = position
        values = self._batches[number].proximal_logprobs
        assert values is not None
        logprobs: Floats = values[row, :length].float().cpu().numpy()
        return logprobs

    def _rows_of(self, length: int) -> dict[int, tuple[int, int]]:
        """The rows of this length by the digests of their tokens."""
        rows = {}
        # Backwards, so that the first of several equal rows replaces the others.
        for number, batch in reversed(list(enumerate(self._batches))):
            lengths = batch.attention_mask.sum(1)
            for row in (lengths == length).nonzero().flatten().tolist():
                tokens = ints(batch.tokens[row, :length].cpu().numpy())
                rows[_digest(tokens)] = (number, row)
        return rows


def _digest(tokens: Ints) -> int:
    return xxhash.xxh3_64_intdigest(tokens.tobytes())
