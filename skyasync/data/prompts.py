"""The training prompts, in an order that depends on the seed alone.

Invariant: the prompt at a position is a pure function of (seed, position), so the positions that have been trained
decide what comes next, also in the middle of an epoch and at its end. No prompt is left out: a batch may extend over
the end of an epoch, and the last batch may be smaller.

If domains have shares, each domain passes through all its rows, in an order of its own, before any row is repeated. In
a pass over as many positions as there are rows, each domain has exactly its share of them, rounded to whole prompts.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice

import numpy as np
import xxhash

from skyasync.config.schema import Config, TrainerConfig
from skyasync.config.schema.environment import proportions_of
from skyasync.errors import UserError
from skyasync.rollout.types import Prompt, PromptId

log = logging.getLogger(__name__)

ENDLESS = sys.maxsize >> 1  # prompts of a stream whose run ends by its steps alone
DIGEST_ROWS = 256  # evenly spaced; enough to tell other data, and quick on millions of rows


@dataclass(frozen=True)
class PromptBatch:
    """Prompts of one step. After it all positions before ``position`` are done, and those in ``ahead``."""

    prompts: list[Prompt]
    position: int
    ahead: frozenset[int] = frozenset()


class PromptStream:
    """Shuffled passes over a dataset, cut into batches.

    Args:
        dataset: prompts whose ``id.row`` is their row; ``id.epoch`` is set here.
        total: prompts of the whole run, over all epochs.
        proportions: domain -> share of the prompts; see ``PromptOrder``.
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
        self._order = PromptOrder(dataset, seed, proportions)

    @classmethod
    def of_run(cls, cfg: Config, dataset: Sequence[Prompt]) -> PromptStream:
        """What a run of this configuration trains on, in its order."""
        from skyasync.data.stream import BlockStream, StreamedPrompts

        if isinstance(dataset, StreamedPrompts):
            return BlockStream.of(cfg, dataset)
        total, proportions = prompts_of_run(cfg.trainer, len(dataset)), proportions_of(cfg.environment.domains)
        return cls(dataset, cfg.trainer.train_batch_size, cfg.trainer.seed, total, proportions)

    def mark(self, position: int) -> list[int]:
        """Finds this position again in streamed data; empty for data in memory."""
        return []

    def go_on(self, mark: Sequence[int]) -> None:
        """Continue from the position of a mark.

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
        """Of the dataset, or of the first block of streamed data."""
        return len(self._dataset)

    def steps(self, position: int = 0, ahead: Collection[int] = ()) -> int:
        """How many batches are left when all before ``position`` and those in ``ahead`` are done."""
        return max(0, -(-(self.total - position - len(ahead)) // self._batch_size))

    def cursor(self, position: int = 0, ahead: Collection[int] = ()) -> PromptCursor:
        """A reader of what is left when all before ``position`` and those in ``ahead`` are done."""
        return PromptCursor(self, position, ahead)

    def batches(self, position: int = 0, ahead: Collection[int] = ()) -> Iterator[PromptBatch]:
        """The batches of what is left when all before ``position`` and those in ``ahead`` are done."""
        cursor = self.cursor(position, ahead)
        while (batch := cursor.take(self._batch_size)).prompts:
            yield batch

    @cached_property
    def digest(self) -> str:
        """Of the messages of some rows, wherever they come from; system prompts are settings and left out."""
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
        """A prompt of the stream by its identity."""
        row = self._dataset[self._indices[identity.row]]
        return Prompt(identity, row.messages, row.env_class, row.extras)

    @cached_property
    def _indices(self) -> dict[int, int]:
        """``id.row`` -> index in the dataset."""
        return {prompt.id.row: index for index, prompt in enumerate(self._dataset)}


class PromptCursor:
    """A reader of the stream: each prompt that is left is taken once, in order."""

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

    If rejected prompts are replaced, the number is not known. A warning says if the data is too short for the steps.
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


class PromptOrder:
    """Positions to (pass, index in the data set).

    Args:
        proportions: domain -> share in (0, 1]; the other rows share the rest by their number. Empty: each pass
            is a permutation of all rows.

    Raises:
        UserError: if a share rounds to no prompt, or the shares do not sum to 1 and no rows are left for the rest.
    """

    def __init__(self, dataset: Sequence[Prompt], seed: int, proportions: Mapping[str, float] | None = None) -> None:
        self._seed, self._size = seed, len(dataset)
        self._parts = [np.arange(self._size)]
        shares = [1.0]
        if proportions:
            names = [str(prompt.extras.get("domain") or "") for prompt in dataset]
            self._parts, shares = _parts(names, proportions)
        self._counts = _whole(shares, self._size)
        self._pass_order = lru_cache(maxsize=4 * len(self._parts))(self._permutation)
        self._slots = lru_cache(maxsize=4)(self._slots_of)

    def at(self, position: int) -> tuple[int, int]:
        epoch, offset = divmod(position, self._size)
        part, rank = self._slots(epoch)
        mine = int(part[offset])
        times, place = divmod(epoch * self._counts[mine] + int(rank[offset]), len(self._parts[mine]))
        return times, int(self._parts[mine][self._pass_order(mine, times)[place]])

    def _slots_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """For each offset in a pass: which part's turn it is, and how often it has been before in this pass."""
        part = np.repeat(np.arange(len(self._parts)), self._counts)
        if len(self._parts) > 1:
            part = np.random.default_rng((self._seed, epoch, 0)).permutation(part)
        rank = np.empty_like(part)
        for mine in range(len(self._parts)):
            rank[part == mine] = np.arange(self._counts[mine])
        return part, rank

    def _permutation(self, part: int, times: int) -> np.ndarray:
        key = (self._seed, times) if len(self._parts) == 1 else (self._seed, times, part + 1)
        return np.random.default_rng(key).permutation(len(self._parts[part]))


def _parts(names: Sequence[str], proportions: Mapping[str, float]) -> tuple[list[np.ndarray], list[float]]:
    """The rows of each domain with a share, then those of the others, and their shares."""
    domains = np.array(names)
    parts = [np.flatnonzero(domains == name) for name in proportions]
    shares, rest = list(proportions.values()), 1.0 - sum(proportions.values())
    others = np.flatnonzero(~np.isin(domains, list(proportions)))
    if len(others):
        parts, shares = [*parts, others], [*shares, rest]
    elif abs(rest) > 1e-9:
        raise UserError(
            f"environment.domains.*.proportion sum to {1 - rest:g}, and every row belongs to one of these domains: "
            f"they must sum to 1"
        )
    for name, part, count in zip([*proportions, "the other domains"], parts, _whole(shares, len(names)), strict=False):
        if len(part) == 0 or count == 0:
            raise UserError(
                f"environment.domains: {name} has {len(part)} rows, and its proportion of {len(names)} prompts rounds "
                f"to {count}: raise or lower environment.domains.*.proportion, or remove the rows"
            )
    return parts, shares


def _whole(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers in these proportions that add up to ``total``: largest remainders are rounded up."""
    exact = [share * total / sum(shares) for share in shares]
    counts = [int(number) for number in exact]
    behind = sorted(range(len(exact)), key=lambda part: (counts[part] - exact[part], part))
    for part in behind[: total - sum(counts)]:
        counts[part] += 1
    return counts
