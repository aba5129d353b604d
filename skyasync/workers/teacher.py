"""The model that a policy is distilled from.

Invariant: its weights never change; it only answers of the distribution that the policy is sampled by (the same
temperature, the same filters).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from skyasync.workers.base import ModelWorker, put_rows, sharded_afterwards
from skyasync.workers.batch import TokenBatch


class TeacherWorker(ModelWorker):
    """One rank of the teacher, ``trainer.teacher.model``."""

    role_name: ClassVar[str] = "teacher"

    def top_logprobs(self, batch: TokenBatch) -> Tensor:
        """Before each loss token, the ``trainer.teacher.top_k`` tokens that it finds likeliest, and their
        log-probabilities behind them: ``[batch, length, 2 k]`` on the CPU, zero elsewhere.

        Tokens are exact in float32 below 2**24.
        """
        k = min(self.cfg.trainer.teacher.top_k, self.model.model.config.get_text_config().vocab_size)
        result = torch.zeros(*batch.tokens.shape, 2 * k)
        with torch.no_grad(), sharded_afterwards(self.model):
            for micro in self._micro_batches(batch, self.cfg.trainer.micro_forward_batch_size_per_gpu):
                put_rows(result, micro, torch.cat(self.model(micro.layout.to(self.device), likeliest=k), -1))
        return result
