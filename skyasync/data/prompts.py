"""The training prompts, in an order that depends on the seed alone.

Invariant: the prompt at a position is a pure function of (seed, position). The positions that have
been trained decide what comes next, also in the middle of an epoch and at its end. No prompt is
left out: a batch may extend over the end of an epoch, and the last batch may be smaller.

If domains have shares, each domain passes through all its rows, in an order of its own, before any
row is repeated. In a pass over as many positions as there are rows, each domain has exactly its
share of them, rounded to whole prompts.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any

import numpy as np
import xxhash

from skyasync.config.schema import Config, TrainerConfig
from skyasync.config.schema.environment import proportions_of
from skyasync.errors import UserError
from skyasync.rollout.types import Prompt, PromptId

log = logging.getLogger(__name__)

# Prompts of a stream whose run ends by its steps alone. Half of the largest integer of 64 bits, so
# that sums of positions are such integers too.
ENDLESS = sys.maxsize >> 1
DIGEST_ROWS = 256  # evenly spaced; enough to tell other data, and quick on millions of rows


@dataclass(frozen=True)
class PromptBatch:
    """Prompts of one step, and the position of each in the stream."""

    prompts: list[Prompt]
    positions: tuple[int, ...]


@dataclass(frozen=True)
class CountedPrompts(Sequence[Prompt]):
    """A number of prompts whose text has no meaning; they take no memory."""

    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401  (a number or a slice)
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(self.size))]
        if not 0 <= index < self.size:
            raise IndexError(index)
        return Prompt(PromptId(0, index), [{"role": "user", "content": "."}], "")


class PromptStream:
    """Shuffled passes over a dataset, cut into batches.

    Attributes:
        rows: of the dataset, or of the first block of streamed data.

    Args:
        dataset: prompts whose ``id.row`` is their row; ``id.epoch`` is set here.
        total: prompts of the whole run, over all epochs.
        proportions: domain -> share of the prompts in (0, 1]; the other rows share the rest by
            their number. Without any, each pass is a permutation of all rows.

    Raises:
        UserError: if there are no prompts, a share rounds to no prompt, or the shares do not sum to
            1 and no rows are left for the rest.
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
        self._dataset = dataset
        self._batch_size = batch_size
        self._seed = seed
        self.total = total
        self.rows = len(dataset)
        # Rows of each domain with a share, then those of the others.
        self._domain_rows = [np.arange(len(dataset))]
        shares = [1.0]
        if proportions:
            names = [str(prompt.extras.get("domain") or "") for prompt in dataset]
            self._domain_rows, shares = _rows_by_domain(names, proportions)
        self._counts = _rounded_counts(shares, len(dataset))  # of each domain in a pass
        # Prompts in flight are of a few passes.
        self._slots = lru_cache(maxsize=4)(self._slots_of)
        self._permutation = lru_cache(maxsize=4 * len(self._domain_rows))(self._permutation_of)

    @classmethod
    def of_run(cls, cfg: Config, dataset: Sequence[Prompt]) -> PromptStream:
        """The prompts that a run of this configuration trains on, in its order."""
        if cfg.data.sampler == "uniform":
            return cls._all_rows(cfg, dataset)
        from skyasync.data.samplers import SAMPLERS, SampledStream

        sampler = SAMPLERS.find(cfg.data.sampler)(cfg)
        stream = cls._all_rows(cfg, dataset)
        return SampledStream(stream, sampler, cfg.trainer.train_batch_size, cfg.trainer.seed)

    @classmethod
    def _all_rows(cls, cfg: Config, dataset: Sequence[Prompt]) -> PromptStream:
        """The stream with all rows in each pass."""
        from skyasync.data.stream import BlockStream, StreamedPrompts

        trainer = cfg.trainer
        size = trainer.train_batch_size
        seed = trainer.seed
        total = prompts_of_run(trainer, len(dataset))
        if isinstance(dataset, StreamedPrompts):
            # Batches in flight: the stale ones or the queue, the one in training and the next.
            window = (max(trainer.max_staleness, trainer.async_queue_size) + 2) * size
            return BlockStream(dataset, size, seed, total, window, trainer.step_timeout_s)
        _warn_of_repeats(trainer, len(dataset))
        return cls(dataset, size, seed, total, proportions_of(cfg.environment.domains))

    def mark(self, position: int) -> list[int]:
        """The mark of a position, for ``seek`` in streamed data; empty for data in memory."""
        return []

    def resumed(self, cfg: TrainerConfig, step: int, trained: int) -> None:
        """Set the total after so many trained steps and prompts, perhaps of another batch size."""
        self.total = prompts_of_run(cfg, self.rows, step, trained)

    def seek(self, mark: Sequence[int]) -> None:
        """Continue from the position of a mark.

        Raises:
            UserError: if the mark is of a stream with another order.
        """
        if mark:
            raise UserError(
                "the checkpoint was saved with data.streaming=true, which orders prompts differently: set "
                "data.streaming=true, or start from scratch with trainer.resume_mode=none"
            )

    def steps(self, position: int = 0, trained_early: Collection[int] = ()) -> int:
        """The number of batches after those that are trained.

        Args:
            position: all prompts before it are trained.
            trained_early: positions from there on that are trained too.
        """
        remaining = self.total - position - len(trained_early)
        return max(0, -(-remaining // self._batch_size))  # rounded up

    def cursor(self, position: int = 0, trained_early: Collection[int] = ()) -> PromptCursor:
        """A reader of the prompts that are not trained; arguments as for ``steps``."""
        return PromptCursor(self, position, trained_early)

    @cached_property
    def digest(self) -> str:
        """Digest of the messages of some rows."""
        digest = xxhash.xxh3_64()
        for row in range(0, self.rows, max(1, self.rows // DIGEST_ROWS)):
            messages = []
            for message in self._dataset[row].messages:
                if message.get("role") != "system":  # a setting, which may change
                    messages.append(message)
            # Images have no JSON: the type's name stands for them.
            text = json.dumps(messages, sort_keys=True, default=lambda value: type(value).__name__)
            digest.update(text.encode())
        return digest.hexdigest()

    def prompt(self, position: int) -> Prompt:
        """The prompt at a position of the stream."""
        epoch, offset = divmod(position, len(self._dataset))
        domains, ranks = self._slots(epoch)
        domain = int(domains[offset])
        rows = self._domain_rows[domain]
        # Each domain has passes of its own: its prompts so far, counted through all epochs.
        number = epoch * self._counts[domain] + int(ranks[offset])
        domain_epoch, domain_offset = divmod(number, len(rows))
        row = rows[self._permutation(domain, domain_epoch)[domain_offset]]
        prompt = self._dataset[int(row)]
        return replace(prompt, id=PromptId(domain_epoch, prompt.id.row))

    def preview(self, position: int) -> Prompt:
        """A prompt of the data; a run may take another one at this position."""
        return self.prompt(position)

    def observe(
        self, results: Sequence[tuple[Prompt, Sequence[float]]], position: int
    ) -> dict[str, float]:
        """Note the rewards of groups that have ended.

        Args:
            results: prompts and the rewards of their groups.
            position: all prompts before it are trained.

        Returns:
            metrics.
        """
        return {}

    def state_dict(self) -> Mapping[str, Any]:
        """The state for checkpoints by which the next prompts are chosen, besides the position."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the ``state_dict`` of a checkpoint."""

    def of_identity(self, identity: PromptId) -> Prompt:
        """A prompt of the stream by its identity."""
        return replace(self._dataset[self._indices[identity.row]], id=identity)

    @cached_property
    def _indices(self) -> dict[int, int]:
        """``id.row`` -> index in the dataset."""
        return {prompt.id.row: index for index, prompt in enumerate(self._dataset)}

    def _slots_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The domain of each offset in a pass, and its rank among the offsets of the domain.

        Returns:
            two arrays, ``[rows]``.
        """
        domains = np.repeat(np.arange(len(self._domain_rows)), self._counts)
        if len(self._domain_rows) > 1:
            domains = np.random.default_rng((self._seed, epoch, 0)).permutation(domains)
        ranks = np.empty_like(domains)
        for domain, count in enumerate(self._counts):
            ranks[domains == domain] = np.arange(count)
        return domains, ranks

    def _permutation_of(self, domain: int, epoch: int) -> np.ndarray:
        key: tuple[int, ...] = (self._seed, epoch)
        if len(self._domain_rows) > 1:
            key = (*key, domain + 1)  # 0 is the key of ``_slots_of``
        return np.random.default_rng(key).permutation(len(self._domain_rows[domain]))


class PromptCursor:
    """A reader of the stream: each prompt that is left is taken once, in order."""

    def __init__(self, stream: PromptStream, position: int, trained_early: Collection[int]) -> None:
        self._stream = stream
        # A generator, because a stream may be endless.
        positions = range(position, stream.total)
        self._remaining = (number for number in positions if number not in trained_early)

    def take(self, count: int) -> PromptBatch:
        """The next ``count`` prompts, or as many as there are."""
        positions = tuple(islice(self._remaining, count))
        prompts = [self._stream.prompt(position) for position in positions]
        return PromptBatch(prompts, positions)


def prompts_of_run(
    trainer_cfg: TrainerConfig, dataset_size: int, step: int = 0, trained: int = 0
) -> int:
    """The number of prompts of all epochs, or as many of them as ``max_training_steps`` allows.

    Args:
        step, trained: training steps and prompts before a resume; batches may have had another
            size.
    """
    steps = trainer_cfg.max_training_steps
    epochs = trainer_cfg.epochs
    if not epochs and not steps:
        epochs = 1
    total = epochs * dataset_size or ENDLESS
    # If rejected prompts are replaced, the number of a step's prompts is not known.
    if not steps or trainer_cfg.algorithm.dynamic_sampling.mode == "refill":
        return total
    return min(total, trained + max(steps - step, 0) * trainer_cfg.train_batch_size)


def _warn_of_repeats(trainer_cfg: TrainerConfig, dataset_size: int) -> None:
    """Warn if the data is too short for the steps, or is repeated."""
    steps = trainer_cfg.max_training_steps
    size = trainer_cfg.train_batch_size
    epochs = trainer_cfg.epochs
    total = epochs * dataset_size
    if 0 < total <= (steps - 1) * size:
        message = (
            "the data ends before trainer.max_training_steps=%d: trainer.epochs=%d of %d prompts are %d steps of %d "
            "(trainer.epochs=0 goes through it as often as the steps take)"
        )
        log.warning(message, steps, epochs, dataset_size, -(-total // size), size)
    elif not total and steps * size > dataset_size:
        message = "trainer.max_training_steps=%d goes %.1f times through the %d training prompts"
        log.warning(message, steps, steps * size / dataset_size, dataset_size)


def _rows_by_domain(
    names: Sequence[str], proportions: Mapping[str, float]
) -> tuple[list[np.ndarray], list[float]]:
    """The rows of each domain with a share, then those of the others, and their shares.

    Args:
        names: of the rows' domains.
    """
    domains = np.array(names)
    domain_rows = [np.flatnonzero(domains == name) for name in proportions]
    shares = list(proportions.values())
    remainder = 1.0 - sum(shares)
    other_rows = np.flatnonzero(~np.isin(domains, list(proportions)))
    if len(other_rows):
        domain_rows.append(other_rows)
        shares.append(remainder)
    elif abs(remainder) > 1e-9:  # sums of decimal shares are not exact
        raise UserError(
            f"environment.domains.*.proportion sum to {1 - remainder:g}, and every row belongs to one of these domains: "
            f"they must sum to 1"
        )
    titles = [*proportions, "the other domains"]
    counts = _rounded_counts(shares, len(names))
    # Not strict: there may be no other domains.
    for title, rows, count in zip(titles, domain_rows, counts, strict=False):
        if len(rows) == 0 or count == 0:
            raise UserError(
                f"environment.domains: {title} has {len(rows)} rows, and its proportion of {len(names)} prompts rounds "
                f"to {count}: raise or lower environment.domains.*.proportion, or remove the rows"
            )
    return domain_rows, shares


def _rounded_counts(shares: Sequence[float], total: int) -> list[int]:
    """Integers in these proportions that add up to ``total``: largest remainders are rounded up."""
    exact = [share * total / sum(shares) for share in shares]
    counts = [int(number) for number in exact]
    # Negative, so that the largest come first; equal ones in their order.
    remainders = [count - number for count, number in zip(counts, exact, strict=True)]
    largest = sorted(range(len(shares)), key=remainders.__getitem__)
    for index in largest[: total - sum(counts)]:
        counts[index] += 1
    return counts
