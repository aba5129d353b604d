"""The training prompts, in an order that only the seed decides.

Invariant: the stream is a pure function of (seed, position): whoever knows which positions have been trained
knows exactly what comes next, also in the middle of an epoch and at its end. No prompt is left out:
a batch may run over the end of an epoch, and the last batch may be smaller.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import xxhash

from skyasync.config.schema import Config, TrainerConfig
from skyasync.config.schema.environment import proportions_of
from skyasync.data.mixture import Order
from skyasync.errors import UserError
from skyasync.rollout.types import Prompt, PromptId

log = logging.getLogger(__name__)

ENDLESS = sys.maxsize >> 1  # prompts of a stream whose run ends by its steps alone
DIGEST_ROWS = 256  # evenly spaced; enough to tell other data, and quick on millions of rows


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
        proportions: domain -> share of the prompts; see ``skyasync.data.mixture``.
    """

    def __init__(
        self,
        dataset: Sequence[Prompt],
        batch_size: int,
        seed: int,
        total: int,
        proportions: Mapping[str, float] | None = None,
    ) -> None:
        if not dataset:
            raise UserError("there are no training prompts (data.train_data)")
        self._dataset, self._batch_size, self.total = dataset, batch_size, total

        self._order = Order(dataset, seed, proportions)

    @classmethod
    def of_run(cls, cfg: Config, dataset: Sequence[Prompt]) -> PromptStream:
        """What a run of this configuration trains on, in its order."""
        from skyasync.data.stream import BlockStream, StreamedPrompts

        if isinstance(dataset, StreamedPrompts):
            return BlockStream.of(cfg, dataset)
        total, proportions = prompts_of_run(cfg.trainer, len(dataset)), proportions_of(cfg.environment.domains)
        return cls(dataset, cfg.trainer.train_batch_size, cfg.trainer.seed, total, proportions)

    def mark(self, position: int) -> list[int]:
        """What finds this position again in data that is not held; of data that is, nothing."""
        return []

    def go_on(self, mark: Sequence[int]) -> None:
        """Be ready for positions from that of a mark on.

        Raises:
            UserError: if the mark is of a stream with another order.
        """
        if mark:
            raise UserError(
                "the checkpoint was saved with data.streaming=true, which orders prompts differently: set "
                "data.streaming=true, or start from scratch with trainer.resume_mode=none"
            )

    @property
    def rows(self) -> int:
        """Of the dataset, or of the first block where it is not held."""
        return len(self._dataset)

    def steps(self, position: int = 0, ahead: Collection[int] = ()) -> int:
        """How many batches are left when all before ``position`` and those in ``ahead`` are done."""
        return max(0, -(-(self.total - position - len(ahead)) // self._batch_size))

    def cursor(self, position: int = 0, ahead: Collection[int] = ()) -> PromptCursor:
        """Behind all before ``position`` and those in ``ahead``."""
        return PromptCursor(self, position, ahead)

    def batches(self, position: int = 0, ahead: Collection[int] = ()) -> Iterator[PromptBatch]:
        """The batches of what is left when all before ``position`` and those in ``ahead`` are done."""
        cursor = self.cursor(position, ahead)
        while (batch := cursor.take(self._batch_size)).prompts:
            yield batch

    @cached_property
    def digest(self) -> str:
        """Of what some of the rows say, the same wherever they come from; system prompts are settings and left out."""
        said = xxhash.xxh3_64()
        for row in range(0, self.rows, max(1, self.rows // DIGEST_ROWS)):
            messages = [message for message in self._dataset[row].messages if message.get("role") != "system"]
            said.update(json.dumps(messages, sort_keys=True, default=lambda value: type(value).__name__).encode())
        return said.hexdigest()

    def prompt(self, position: int) -> Prompt:
        epoch, offset = self._order.at(position)
        row = self._dataset[offset]
        return Prompt(PromptId(epoch, row.id.row), row.messages, row.env_class, row.extras)

    def of_identity(self, identity: PromptId) -> Prompt:
        """A prompt of the stream by what it is called."""
        row = self._dataset[self._places[identity.row]]
        return Prompt(identity, row.messages, row.env_class, row.extras)

    @cached_property
    def _places(self) -> dict[int, int]:
        """Row as prompts are called by it -> place in the dataset."""
        return {prompt.id.row: place for place, prompt in enumerate(self._dataset)}


class PromptCursor:
    """Where a reader of the stream stands; each prompt that is left is taken once, in order."""

    def __init__(self, stream: PromptStream, position: int, ahead: Collection[int]) -> None:
        self._stream, self._position, self._ahead = stream, position, ahead
        self._left = (p for p in range(position, stream.total) if p not in ahead)

    def take(self, count: int) -> PromptBatch:
        """The next ``count`` prompts, or as many as there are."""
        taken = list(islice(self._left, count))
        self._position = taken[-1] + 1 if taken else self._position
        ahead = frozenset(p for p in self._ahead if p >= self._position)
        return PromptBatch([self._stream.prompt(p) for p in taken], self._position, ahead)


def prompts_of_run(trainer_cfg: TrainerConfig, dataset_size: int) -> int:
    """How many prompts all epochs have, or as many of them as ``max_training_steps`` allows.

    Where rejected prompts are replaced, nobody knows how many that is. A line tells of steps that the data is too short
    for.
    """
    steps, size, epochs = trainer_cfg.max_training_steps, trainer_cfg.train_batch_size, trainer_cfg.epochs
    total = (epochs or (0 if steps else 1)) * dataset_size
    if steps and 0 < total <= (steps - 1) * size:
        log.warning(
            "the data ends before trainer.max_training_steps=%d: trainer.epochs=%d of %d prompts are %d steps of %d "
            "(trainer.epochs=0 goes through it as often as the steps take)",
            steps, epochs, dataset_size, -(-total // size), size,
        )  # fmt: skip
    elif not total and steps * size > dataset_size:
        log.warning(
            "trainer.max_training_steps=%d goes %.1f times through the %d training prompts",
            steps, steps * size / dataset_size, dataset_size,
        )  # fmt: skip
    if trainer_cfg.algorithm.dynamic_sampling.mode == "refill":
        return total or ENDLESS
    return min(total or ENDLESS, steps * size or ENDLESS)
