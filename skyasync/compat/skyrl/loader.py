"""SkyRL's training data loader over our stream of prompts.

Invariant: one iteration is an epoch of ``len`` batches, and the next goes on behind it; the order is the stream's, a
function of the seed. A resumed run begins behind what has been trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from skyasync.config.domains import proportions_of
from skyasync.config.schema import Config
from skyasync.data.prompts import PromptBatch, PromptCursor, PromptStream
from skyasync.errors import UserError
from skyasync.rollout.types import Prompt
from skyasync.trainer.context import Progress


def with_epochs(cfg: Config, rows: int) -> Config:
    """Settings with a number of epochs, by which SkyRL's loops go: with ours, 0, as many as the steps take."""
    trainer = cfg.trainer
    if trainer.epochs:
        return cfg
    epochs = -(-trainer.max_training_steps // max(1, rows // trainer.train_batch_size))
    return replace(cfg, trainer=replace(trainer, epochs=max(1, epochs)))


class TrainDataLoader:
    """Attributes: ``asked``: uid -> prompt, and where the stream stands behind its batch."""

    def __init__(self, cfg: Config, dataset: Sequence[Prompt], progress: Progress) -> None:
        trainer = cfg.trainer
        if cfg.data.streaming:
            raise UserError("data.streaming=true has no epochs, by which SkyRL's loop goes: set it to false")
        self.batch_size, self._progress = trainer.train_batch_size, progress
        self._steps = max(1, len(dataset) // self.batch_size)
        total = max(trainer.epochs * len(dataset), trainer.epochs * self._steps * self.batch_size)
        shares = proportions_of(cfg.environment.domains)
        self._stream = PromptStream(dataset, self.batch_size, trainer.seed, total, shares)
        self._cursor: PromptCursor | None = None
        self.asked: dict[str, tuple[Prompt, PromptBatch]] = {}

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        if self._cursor is None:
            self._cursor = self._stream.cursor(self._progress.position, self._progress.ahead)
        for _ in range(self._steps):
            batch = self._cursor.take(self.batch_size)
            if not batch.prompts:
                return
            self.asked |= {str(prompt.id): (prompt, batch) for prompt in batch.prompts}
            yield [_row(prompt) for prompt in batch.prompts]

    def state_dict(self) -> dict[str, int]:
        """Where training stands; checkpoints know it without this."""
        return {"position": self._progress.position}

    def forget(self, uids: Sequence[str]) -> None:
        """These have been trained."""
        for uid in uids:
            self.asked.pop(uid, None)


def _row(prompt: Prompt) -> dict[str, Any]:
    told = {"prompt": prompt.messages, "env_class": prompt.env_class, "env_extras": prompt.extras}
    return {**told, "uid": str(prompt.id)}
