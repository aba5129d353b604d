"""Frozen models: the reference of a KL term, a teacher, reward models."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from skyasync.config.schema.models import reward_models
from skyasync.models.backend import LOOPBACK, TOP_K, VALUES, OutputRequest
from skyasync.models.batch import TokenBatch
from skyasync.workers.model_worker import ModelWorker


class ReferenceWorker(ModelWorker):
    """The reference: ``trainer.ref.model``, or the policy's starting weights if that has no
    path."""

    role_name: ClassVar[str] = "reference"


class TeacherWorker(ModelWorker):
    """The model that a policy is distilled from, ``trainer.teacher.model``, in the distribution of
    the sampling."""

    role_name: ClassVar[str] = "teacher"

    def top_logprobs(self, batch: TokenBatch) -> Tensor:
        """The ``trainer.teacher.top_k`` likeliest tokens and then their log-probabilities,
        ``[batch, length, 2 k]``.

        Token ids are exact in float32 below 2**24.
        """
        return self.backend.forward(
            batch, OutputRequest.of(TOP_K, top_k=self.cfg.trainer.teacher.top_k)
        )[TOP_K]


class RewardWorker(ModelWorker):
    """Holds the models of ``trainer.reward``. A score is the head's on the state of a sequence's
    last token."""

    role_name: ClassVar[str] = "reward"

    def setup(self, host: str = LOOPBACK, port: int = 0) -> None:
        for model in reward_models(self.cfg.trainer.reward).values():
            self.add_backend(host, port, path=model.path, dtype=model.dtype)
        self.backend = self.backends[0]

    def scores(self, batch: TokenBatch) -> Tensor:
        """Of each row of tokens: ``[batch]`` of one model, ``[batch, 1, models]`` of several."""
        lengths = batch.attention_mask.sum(1, keepdim=True)
        # Each row gets another token, its only loss token, whose value is that of the state before
        # it.
        last = torch.zeros_like(pad(batch.attention_mask, (0, 1))).scatter(1, lengths, value=True)
        attended = pad(batch.attention_mask, (0, 1)) | last
        longer = TokenBatch(
            pad(batch.tokens, (0, 1)).where(~last, 0), attended, last, batch.group_ids
        )
        scores = [
            b.forward(longer, OutputRequest.of(VALUES))[VALUES].gather(1, lengths)
            for b in self.backends
        ]
        if len(scores) == 1:
            return scores[0].squeeze(1)
        return torch.cat(scores, dim=1)[:, None]
