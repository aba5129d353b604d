"""Between generator and batch: reward models score episodes, and rejected groups are replaced.

Invariant: an episode is scored once, when its group has been generated: before it is filtered,
saved in a checkpoint or trained. An episode without a response, or a failed one, has no score. The
model scores one batch at a time; episodes that end meanwhile are the next batch:

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
from itertools import chain, count
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
    """Scores episodes by the reward models, if there are any.

    Attributes:
        overlaps: it may score while engines compute: they have other devices.
    """

    def __init__(self, context: RunContext) -> None:
        role = ROLES[REWARD_ROLE]
        cfg = context.cfg
        self._active = role.has_ranks(cfg)
        on_engine_devices = cfg.trainer.placement.colocate_all and role.colocated_if(cfg)
        self.overlaps = self._active and not on_engine_devices
        self._models = reward_models(cfg.trainer.reward) if self._active else {}
        self._context = context
        self._waiting_groups: dict[int, list[Group]] = {}  # by the number of the call
        self._call_numbers = count()
        self._scoring_lock = asyncio.Lock()

    async def score_while_generating(
        self,
        generate: Callable[[Prompt], Awaitable[tuple[list[Group], Metrics]]],
        prompts: Sequence[Prompt],
    ) -> list[Group]:
        """The groups of these prompts, each scored as soon as ``generate`` has returned it."""

        async def generate_and_score(prompt: Prompt) -> list[Group]:
            groups, _ = await generate(prompt)
            await self.add_scores(groups)
            return groups

        async with together() as tasks:
            rollouts = [tasks.start(generate_and_score(prompt)) for prompt in prompts]
        groups: list[Group] = []
        for rollout in rollouts:
            groups += rollout.result()
        return groups

    async def add_scores(self, groups: list[Group]) -> None:
        """Add the models' scores to the rewards of these groups, on each episode's last action."""
        if not self._active or not any(group.trajectories for group in groups):
            return
        number = next(self._call_numbers)
        self._waiting_groups[number] = groups
        try:
            async with self._scoring_lock:
                if number in self._waiting_groups:  # another call may have scored them too
                    calls = dict(self._waiting_groups)
                    await self._score(list(chain.from_iterable(calls.values())))
                    for scored_number in calls:
                        self._waiting_groups.pop(scored_number, None)
        finally:
            # Also after an error or a cancellation: later calls must not score these groups.
            self._waiting_groups.pop(number, None)

    async def _score(self, groups: list[Group]) -> None:
        from skyasync.rollout.collate import collate_in_turns

        batch = await collate_in_turns(groups)
        phases = self._context.phases
        with phases.timed("reward", track="reward model"):
            async with phases.limited("reward model"):
                # [rows], or [rows, 1, models]
                outputs = await self._context.dispatch.ask(REWARD_ROLE, "scores", batch)
        scores = outputs.reshape(len(outputs), -1).tolist()  # [rows, models]
        row = 0
        for trajectory in chain.from_iterable(group.trajectories for group in groups):
            row += len(trajectory.sequences)
            if not trajectory.actions or trajectory.metrics.get("given_up"):
                continue
            # The last sequence of the episode counts.
            by_model = dict(zip(self._models, scores[row - 1], strict=True))
            reward = sum(self._models[name].part(score) for name, score in by_model.items())
            trajectory.actions[-1].reward += reward
            # A new mapping: copies of the trajectory share the old one.
            trajectory.metrics = trajectory.metrics | by_model


RollOut = Callable[[Sequence[Prompt], int | None], Awaitable[tuple[list[Group], "Metrics"]]]


class Refill:
    """Takes more prompts of the stream, in the place of those whose groups are rejected.

    With ``dynamic_sampling.mode=filter`` batches stay as they are.

    Attributes:
        active: rejected groups are replaced while a batch is generated.
        max_rejected: rejected groups of one step, before the step trains fewer groups.
        cursor: of the prompt stream, for batches and for replacements.
    """

    def __init__(self, cfg: TrainerConfig) -> None:
        self._size = cfg.train_batch_size
        self._max_batches = cfg.algorithm.dynamic_sampling.max_sample_batches
        self.active = cfg.algorithm.dynamic_sampling.mode == "refill"
        self.max_rejected = math.inf
        if self._max_batches:  # of which one is trained
            self.max_rejected = (self._max_batches - 1) * self._size
        self.cursor: PromptCursor | None = None

    def next_prompts(self, count: int) -> PromptBatch:
        """The next prompts of the stream; fewer than ``count`` at its end."""
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
            The accepted groups, the rejected groups, metrics, and the positions of all prompts.
        """
        size = len(batch.prompts)
        accepted_groups: list[Group] = []
        rejected_groups: list[Group] = []
        rounds: list[Metrics] = []
        positions = list(batch.positions)
        while True:
            groups, metrics = await roll_out(batch.prompts, step)
            rounds.append(metrics)
            round_accepted = list(filter_groups(groups))
            accepted_groups += round_accepted
            # By identity: a prompt may have several groups.
            accepted_ids = {id(group) for group in round_accepted}
            rejected_groups += [group for group in groups if id(group) not in accepted_ids]
            if len(accepted_groups) >= size or len(rejected_groups) >= self.max_rejected:
                break
            batch = self.next_prompts(size - len(accepted_groups))
            if not batch.prompts:  # the stream has ended
                break
            positions += batch.positions
        return accepted_groups, rejected_groups, merged(rounds, times=sum), positions

    def count(self, accepted: int, rejected: int) -> Metrics:
        """Metrics of a step's groups. Logs a warning if the step trains fewer than it should."""
        metrics = {
            "dynamic_sampling/sampled": float(accepted + rejected),
            "dynamic_sampling/rejected": float(rejected),
        }
        if accepted < self._size and rejected >= self.max_rejected:
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
    """The metrics of several rollouts: means.

    Args:
        times: the same for ``time/...`` metrics: ``max`` of rollouts at the same time, ``sum`` of
            one after the other.
    """
    samples: dict[str, list[float]] = {}
    for metrics in rollouts:
        for name, value in metrics.items():
            samples.setdefault(name, []).append(value)
    result = {}
    for name, values in samples.items():
        combine = times if name.startswith("time/") else fmean
        result[name] = combine(values)
    return result
