"""Batches that are full of groups worth training on.

Invariant: every prompt that is taken from the stream is either trained or rejected and counted, in the order of the
stream; a rejected one is replaced by the next, so a step trains the first ``train_batch_size`` prompts that are kept.
What is behind the stream's position is done: nothing is generated twice, and a resumed run goes on behind it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from skyasync.errors import UserError
from skyasync.phases import Metrics, Phases
from skyasync.rollout.metrics import rollout_metrics
from skyasync.rollout.repeats import repeat_metrics, repeat_warning, repeats_of
from skyasync.rollout.types import Group, Prompt, Rollout

if TYPE_CHECKING:
    from skyasync.rollout.prompts import PromptBatch, PromptCursor, PromptStream

log = logging.getLogger(__name__)


class Refill(Phases):
    """What ``RayPPOTrainer`` inherits; with ``dynamic_sampling.mode=filter`` batches are as they were rolled out."""

    cfg: Any
    prompts: PromptStream
    global_step: int
    position: int
    ahead: frozenset[int]
    _cursor: PromptCursor | None = None

    @property
    def refilling(self) -> bool:
        """Rejected groups are replaced while a batch is generated."""
        return self.cfg.trainer.algorithm.dynamic_sampling.mode == "refill"

    @property
    def most_rejected(self) -> float:
        """So many groups of one step are rejected before it makes do with fewer."""
        batches = self.cfg.trainer.algorithm.dynamic_sampling.max_sample_batches
        return (batches - 1) * self.cfg.trainer.train_batch_size if batches else math.inf

    def remaining_prompts(self) -> Iterator[PromptBatch]:
        """The batches that have not been trained; ``generate`` may take prompts between two of them."""
        self._cursor = self.prompts.cursor(self.position, self.ahead)
        for _ in range(self.total_steps - self.global_step):
            batch = self._cursor.take(self.cfg.trainer.train_batch_size)
            if not batch.prompts:
                return
            yield batch

    async def generate_full(self, prompts: PromptBatch, step: int) -> Rollout:
        """Roll out, reject, replace: in rounds, so that the same seed gives the same batch."""
        if self._cursor is None:
            raise UserError("dynamic_sampling.mode=refill needs a plan that takes its batches from remaining_prompts()")
        batch, size = prompts, len(prompts.prompts)
        kept: list[Group] = []
        rejected: list[Group] = []
        rounds: list[Metrics] = []
        while True:
            groups, metrics = await self.roll_out(batch.prompts, step)
            rounds.append(metrics)
            good = self.filter_groups(groups)
            kept += good
            rejected += [group for group in groups if not any(group is one for one in good)]
            if len(kept) >= size or len(rejected) >= self.most_rejected:
                break
            more = self._cursor.take(size - len(kept))
            if not more.prompts:
                break
            batch = more
        return self.assemble(kept, _in_turn(rounds), batch.position, batch.ahead, rejected)

    def assemble(self, groups: list[Group], metrics: Metrics, position: int, ahead: frozenset[int],
                 rejected: Sequence[Group] = ()) -> Rollout:  # fmt: skip
        """What has been rolled out, as the batch of a step. Metrics are of all groups, those ``rejected`` as well."""
        if not self.refilling:
            groups = self.postprocess_generator_output(groups)
        sampled = [*groups, *rejected]
        repeats = repeats_of(sampled)
        if problem := repeat_warning(repeats):
            log.warning("%s", problem)
        found = rollout_metrics(sampled) | repeat_metrics(repeats) | metrics
        if self.refilling:
            found |= self._count(len(groups), len(rejected))
        return Rollout(groups, position, found, ahead)

    def _count(self, kept: int, rejected: int) -> Metrics:
        found = {"dynamic_sampling/sampled": float(kept + rejected), "dynamic_sampling/rejected": float(rejected)}
        size = self.cfg.trainer.train_batch_size
        if kept < size and rejected >= self.most_rejected:
            log.warning(
                "%d of %d sampled groups were kept, and trainer.algorithm.dynamic_sampling.max_sample_batches=%d is "
                "reached: the step trains on %d groups instead of %d",
                kept, kept + rejected, self.cfg.trainer.algorithm.dynamic_sampling.max_sample_batches, kept, size,
            )  # fmt: skip
            found["dynamic_sampling/limit_reached"] = 1.0
        return found

    # ---------------------------------------------------------------- the trainer's

    @property
    def total_steps(self) -> int:
        raise NotImplementedError

    async def roll_out(self, prompts: Sequence[Prompt], step: int | None = None) -> tuple[list[Group], Metrics]:
        raise NotImplementedError

    def filter_groups(self, groups: list[Group]) -> list[Group]:
        raise NotImplementedError

    def postprocess_generator_output(self, groups: list[Group]) -> list[Group]:
        raise NotImplementedError


def _in_turn(rounds: Sequence[Metrics]) -> Metrics:
    """Metrics of rounds that came one after the other: the sum of times, the mean of the rest."""
    names = dict.fromkeys(name for metrics in rounds for name in metrics)
    values = {name: [metrics[name] for metrics in rounds if name in metrics] for name in names}
    return {name: sum(found) if name.startswith("time/") else sum(found) / len(found) for name, found in values.items()}
