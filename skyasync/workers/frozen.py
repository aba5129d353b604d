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
    """Holds the reference: ``trainer.ref.model``, or the policy's starting weights."""

    role_name: ClassVar[str] = "reference"


class TeacherWorker(ModelWorker):
    """Holds the model that a policy is distilled from, ``trainer.teacher.model``.

    Its log-probabilities are of the sampled distribution, as the policy's are.
    """

    role_name: ClassVar[str] = "teacher"

    def top_logprobs(self, batch: TokenBatch) -> Tensor:
        """The ``trainer.teacher.top_k`` likeliest tokens, and then their log-probabilities.

        Returns:
            ``[batch, length, 2 k]`` in float32, in which token ids are exact below 2**24.
        """
        request = OutputRequest.of(TOP_K, top_k=self.cfg.trainer.teacher.top_k)
        return self.backend.forward(batch, request)[TOP_K]


class RewardWorker(ModelWorker):
    """Holds the models of ``trainer.reward``.

    A score is the output of the model's head on the state of a sequence's last token.
    """

    role_name: ClassVar[str] = "reward"

    def setup(self, host: str = LOOPBACK, port: int = 0) -> None:
        for model in reward_models(self.cfg.trainer.reward).values():
            self.add_backend(host, port, path=model.path, dtype=model.dtype)
        self.backend = self.backends[0]

    def scores(self, batch: TokenBatch) -> Tensor:
        """The score of each row: ``[batch]`` of one model, ``[batch, 1, models]`` of several."""
        lengths = batch.attention_mask.sum(1, keepdim=True)  # [batch, 1]
        # A row gets another token, its only loss token, whose value is that of the state before it:
        # of the last token. All tensors are [batch, length + 1].
        padded_mask = pad(batch.attention_mask, (0, 1))
        score_mask = torch.zeros_like(padded_mask).scatter(1, lengths, value=True)
        tokens = pad(batch.tokens, (0, 1)).where(~score_mask, 0)
        longer_batch = TokenBatch(tokens, padded_mask | score_mask, score_mask, batch.group_ids)
        scores = []
        for backend in self.backends:
            values = backend.forward(longer_batch, OutputRequest.of(VALUES))[VALUES]
            scores.append(values.gather(1, lengths))  # [batch, 1]
        if len(scores) == 1:
            return scores[0].squeeze(1)
        return torch.cat(scores, dim=1)[:, None]
