"""Between generator and batch: reward models give finished episodes their rewards, rejected groups are replaced.

Invariant: an episode is scored once, when its group has been generated: before anything is filtered, kept for a
checkpoint or trained. An episode without a response, or a failed one, has no score. The model is asked one thing at a
time; what ends meanwhile is asked next, at once:

    generated  a  b c    d           a model's batches are as large as it is slow
    asked      a┈┈┈ bc┈┈┈┈ d┈┈┈

Every prompt that is taken from the stream is either trained, or rejected and counted, in the order of the stream; a
rejected one is replaced by the next, so a step trains the first ``train_batch_size`` prompts that are kept. Nothing is
generated twice, and a resumed run goes on after them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from skyasync.config.schema.reward_models import RewardModel, reward_models
from skyasync.data.prompts import PromptBatch, PromptCursor
from skyasync.errors import UserError
from skyasync.rollout.types import Group, Prompt, Trajectory
from skyasync.utils.task_group import together
from skyasync.workers.roles import REWARD_ROLE, ROLES

if TYPE_CHECKING:
    from skyasync.trainer.context import Metrics, RunContext

log = logging.getLogger(__name__)


class RewardModelScorer:
    """Asks the reward model, if there is one.

    Attributes:
        overlaps: it may be asked while engines compute: its devices are not theirs.
    """

    def __init__(self, context: RunContext) -> None:
        role, cfg = ROLES[REWARD_ROLE], context.cfg
        self._active = role.has_ranks(cfg)
        self.overlaps = self._active and not (cfg.trainer.placement.colocate_all and role.colocated_if(cfg))
        self._models = reward_models(cfg.trainer.reward) if self._active else {}
        self._context = context
        self._waiting: list[list[Group]] = []
        self._asking = asyncio.Lock()

    async def while_generating(
        self, generate: Callable[[Prompt], Awaitable[tuple[list[Group], Metrics]]], prompts: Sequence[Prompt]
    ) -> list[Group]:
        """The groups of these prompts, each scored as soon as ``generate`` has returned it."""

        async def one(prompt: Prompt) -> list[Group]:
            groups, _ = await generate(prompt)
            await self.add_scores(groups)
            return groups

        async with together() as tasks:
            generated = [tasks.start(one(prompt)) for prompt in prompts]
        return [group for task in generated for group in task.result()]

    async def add_scores(self, groups: list[Group]) -> None:
        """Add its scores to the rewards of these groups, each on its episode's last action."""
        if not self._active or not any(group.trajectories for group in groups):
            return
        self._waiting.append(groups)
        try:
            async with self._asking:
                if any(waiting is groups for waiting in self._waiting):  # else another call has asked for these too
                    batch = list(self._waiting)
                    await self._score([group for some in batch for group in some])
                    self._forget(*batch)
        finally:
            self._forget(groups)

    def _forget(self, *asked: list[Group]) -> None:
        """By identity: others may have come and gone meanwhile."""
        self._waiting = [waiting for waiting in self._waiting if not any(waiting is some for some in asked)]

    async def _score(self, groups: list[Group]) -> None:
        from skyasync.rollout.collate import collate_in_turns

        batch, phases = await collate_in_turns(groups), self._context.phases
        with phases.timed("reward", track="reward model"):
            async with phases.limited("reward model"):
                found = await self._context.dispatch.ask(REWARD_ROLE, "scores", batch)
        scores = found.reshape(len(found), -1).tolist()
        row = 0
        for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
            row += len(trajectory.sequences)
            if trajectory.actions and not trajectory.metrics.get("given_up"):
                _add(trajectory, scores[row - 1], self._models)  # of its last sequence


def _add(trajectory: Trajectory, scores: Sequence[float], models: Mapping[str, RewardModel]) -> None:
    by_name = dict(zip(models, scores, strict=True))
    trajectory.actions[-1].reward += sum(models[name].part(score) for name, score in by_name.items())
    trajectory.metrics = {**trajectory.metrics, **by_name}


RollOut = Callable[[Sequence[Prompt], int | None], Awaitable[tuple[list[Group], "Metrics"]]]
Keep = Callable[[list[Group]], list[Group]]


class Refill:
    """More prompts of the run for rejected groups. With ``dynamic_sampling.mode=filter`` batches stay as they are.

    Attributes:
        cursor: where the run's batches are taken from, and the prompts that replace rejected ones.
    """

    def __init__(self, context: RunContext) -> None:
        self._cfg, self._length = context.cfg.trainer, context.length
        self.cursor: PromptCursor | None = None

    @property
    def active(self) -> bool:
        """Rejected groups are replaced while a batch is generated."""
        return self._length.refilling

    @property
    def most_rejected(self) -> float:
        """So many groups of one step are rejected before the step takes fewer."""
        batches = self._cfg.algorithm.dynamic_sampling.max_sample_batches
        return (batches - 1) * self._cfg.train_batch_size if batches else math.inf

    def more(self, count: int) -> PromptBatch:
        """The next prompts of the stream, for as many that were rejected; fewer at its end."""
        if self.cursor is None:
            raise UserError("dynamic_sampling.mode=refill needs a plan that takes its batches from remaining_prompts()")
        return self.cursor.take(count)

    async def fill(
        self, prompts: PromptBatch, step: int, roll_out: RollOut, keep: Keep
    ) -> tuple[list[Group], list[Group], Metrics, PromptBatch]:
        """Roll out, reject, replace: in rounds, so that the same seed gives the same batch.

        Returns:
            the groups kept and those rejected, metrics, and where the stream is after them.
        """
        batch, size = prompts, len(prompts.prompts)
        kept: list[Group] = []
        rejected: list[Group] = []
        rounds: list[Metrics] = []
        while True:
            groups, metrics = await roll_out(batch.prompts, step)
            rounds.append(metrics)
            good = keep(groups)
            kept += good
            rejected += [group for group in groups if not any(group is one for one in good)]
            if len(kept) >= size or len(rejected) >= self.most_rejected:
                break
            more = self.more(size - len(kept))
            if not more.prompts:
                break
            batch = more
        return kept, rejected, _summed(rounds), batch

    def count(self, kept: int, rejected: int) -> Metrics:
        """Metrics of a step's groups; a warning if there were too many to reject."""
        found = {"dynamic_sampling/sampled": float(kept + rejected), "dynamic_sampling/rejected": float(rejected)}
        size = self._cfg.train_batch_size
        if kept < size and rejected >= self.most_rejected:
            log.warning(
                "%d of %d sampled groups were kept, and trainer.algorithm.dynamic_sampling.max_sample_batches=%d is "
                "reached: the step trains on %d groups instead of %d",
                kept,
                kept + rejected,
                self._cfg.algorithm.dynamic_sampling.max_sample_batches,
                kept,
                size,
            )
            found["dynamic_sampling/limit_reached"] = 1.0
        return found


def _summed(rounds: Sequence[Metrics]) -> Metrics:
    """Metrics of rounds that came one after the other: the sum of times, the mean of the rest."""
    names = dict.fromkeys(name for metrics in rounds for name in metrics)
    values = {name: [metrics[name] for metrics in rounds if name in metrics] for name in names}
    return {name: sum(found) if name.startswith("time/") else sum(found) / len(found) for name, found in values.items()}
