"""Between generator and batch: reward models give finished episodes their rewards, rejected groups
are replaced.

Invariant: an episode is scored once, when its group has been generated: before anything is
filtered, kept for a checkpoint or trained. An episode without a response, or a failed one, has no
score. The model scores one batch at a time; what ends meanwhile is the next batch:

    generated  a  b c    d           a model's batches are as large as it is slow
    scored     a┈┈┈ bc┈┈┈┈ d┈┈┈

Every prompt that is taken from the stream is either trained, or rejected and counted, in the order
of the stream. A rejected one is replaced by the next, so a step trains the first
``train_batch_size`` prompts that are not rejected. No prompt is generated twice, and a resumed run
goes on after them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from statistics import fmean
from typing import TYPE_CHECKING

from skyasync.config.schema import TrainerConfig
from skyasync.config.schema.models import reward_models
from skyasync.data.prompts import PromptBatch, PromptCursor
from skyasync.errors import UserError
from skyasync.rollout.types import Group, Prompt
from skyasync.utils.task_group import together
from skyasync.workers.roles import REWARD_ROLE, ROLES

if TYPE_CHECKING:
    from skyasync.trainer.context import Metrics, RunContext

log = logging.getLogger(__name__)


class RewardModelScorer:
    """Asks the reward model, if there is one.

    Attributes:
        overlaps: it may score while engines compute: its devices are not theirs.
    """

    def __init__(self, context: RunContext) -> None:
        role = ROLES[REWARD_ROLE]
        cfg = context.cfg
        self._active = role.has_ranks(cfg)
        self.overlaps = self._active and not (
            cfg.trainer.placement.colocate_all and role.colocated_if(cfg)
        )
        if self._active:
            self._models = reward_models(cfg.trainer.reward)
        else:
            self._models = {}
        self._context = context
        self._waiting: dict[int, list[Group]] = {}  # by the number of the call
        self._numbers = count()
        self._scoring = asyncio.Lock()

    async def score_while_generating(
        self,
        generate: Callable[[Prompt], Awaitable[tuple[list[Group], Metrics]]],
        prompts: Sequence[Prompt],
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
        number = next(self._numbers)
        self._waiting[number] = groups
        try:
            async with self._scoring:
                if number in self._waiting:  # else another call has scored these too
                    batch = dict(self._waiting)
                    await self._score([group for waiting in batch.values() for group in waiting])
                    for scored in batch:
                        self._waiting.pop(scored, None)
        finally:
            self._waiting.pop(number, None)

    async def _score(self, groups: list[Group]) -> None:
        from skyasync.rollout.collate import collate_in_turns

        batch = await collate_in_turns(groups)
        phases = self._context.phases
        with phases.timed("reward", track="reward model"):
            async with phases.limited("reward model"):
                answer = await self._context.dispatch.ask(REWARD_ROLE, "scores", batch)
        scores = answer.reshape(len(answer), -1).tolist()
        row = 0
        for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
            row += len(trajectory.sequences)
            if trajectory.actions and not trajectory.metrics.get("given_up"):
                by_name = dict(
                    zip(self._models, scores[row - 1], strict=True)
                )  # of its last sequence
                trajectory.actions[-1].reward += sum(
                    self._models[name].part(score) for name, score in by_name.items()
                )
                trajectory.metrics = {**trajectory.metrics, **by_name}


RollOut = Callable[[Sequence[Prompt], int | None], Awaitable[tuple[list[Group], "Metrics"]]]


class Refill:
    """More prompts of the run for rejected groups. With ``dynamic_sampling.mode=filter`` batches
    stay as they are.

    Attributes:
        active: rejected groups are replaced while a batch is generated.
        most_rejected: so many groups of one step are rejected before the step takes fewer.
        cursor: where the run's batches are taken from, and the prompts that replace rejected ones.
    """

    def __init__(self, cfg: TrainerConfig) -> None:
        self._size = cfg.train_batch_size
        self._max_batches = cfg.algorithm.dynamic_sampling.max_sample_batches
        self.active = cfg.algorithm.dynamic_sampling.mode == "refill"
        self.most_rejected = (self._max_batches - 1) * self._size if self._max_batches else math.inf
        self.cursor: PromptCursor | None = None

    def next_prompts(self, count: int) -> PromptBatch:
        """The next prompts of the stream, for as many that were rejected; fewer at its end."""
        if self.cursor is None:
            raise UserError(
                "dynamic_sampling.mode=refill needs a plan that takes its batches from remaining_prompts()"
            )
        return self.cursor.take(count)

    async def fill(
        self,
        batch: PromptBatch,
        step: int,
        roll_out: RollOut,
        filter_groups: Callable[[list[Group]], list[Group]],
    ) -> tuple[list[Group], list[Group], Metrics, list[int]]:
        """Roll out, reject, replace: in rounds, so that the same seed gives the same batch.

        Returns:
            the groups to train and those rejected, metrics, and the positions of all these prompts.
        """
        size = len(batch.prompts)
        accepted: list[Group] = []
        rejected: list[Group] = []
        rounds: list[Metrics] = []
        positions = list(batch.positions)
        while True:
            groups, metrics = await roll_out(batch.prompts, step)
            rounds.append(metrics)
            good = list(filter_groups(groups))
            accepted += good
            rejected += [group for group in groups if not any(group is one for one in good)]
            if len(accepted) >= size or len(rejected) >= self.most_rejected:
                break
            more = self.next_prompts(size - len(accepted))
            if not more.prompts:
                break
            batch = more
            positions += more.positions
        return accepted, rejected, merged(rounds, times=sum), positions

    def count(self, accepted: int, rejected: int) -> Metrics:
        """Metrics of a step's groups; a warning if there were too many to reject."""
        metrics = {
            "dynamic_sampling/sampled": float(accepted + rejected),
            "dynamic_sampling/rejected": float(rejected),
        }
        if accepted < self._size and rejected >= self.most_rejected:
            log.warning(
                "%d of %d sampled groups were kept, and trainer.algorithm.dynamic_sampling.max_sample_batches=%d is "
                "reached: the step trains on %d groups instead of %d",
                accepted,
                accepted + rejected,
                self._max_batches,
                accepted,
                self._size,
            )
            metrics["dynamic_sampling/limit_reached"] = 1.0
        return metrics


def merged(
    rollouts: Sequence[Metrics], *, times: Callable[[Sequence[float]], float] = max
) -> Metrics:
    """The metrics of several rollouts: the mean of each.

    Args:
        times: of ``time/...`` metrics: ``max`` of rollouts at the same time, ``sum`` of one after
            the other.
    """
    values: dict[str, list[float]] = {}
    for metrics in rollouts:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {
        name: times(each) if name.startswith("time/") else fmean(each)
        for name, each in values.items()
    }
