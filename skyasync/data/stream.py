"""Prompts of data that does not fit in memory: read block by block, in an order that depends on the seed alone.

A pass over the rows is cut into blocks of ``data.shuffle_buffer``. The prompts of a block that are short enough come in
a permutation of (seed, pass, block), block after block. After the last block the next pass starts.

Invariant: the prompt at a position is a function of the seed, the buffer's size and the rows. A ``BlockPosition`` says
where a block starts, in the stream and in every source, and is all that is needed to continue there. In memory are the
blocks of the prompts in flight and a few more, one of them read ahead in a thread, however many rows there are.
(``datasets``' own shuffle buffer is not part of its state: after a restart its order is another.)
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import overload

import numpy as np

from skyasync.config.schema import Config
from skyasync.data.prompts import ENDLESS, PromptStream
from skyasync.data.sources import InterleavedSources, Read, Row
from skyasync.errors import UserError
from skyasync.rollout.types import Prompt, PromptId

log = logging.getLogger(__name__)

KEPT = 4  # blocks besides those of prompts in flight: the current, the next, an empty one between two passes


@dataclass(frozen=True, order=True)
class BlockPosition:
    """Where a block starts: pass, number of the block in it, position in the stream, rows read of each source."""

    epoch: int
    block: int
    position: int
    given: tuple[int, ...]


@dataclass(frozen=True)
class PromptBlock:
    """Prompts in the order of their rows, and where the next block starts."""

    prompts: list[Prompt]
    following: BlockPosition


class StreamedPrompts(Sequence[Prompt]):
    """The blocks of a stream; as a sequence, its first block.

    Args:
        reads: of the sources.
        as_prompts: the rows of a block, the first of which has this number, to the prompts that are short enough.
        size: rows per block.
    """

    def __init__(
        self, reads: Sequence[Read], as_prompts: Callable[[int, Sequence[Row]], list[Prompt]], size: int
    ) -> None:
        self._source, self._as_prompts, self.size = InterleavedSources(reads), as_prompts, size
        self.first = BlockPosition(0, 0, 0, (0,) * len(reads))
        self.first_block = self.read(self.first)

    def read(self, mark: BlockPosition) -> PromptBlock:
        """Waits for the sources, which are opened once if blocks are read in order. Not for two threads at once.

        Raises:
            UserError: if a source cannot be read, or no prompt of a whole pass is short enough.
        """
        self._source.seek(mark.given)
        rows = self._source.take(self.size)
        prompts = self._as_prompts(mark.block * self.size, rows)
        end = mark.position + len(prompts)
        if len(rows) == self.size:
            return PromptBlock(prompts, BlockPosition(mark.epoch, mark.block + 1, end, self._source.given))
        if mark.epoch == 0 and end == 0:
            raise UserError("data.train_data has no rows whose prompt is short enough (trainer.max_prompt_length)")
        log.debug("pass %d over data.train_data has ended: %d prompts so far", mark.epoch + 1, end)
        return PromptBlock(prompts, BlockPosition(mark.epoch + 1, 0, end, (0,) * len(mark.given)))

    def __len__(self) -> int:
        return len(self.first_block.prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        return self.first_block.prompts[index]


class BlockStream(PromptStream):
    """A ``PromptStream`` of rows that are not in memory, and whose number is not known.

    Args:
        total: prompts of the whole run.
        window: prompts that may be in flight.
        limit_s: seconds that a source may take for a block; None has no limit.
    """

    def __init__(
        self,
        dataset: StreamedPrompts,
        batch_size: int,
        seed: int,
        total: int,
        window: int = 0,
        limit_s: float | None = None,
    ) -> None:
        if not dataset:
            raise UserError("the first block of data.train_data has no prompt that is short enough: raise "
                            "data.shuffle_buffer or trainer.max_prompt_length")  # fmt: skip
        self._dataset, self._batch_size, self.total = dataset, batch_size, total
        self._blocks = dataset
        self._seed = seed
        self._kept = KEPT + -(-window // dataset.size)
        self._marks = [dataset.first]  # of blocks that follow each other
        self._reading: dict[BlockPosition, Future[PromptBlock]] = {dataset.first: Future()}
        self._reading[dataset.first].set_result(dataset.first_block)
        self._orders: dict[BlockPosition, np.ndarray] = {}
        self._reader, self._limit_s = ThreadPoolExecutor(1, "reads data.train_data"), limit_s

    @classmethod
    def of(cls, cfg: Config, dataset: StreamedPrompts) -> BlockStream:
        """What a run of this configuration trains on."""
        trainer = cfg.trainer
        refill = trainer.algorithm.dynamic_sampling.mode == "refill"
        total = ENDLESS if refill else trainer.max_training_steps * trainer.train_batch_size
        ahead = max(trainer.max_staleness, trainer.async_queue_size) + 2
        window = ahead * trainer.train_batch_size
        return cls(dataset, trainer.train_batch_size, trainer.seed, total, window, trainer.step_timeout_s)

    def prompt(self, position: int) -> Prompt:
        mark = self._mark_of(position)
        prompts = self._block(mark).prompts
        if mark not in self._orders:
            self._orders[mark] = np.random.default_rng((self._seed, mark.epoch, mark.block)).permutation(len(prompts))
        found = prompts[int(self._orders[mark][position - mark.position])]
        return self._named(found, mark.epoch)

    def of_identity(self, identity: PromptId) -> Prompt:
        wanted = identity.epoch, identity.row // self._blocks.size
        while (self._marks[-1].epoch, self._marks[-1].block) < wanted:
            self._find_next()
        mark = next((m for m in self._marks if (m.epoch, m.block) == wanted), self._marks[-1])
        found = next((p for p in self._block(mark).prompts if p.id.row == identity.row), None)
        if found is None or (mark.epoch, mark.block) != wanted:
            raise UserError(
                f"the checkpoint has rollouts of prompt {identity}, which data.train_data no longer contains: restore "
                f"the data, or start from scratch with trainer.resume_mode=none"
            )
        return self._named(found, identity.epoch)

    def mark(self, position: int) -> list[int]:
        mark = self._mark_of(position)
        return [self._blocks.size, mark.epoch, mark.block, mark.position, *mark.given]

    def go_on(self, mark: Sequence[int]) -> None:
        if not mark:
            raise UserError("the checkpoint is of a run without data.streaming: its position would be another prompt's")
        size, epoch, block, position, *given = mark
        if size != self._blocks.size:
            raise UserError(
                f"the checkpoint is of a run with data.shuffle_buffer={size}, this one has {self._blocks.size}: the "
                f"order of the prompts would be another"
            )
        if len(given) != len(self._blocks.first.given):
            raise UserError(f"the checkpoint is of a run with {len(given)} sources in data.train_data")
        self._marks = [BlockPosition(epoch, block, position, tuple(given))]

    def _mark_of(self, position: int) -> BlockPosition:
        """The block that holds a position, which is not before the first that is known."""
        while self._marks[-1].position <= position:
            self._find_next()
        return self._marks[bisect_right(self._marks, position, key=lambda mark: mark.position) - 1]

    def _find_next(self) -> None:
        self._marks.append(self._block(self._marks[-1]).following)

    def _block(self, mark: BlockPosition) -> PromptBlock:
        """Waits for it if it has not been read; the next one is read meanwhile."""
        reading = self._begin(mark)
        done, _ = wait([reading], self._limit_s)
        if not done:
            problem = f"has given no block of {self._blocks.size} rows within {self._limit_s:g} s"
            raise UserError(f"data.train_data {problem} (trainer.step_timeout_s)")
        block = reading.result()
        self._begin(block.following)
        return block

    def _begin(self, mark: BlockPosition) -> Future[PromptBlock]:
        if mark not in self._reading:
            self._reading[mark] = self._reader.submit(self._blocks.read, mark)
            while len(self._reading) > self._kept:  # the first ones go: what is in flight moves on
                gone = min(other for other in self._reading if other != mark)
                del self._reading[gone]
                self._orders.pop(gone, None)
        return self._reading[mark]

    @staticmethod
    def _named(prompt: Prompt, epoch: int) -> Prompt:
        return Prompt(PromptId(epoch, prompt.id.row), prompt.messages, prompt.env_class, prompt.extras)
