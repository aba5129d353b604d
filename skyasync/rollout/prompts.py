"""The training prompts, in an order that only the seed decides.

Invariant: the stream is a pure function of (seed, position): whoever knows the position of the last trained
prompt knows exactly what comes next, also in the middle of an epoch and at its end. No prompt is left out:
a batch may run over the end of an epoch, and the last batch may be smaller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from skyasync.errors import UserError
from skyasync.rollout.types import Prompt, PromptId


@dataclass(frozen=True)
class PromptBatch:
    """Prompts of one step. ``position`` counts the prompts of the run up to and with this batch."""

    prompts: list[Prompt]
    position: int


class PromptStream:
    """Shuffled passes over a dataset, cut into batches.

    Args:
        dataset: prompts whose ``id.row`` is their row; ``id.epoch`` is set here.
        total: prompts of the whole run, over all epochs.
    """

    def __init__(self, dataset: Sequence[Prompt], batch_size: int, seed: int, total: int) -> None:
        if not dataset:
            raise UserError("there are no training prompts (data.train_data)")
        self._dataset, self._batch_size, self._seed, self._total = dataset, batch_size, seed, total
        self._order: tuple[int, np.ndarray] | None = None

    def steps(self, position: int = 0) -> int:
        """How many batches are left after ``position`` prompts."""
        return max(0, -(-(self._total - position) // self._batch_size))

    def batches(self, position: int = 0) -> Iterator[PromptBatch]:
        """The batches after ``position`` prompts."""
        while position < self._total:
            end = min(position + self._batch_size, self._total)
            yield PromptBatch([self.prompt(p) for p in range(position, end)], end)
            position = end

    def prompt(self, position: int) -> Prompt:
        epoch, offset = divmod(position, len(self._dataset))
        row = self._dataset[int(self._epoch_order(epoch)[offset])]
        return Prompt(PromptId(epoch, row.id.row), row.messages, row.env_class, row.extras)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng((self._seed, epoch)).permutation(len(self._dataset)))
        return self._order[1]
