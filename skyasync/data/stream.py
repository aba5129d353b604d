"""Prompts of data that does not fit in memory, read block by block.

A pass over the rows is cut into blocks of ``data.shuffle_buffer``. The prompts of a block that are
short enough come in a permutation of (seed, pass, block), block after block. After the last block
the next pass starts.

Invariant: the prompt at a position is a function of the seed, the buffer's size and the rows. A
``BlockPosition`` is where a block starts, in the stream and in every source, and all that is needed
to continue there. In memory are the blocks of the prompts in flight and a few more, one of
them read ahead in a thread, however many rows there are. (``datasets``' own shuffle buffer is not
part of its state: after a restart its order is another.)
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np

from skyasync.data.prompts import PromptStream
from skyasync.data.sources import InterleavedSources, Read, Row
from skyasync.errors import UserError
from skyasync.rollout.types import Prompt, PromptId

log = logging.getLogger(__name__)

# Besides those of prompts in flight: the current one, the one that is read ahead, an empty one
# between two passes, and one to spare.
BLOCKS_IN_MEMORY = 4


@dataclass(frozen=True, order=True)
class BlockPosition:
    """The start of a block. Blocks are in the order of their starts.

    Args:
        epoch: the pass.
        block: number of the block in the pass.
        position: in the stream.
        rows_read: of each source.
    """

    epoch: int
    block: int
    position: int
    rows_read: tuple[int, ...]


@dataclass(frozen=True)
class PromptBlock:
    """Prompts in the order of their rows, and the start of the next block."""

    prompts: list[Prompt]
    following: BlockPosition


class StreamedPrompts(Sequence[Prompt]):
    """The blocks of a stream; as a sequence, its first block.

    Args:
        reads: the readers of the sources.
        as_prompts: converts the number of a block's first row, and its rows, to the prompts that
            are short enough.
        size: rows per block.
    """

    def __init__(
        self,
        reads: Sequence[Read],
        as_prompts: Callable[[int, Sequence[Row]], list[Prompt]],
        size: int,
    ) -> None:
        self._source = InterleavedSources(reads)
        self._as_prompts = as_prompts
        self.size = size
        self.start = BlockPosition(0, 0, 0, (0,) * len(reads))
        self.first_block = self.read(self.start)

    def read(self, start: BlockPosition) -> PromptBlock:
        """Read a block; the sources are opened once if blocks are read in order.

        Not for two threads at once.

        Raises:
            UserError: if a source cannot be read, or no prompt of a whole pass is short enough.
        """
        self._source.seek(start.rows_read)
        rows = self._source.take(self.size)
        prompts = self._as_prompts(start.block * self.size, rows)
        end = start.position + len(prompts)
        if len(rows) == self.size:
            rows_read = self._source.rows_read
            following = BlockPosition(start.epoch, start.block + 1, end, rows_read)
            return PromptBlock(prompts, following)
        # A smaller block, perhaps an empty one, is the last of its pass.
        if start.epoch == 0 and end == 0:
            raise UserError(
                "data.train_data has no rows whose prompt is short enough (trainer.max_prompt_length)"
            )
        if start.block == 0 and not rows:
            raise UserError(
                f"data.train_data has no rows in pass {start.epoch + 1}: a function must give its rows each time it is "
                f"called"
            )
        log.debug("pass %d over data.train_data has ended: %d prompts so far", start.epoch + 1, end)
        following = BlockPosition(start.epoch + 1, 0, end, (0,) * len(start.rows_read))
        return PromptBlock(prompts, following)

    def __len__(self) -> int:
        return len(self.first_block.prompts)

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401  (a number or a slice)
        return self.first_block.prompts[index]


class BlockStream(PromptStream):
    """A ``PromptStream`` of rows that are not in memory, and whose number is not known.

    Args:
        total: prompts of the whole run.
        window: prompts that may be in flight.
        limit_s: seconds that a source may take for a block; None has no limit.
    """

    _dataset: StreamedPrompts

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
            raise UserError(
                "the first block of data.train_data has no prompt that is short enough: raise data.shuffle_buffer or "
                "trainer.max_prompt_length"
            )
        self._dataset = dataset
        self._batch_size = batch_size
        self._seed = seed
        self.total = total
        self.rows = len(dataset)
        self._max_blocks = BLOCKS_IN_MEMORY + -(-window // dataset.size)
        self._starts = [dataset.start]  # of blocks that follow each other
        self._reading: dict[BlockPosition, Future[PromptBlock]] = {dataset.start: Future()}
        self._reading[dataset.start].set_result(dataset.first_block)
        self._orders: dict[BlockPosition, np.ndarray] = {}
        self._reader = ThreadPoolExecutor(1, "reads data.train_data")
        self._limit_s = limit_s

    def prompt(self, position: int) -> Prompt:
        start = self._start_before(position)
        prompts = self._block(start).prompts
        if start not in self._orders:
            random = np.random.default_rng((self._seed, start.epoch, start.block))
            self._orders[start] = random.permutation(len(prompts))
        prompt = prompts[int(self._orders[start][position - start.position])]
        return replace(prompt, id=PromptId(start.epoch, prompt.id.row))

    def of_identity(self, identity: PromptId) -> Prompt:
        block = identity.epoch, identity.row // self._dataset.size
        while (self._starts[-1].epoch, self._starts[-1].block) < block:
            self._add_start()
        for start in self._starts:
            if (start.epoch, start.block) == block:
                for prompt in self._block(start).prompts:
                    if prompt.id.row == identity.row:
                        return replace(prompt, id=identity)
        raise UserError(
            f"the checkpoint has rollouts of prompt {identity}, which data.train_data no longer contains: restore "
            f"the data, or start from scratch with trainer.resume_mode=none"
        )

    def mark(self, position: int) -> list[int]:
        start = self._start_before(position)
        return [self._dataset.size, start.epoch, start.block, start.position, *start.rows_read]

    def seek(self, mark: Sequence[int]) -> None:
        if not mark:
            raise UserError(
                "the checkpoint is of a run without data.streaming: its position would be another prompt's"
            )
        size, epoch, block, position, *rows_read = mark
        if size != self._dataset.size:
            raise UserError(
                f"the checkpoint is of a run with data.shuffle_buffer={size}, this one has {self._dataset.size}: the "
                f"order of the prompts would be another"
            )
        if len(rows_read) != len(self._dataset.start.rows_read):
            raise UserError(
                f"the checkpoint is of a run with {len(rows_read)} sources in data.train_data"
            )
        self._starts = [BlockPosition(epoch, block, position, tuple(rows_read))]

    def _start_before(self, position: int) -> BlockPosition:
        """The start of a position's block; the position is not before ``_starts``."""
        while self._starts[-1].position <= position:
            self._add_start()
        # The last of several with this position: blocks without prompts start there too.
        index = bisect_right(self._starts, position, key=attrgetter("position"))
        return self._starts[index - 1]

    def _add_start(self) -> None:
        self._starts.append(self._block(self._starts[-1]).following)

    def _block(self, start: BlockPosition) -> PromptBlock:
        """Wait for a block; the next one is read meanwhile."""
        finished_reads, _ = wait([self._begin(start)], self._limit_s)
        if not finished_reads:
            problem = f"has given no block of {self._dataset.size} rows within {self._limit_s:g} s"
            raise UserError(f"data.train_data {problem} (trainer.step_timeout_s)")
        block = finished_reads.pop().result()
        self._begin(block.following)
        return block

    def _begin(self, start: BlockPosition) -> Future[PromptBlock]:
        if start not in self._reading:
            self._reading[start] = self._reader.submit(self._dataset.read, start)
            # The earliest blocks go, because the prompts in flight move on. Not the requested one,
            # which may be earlier than all.
            while len(self._reading) > self._max_blocks:
                earliest = min(position for position in self._reading if position != start)
                del self._reading[earliest]
                self._orders.pop(earliest, None)
        return self._reading[start]
