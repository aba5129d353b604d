"""The reports of a run: metrics to trackers, samples and trajectories to files, how busy its parts
were, profiles.

Invariant: a step is logged once, when all of it is done, with all its metrics. One that is saved
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
    """Where the metrics of steps go.

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
        self._trained = 0  # trajectories, in the last step
        self._batches: list[
            list[str]
        ] = []  # names of groups that the current step has trained together
        self._failed: set[str] = set()  # logged once, until it is written again
        self._usage: UsageMeter | None = None

    async def start_clock(self) -> None:
        """The first step begins: its time counts from here, and the work of engines and trainer."""
        self._usage = UsageMeter(self._context.client, self._context.dispatch, self._context.phases)
        await self._usage.start()

    async def end_interval(self) -> Metrics:
        """What a step took, and how busy engines and trainer were meanwhile. The next one begins
        here."""
        assert self._usage is not None, "start_clock() comes first"
        return await self._usage.lap(self._trained)

    def rolled_out(self, groups: Sequence[Group]) -> Metrics:
        """Metrics of what has been sampled."""
        return rollout_metrics(groups) | repeated_samples(groups)

    def prepared(self, groups: Sequence[Group]) -> None:
        """These groups are trained together. Those of the replay buffer are left out: a replay
        chooses them again."""
        sampled = self._context.solved.without_replayed(groups)
        self._batches.append([str(group.prompt.id) for group in sampled])

    async def trained(self, step: int, rollout: Rollout, parts: Sequence[UpdateBatch] = ()) -> None:
        """Write a few samples of what a step has trained, or all trajectories.

        Args:
            parts: the batches that it became, for the trainer's log-probabilities of the tokens.
        """
        self._trained = sum(len(group.trajectories) for group in rollout.groups)
        batches = self._batches
        self._batches = []
        run_dir = self._context.run_dir
        rows = TrainedRows(parts)
        if run_dir is None:
            return
        if self._samples and self._decode is not None:
            records = sample_records(
                list(rollout.groups), self._samples, self._decode, rows.logprobs
            )
            if records:
                self.last_sample = LatestSample.of(step, records[0])
            else:
                self.last_sample = None
            await self._write("samples", step, run_dir.write_samples, step, records)
        if self._trajectories:
            await self._write_trajectories("trajectories", step, rollout, rows, batches=batches)

    async def evaluated(self, step: int, groups: Sequence[Group]) -> None:
        """Write a few samples of each set of an evaluation."""
        if self._context.run_dir is None or self._decode is None or not self._samples:
            return
        sets: dict[str, list[Group]] = {}
        for group in groups:
            sets.setdefault(group.prompt.eval_set, []).append(group)
        records = [
            record | ({"eval_set": name} if name else {})
            for name, own in sets.items()
            for record in sample_records(own, self._samples, self._decode)
        ]
        write = partial(self._context.run_dir.write_samples, evaluation=True)
        await self._write("samples of the evaluation", step, write, step, records)

    async def keep_bad(self, rollout: Rollout, parts: Sequence[UpdateBatch]) -> None:
        """Write a batch that could not be learned from, for ``skyasync replay RUN --nonfinite``."""
        if self._context.run_dir is None:
            return
        step = self._context.phases.step
        rows = TrainedRows(parts)
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
        what: str,
        step: int,
        rollout: Rollout,
        rows: TrainedRows,
        *,
        folder: str = recorded.FOLDER,
        batches: Sequence[list[str]] = (),
    ) -> None:
        assert self._context.run_dir is not None
        at_once = [[str(group.prompt.id) for group in rollout.groups]]
        content = recorded.RecordedStep(
            step,
            rollout.groups,
            tuple(rollout.positions),
            self._context.length.steps,
            batches=[] if list(batches) == at_once else list(batches),
        )
        path = recorded.path_of(self._context.run_dir.path, step, folder)
        await self._write(
            what, step, asyncio.to_thread, recorded.write, path, content, rows.logprobs
        )

    async def _write(self, what: str, step: int, write: Callable[..., Any], *args: object) -> None:
        try:
            if inspect.isawaitable(writing := write(*args)):
                await writing
            self._failed.discard(what)
        except OSError as error:
            if what not in self._failed:
                log.warning(
                    "the %s of step %d were not written, and the run continues: %s",
                    what,
                    step,
                    error,
                )
            self._failed.add(what)

    def write_now(self, metrics: Metrics, step: int) -> None:
        """Before a checkpoint of this step: a run that resumes from it does not make the step
        again."""
        if isinstance(
            self._context.tracker, MultiTracker | JsonlTracker
        ):  # what is in the run folder
            self._context.tracker.keep(metrics, step)

    def log(self, metrics: Metrics, step: int) -> None:
        self._context.tracker.log(metrics, step=step)
        self.last_metrics = {**self.last_metrics, **metrics}


class Profiler(RunExtension):
    """Profiles of some steps (``trainer.profile_steps``): what the workers' processes did, by
    torch's profiler.

    A profile covers all that the workers do from the beginning of its step to its last update.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._steps = frozenset(context.cfg.trainer.profile_steps)
        self._open: Path | None = None

    async def on_step_begin(self, trainer: Watched, step: int) -> None:
        if step in self._steps and self._context.run_dir is not None:
            self._open = self._context.run_dir.path / "profile" / f"step_{step:06d}"
            await self._context.dispatch.begin_profile()

    async def on_step_end(self, trainer: Watched, metrics: dict[str, float]) -> None:
        if self._open is not None:
            folder = self._open
            self._open = None
            await self._context.dispatch.end_profile(folder)


class TrainedRows:
    """The trainer's log-probabilities of the sequences that it trained in a step.

    A sequence is found by its tokens alone, so neither filters, nor micro-batches, nor the order of
    rows can mix up two of them; equal ones have equal log-probabilities, being of one policy.

    Args:
        parts: as they were trained; of a row that was trained twice the first time counts.
    """

    def __init__(self, parts: Sequence[UpdateBatch] = ()) -> None:
        self._parts = [part for part in parts if part.proximal_logprobs is not None]
        self._rows: dict[
            int, dict[int, tuple[int, int]]
        ] = {}  # by length, as far as it was requested: by digest

    def logprobs(self, tokens: Ints) -> Floats | None:
        """The proximal policy's, one per token (0 if it was not computed); None for a sequence that
        was not trained."""
        length = len(tokens)
        if length not in self._rows:
            self._rows[length] = {
                xxhash.xxh3_64_intdigest(ints(part.tokens[row, :length].cpu().numpy()).tobytes()): (
                    number,
                    row,
                )
                for number, part in reversed(
                    list(enumerate(self._parts))
                )  # the last one written counts
                for row in (part.attention_mask.sum(1) == length).nonzero().flatten().tolist()
            }
        place = self._rows[length].get(xxhash.xxh3_64_intdigest(tokens.tobytes()))
        if place is None:
            return None
        part, row = place
        values = self._parts[part].proximal_logprobs
        assert values is not None
        logprobs: Floats = values[row, :length].float().cpu().numpy()
        return logprobs
