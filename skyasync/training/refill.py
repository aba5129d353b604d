"""Batches that are full of groups worth training on.

Invariant: every prompt that is taken from the stream is either trained or rejected and counted, in the order of the
stream; a rejected one is replaced by the next, so a step trains the first ``train_batch_size`` prompts that are kept.
What is behind the stream's position is done: nothing is generated twice, and a resumed run goes on behind it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence

from skyasync.config.schema import Config
from skyasync.data.prompts import PromptBatch, PromptCursor
from skyasync.errors import UserError
from skyasync.rollout.types import Group, Prompt
from skyasync.training.length import RunLength
from skyasync.training.phases import Metrics

log = logging.getLogger(__name__)

RollOut = Callable[[Sequence[Prompt], int | None], Awaitable[tuple[list[Group], Metrics]]]
Keep = Callable[[list[Group]], list[Group]]


class Refill:
    """More prompts of the run where groups are rejected.

    With ``dynamic_sampling.mode=filter`` batches are as they were rolled out.

    Attributes:
        cursor: where the run's batches are taken from, and what is to replace the rejected ones between two of them.
    """

    def __init__(self, cfg: Config, length: RunLength) -> None:
        self._cfg, self._length = cfg.trainer, length
        self.cursor: PromptCursor | None = None

    @property
    def active(self) -> bool:
        """Rejected groups are replaced while a batch is generated."""
        return self._length.refilling

    @property
    def most_rejected(self) -> float:
        """So many groups of one step are rejected before it makes do with fewer."""
        batches = self._cfg.algorithm.dynamic_sampling.max_sample_batches
        return (batches - 1) * self._cfg.train_batch_size if batches else math.inf

    def more(self, count: int) -> PromptBatch:
        """The next prompts of the stream, in the place of as many that were rejected; fewer at its end."""
        if self.cursor is None:
            raise UserError("dynamic_sampling.mode=refill needs a plan that takes its batches from remaining_prompts()")
        return self.cursor.take(count)

    async def fill(
        self, prompts: PromptBatch, step: int, roll_out: RollOut, keep: Keep
    ) -> tuple[list[Group], list[Group], Metrics, PromptBatch]:
        """Roll out, reject, replace: in rounds, so that the same seed gives the same batch.

        Returns:
            the groups kept and those rejected, metrics, and where the stream stands behind them.
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
        return kept, rejected, _in_turn(rounds), batch

    def count(self, kept: int, rejected: int) -> Metrics:
        """Metrics of a step's groups; a warning where there were too many to reject."""
        found = {"dynamic_sampling/sampled": float(kept + rejected), "dynamic_sampling/rejected": float(rejected)}
        size = self._cfg.train_batch_size
        if kept < size and rejected >= self.most_rejected:
            log.warning(
                "%d of %d sampled groups were kept, and trainer.algorithm.dynamic_sampling.max_sample_batches=%d is "
                "reached: the step trains on %d groups instead of %d",
                kept, kept + rejected, self._cfg.algorithm.dynamic_sampling.max_sample_batches, kept, size,
            )  # fmt: skip
            found["dynamic_sampling/limit_reached"] = 1.0
        return found


def _in_turn(rounds: Sequence[Metrics]) -> Metrics:
    """Metrics of rounds that came one after the other: the sum of times, the mean of the rest."""
    names = dict.fromkeys(name for metrics in rounds for name in metrics)
    values = {name: [metrics[name] for metrics in rounds if name in metrics] for name in names}
    return {name: sum(found) if name.startswith("time/") else sum(found) / len(found) for name, found in values.items()}
