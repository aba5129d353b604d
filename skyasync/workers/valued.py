"""One rank of a model that says one number of a token."""

from __future__ import annotations

import torch
from torch import Tensor

from skyasync.workers.base import ModelWorker, put_rows, sharded_afterwards
from skyasync.workers.batch import TokenBatch


class ValueWorker(ModelWorker):
    """Answers ``values``.

    Args:
        args, kwargs: those of :class:`ModelWorker`.
    """

    def values(self, batch: TokenBatch) -> Tensor:
        """Value of the state before each loss token, ``[batch, length]`` on the CPU, zero elsewhere; no gradient."""
        result = torch.zeros(batch.tokens.shape, dtype=torch.float32)
        with torch.no_grad(), sharded_afterwards(self.model):
            for micro in self._micro_batches(batch, self.cfg.trainer.micro_forward_batch_size_per_gpu):
                put_rows(result, micro, self.model(micro.layout.to(self.device)))
        return result
