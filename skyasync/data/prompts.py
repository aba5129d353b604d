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

ENDLESS = sys.maxsize >> 1  # prompts of a stream whose run ends by its steps alone
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
        self._parts = [
            np.arange(len(dataset))
        ]  # rows of each domain with a share, then those of the others
        shares = [1.0]
        if proportions:
            names = [str(prompt.extras.get("domain") or "") for prompt in dataset]
            self._parts, shares = _parts(names, proportions)
        self._counts = _whole(shares, len(dataset))  # of each part in a pass
        self._slots = lru_cache(maxsize=4)(self._slots_of)
        self._permutation = lru_cache(maxsize=4 * len(self._parts))(self._permutation_of)

    @classmethod
    def of_run(cls, cfg: Config, dataset: Sequence[Prompt]) -> PromptStream:
        """What a run of this configuration trains on, in its order."""
        if cfg.data.sampler != "uniform":
            from skyasync.data.samplers import SAMPLERS, SampledStream

            sampler = SAMPLERS.find(cfg.data.sampler)(cfg)
            return SampledStream(
                cls._all_rows(cfg, dataset), sampler, cfg.trainer.train_batch_size, cfg.trainer.seed
            )
        return cls._all_rows(cfg, dataset)

    @classmethod
    def _all_rows(cls, cfg: Config, dataset: Sequence[Prompt]) -> PromptStream:
        """Every row in each pass."""
        from skyasync.data.stream import BlockStream, StreamedPrompts

        trainer = cfg.trainer
        size = trainer.train_batch_size
        seed = trainer.seed
        if isinstance(dataset, StreamedPrompts):
            total = prompts_of_run(trainer, len(dataset))
            window = (max(trainer.max_staleness, trainer.async_queue_size) + 2) * size
            return BlockStream(dataset, size, seed, total, window, trainer.step_timeout_s)
        _warn_of_repeats(trainer, len(dataset))
        return cls(
            dataset,
            size,
            seed,
            prompts_of_run(trainer, len(dataset)),
            proportions_of(cfg.environment.domains),
        )

    def mark(self, position: int) -> list[int]:
        """Finds this position again in streamed data; empty for data in memory."""
        return []

    def resumed(self, cfg: TrainerConfig, step: int, trained: int) -> None:
        """So many steps and prompts were trained before; batches may have had another size."""
        self.total = prompts_of_run(cfg, self.rows, step, trained)

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

    def steps(self, position: int = 0, trained_early: Collection[int] = ()) -> int:
        """How many batches are left when all before ``position`` and those in ``trained_early`` are
        trained."""
        return max(0, -(-(self.total - position - len(trained_early)) // self._batch_size))

    def cursor(self, position: int = 0, trained_early: Collection[int] = ()) -> PromptCursor:
        """A reader of what is left when all before ``position`` and those in ``trained_early`` are
        trained."""
        return PromptCursor(self, position, trained_early)

    @cached_property
    def digest(self) -> str:
        """Digest of the messages of some rows, without system prompts, which are settings."""
        digest = xxhash.xxh3_64()
        for row in range(0, self.rows, max(1, self.rows // DIGEST_ROWS)):
            messages = [
                message
                for message in self._dataset[row].messages
                if message.get("role") != "system"
            ]
            digest.update(
                json.dumps(
                    messages, sort_keys=True, default=lambda value: type(value).__name__
                ).encode()
            )
        return digest.hexdigest()

    def prompt(self, position: int) -> Prompt:
        epoch, offset = divmod(position, len(self._dataset))
        parts, ranks = self._slots(epoch)
        part = int(parts[offset])
        times, place = divmod(
            epoch * self._counts[part] + int(ranks[offset]), len(self._parts[part])
        )
        prompt = self._dataset[int(self._parts[part][self._permutation(part, times)[place]])]
        return replace(prompt, id=PromptId(times, prompt.id.row))

    def preview(self, position: int) -> Prompt:
        """A prompt of the data; which ones a run takes may depend on its course."""
        return self.prompt(position)

    def observe(
        self, results: Sequence[tuple[Prompt, Sequence[float]]], position: int
    ) -> dict[str, float]:
        """Groups of these prompts have ended with these rewards, and all before ``position`` are
        trained.

        Returns:
            metrics.
        """
        return {}

    def state_dict(self) -> Mapping[str, Any]:
        """What decides which prompts come next besides their position; for checkpoints."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave to a checkpoint."""

    def of_identity(self, identity: PromptId) -> Prompt:
        """A prompt of the stream by its identity."""
        return replace(self._dataset[self._indices[identity.row]], id=identity)

    @cached_property
    def _indices(self) -> dict[int, int]:
        """``id.row`` -> index in the dataset."""
        return {prompt.id.row: index for index, prompt in enumerate(self._dataset)}

    def _slots_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """For each offset in a pass: the part that it belongs to, and the number of earlier offsets
        of this part."""
        parts = np.repeat(np.arange(len(self._parts)), self._counts)
        if len(self._parts) > 1:
            parts = np.random.default_rng((self._seed, epoch, 0)).permutation(parts)
        ranks = np.empty_like(parts)
        for part, count in enumerate(self._counts):
            ranks[parts == part] = np.arange(count)
        return parts, ranks

    def _permutation_of(self, part: int, times: int) -> np.ndarray:
        key = (self._seed, times) if len(self._parts) == 1 else (self._seed, times, part + 1)
        return np.random.default_rng(key).permutation(len(self._parts[part]))


class PromptCursor:
    """A reader of the stream: each prompt that is left is taken once, in order."""

    def __init__(self, stream: PromptStream, position: int, trained_early: Collection[int]) -> None:
        self._stream = stream
        self._left = (p for p in range(position, stream.total) if p not in trained_early)

    def take(self, count: int) -> PromptBatch:
        """The next ``count`` prompts, or as many as there are."""
        positions = tuple(islice(self._left, count))
        return PromptBatch([self._stream.prompt(p) for p in positions], positions)


def prompts_of_run(
    trainer_cfg: TrainerConfig, dataset_size: int, step: int = 0, trained: int = 0
) -> int:
    """How many prompts all epochs have, or as many of them as ``max_training_steps`` allows.

    If rejected prompts are replaced, the number is not known.

    Args:
        step, trained: training steps and prompts before a resume; batches may have had another
            size.
    """
    steps = trainer_cfg.max_training_steps
    size = trainer_cfg.train_batch_size
    epochs = trainer_cfg.epochs
    total = (epochs or (0 if steps else 1)) * dataset_size or ENDLESS
    if not steps or trainer_cfg.algorithm.dynamic_sampling.mode == "refill":
        return total
    return min(total, trained + max(steps - step, 0) * size)


def _warn_of_repeats(trainer_cfg: TrainerConfig, dataset_size: int) -> None:
    """A warning if the data is too short for the steps, or is gone through again."""
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


def _parts(
    names: Sequence[str], proportions: Mapping[str, float]
) -> tuple[list[np.ndarray], list[float]]:
    """The rows of each domain with a share, then those of the others, and their shares."""
    domains = np.array(names)
    parts = [np.flatnonzero(domains == name) for name in proportions]
    shares = list(proportions.values())
    rest = 1.0 - sum(proportions.values())
    others = np.flatnonzero(~np.isin(domains, list(proportions)))
    if len(others):
        parts = [*parts, others]
        shares = [*shares, rest]
    elif abs(rest) > 1e-9:
        raise UserError(
            f"environment.domains.*.proportion sum to {1 - rest:g}, and every row belongs to one of these domains: "
            f"they must sum to 1"
        )
    for name, part, count in zip(
        [*proportions, "the other domains"], parts, _whole(shares, len(names)), strict=False
    ):
        if len(part) == 0 or count == 0:
            raise UserError(
                f"environment.domains: {name} has {len(part)} rows, and its proportion of {len(names)} prompts rounds "
                f"to {count}: raise or lower environment.domains.*.proportion, or remove the rows"
            )
    return parts, shares


def _whole(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers in these proportions that add up to ``total``: largest remainders are rounded
    up."""
    exact = [share * total / sum(shares) for share in shares]
    counts = [int(number) for number in exact]
    by_remainder = sorted(range(len(exact)), key=lambda part: (counts[part] - exact[part], part))
    for part in by_remainder[: total - sum(counts)]:
        counts[part] += 1
    return counts
