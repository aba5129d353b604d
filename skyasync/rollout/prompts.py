"""The training prompts, in an order that only the seed decides.

Invariant: the stream is a pure function of (seed, position): whoever knows which positions have been trained
knows exactly what comes next, also in the middle of an epoch and at its end. No prompt is left out:
a batch may run over the end of an epoch, and the last batch may be smaller.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from skyasync.errors import UserError
from skyasync.rollout.types import Prompt, PromptId


@dataclass(frozen=True)
class PromptBatch:
    """Prompts of one step. Behind it all before ``position`` are done, and those in ``ahead``."""

    prompts: list[Prompt]
    position: int
    ahead: frozenset[int] = frozenset()


class PromptStream:
    """Shuffled passes over a dataset, cut into batches.

    Args:
        dataset: prompts whose ``id.row`` is their row; ``id.epoch`` is set here.
        total: prompts of the whole run, over all epochs.
    """

    def __init__(self, dataset: Sequence[Prompt], batch_size: int, seed: int, total: int) -> None:
        if not dataset:
            raise UserError("there are no training prompts (data.train_data)")
        self._dataset, self._batch_size, self._seed, self.total = dataset, batch_size, seed, total
        self._order: tuple[int, np.ndarray] | None = None

    def steps(self, position: int = 0, ahead: Collection[int] = ()) -> int:
        """How many batches are left when all before ``position`` and those in ``ahead`` are done."""
        return max(0, -(-(self.total - position - len(ahead)) // self._batch_size))

    def batches(self, position: int = 0, ahead: Collection[int] = ()) -> Iterator[PromptBatch]:
        """The batches of what is left when all before ``position`` and those in ``ahead`` are done."""
        left = (p for p in range(position, self.total) if p not in ahead)
        while batch := list(islice(left, self._batch_size)):
            done = batch[-1] + 1
            yield PromptBatch([self.prompt(p) for p in batch], done, frozenset(p for p in ahead if p >= done))

    def prompt(self, position: int) -> Prompt:
        epoch, offset = divmod(position, len(self._dataset))
        row = self._dataset[int(self._epoch_order(epoch)[offset])]
        return Prompt(PromptId(epoch, row.id.row), row.messages, row.env_class, row.extras)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng((self._seed, epoch)).permutation(len(self._dataset)))
        return self._order[1]


def prompts_of_run(trainer_cfg: Any, dataset_size: int) -> int:
    """How many prompts all epochs have, or as many of them as ``max_training_steps`` allows."""
    total = trainer_cfg.epochs * dataset_size
    limit = trainer_cfg.max_training_steps * trainer_cfg.train_batch_size
    return min(total, limit) if limit else total
