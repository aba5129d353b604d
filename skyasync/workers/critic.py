"""One rank of the critic: what it says an episode is worth, and how it learns from what came of it."""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor

from skyasync.algorithms.losses.value import clipped_value_loss
from skyasync.workers.batch import UpdateBatch
from skyasync.workers.packing import MicroBatch
from skyasync.workers.totals import Totals
from skyasync.workers.trained import TrainedWorker
from skyasync.workers.valued import ValueWorker


class CriticWorker(ValueWorker, TrainedWorker):
    """Holds the critic: ``trainer.critic.model``, or the policy's starting weights, under a head of one output.

    Args:
        args, kwargs: those of :class:`TrainedWorker`.
    """

    role_name: ClassVar[str] = "critic"

    def forward_backward(self, batch: UpdateBatch) -> Tensor | None:
        if batch.values is None or batch.returns is None:
            raise ValueError("a critic learns from values and returns, and the batch has none")
        return super().forward_backward(batch)

    def _backward(self, micro: MicroBatch[UpdateBatch], totals: Totals) -> Tensor:
        """Returns the current values, ``[rows, length]``."""
        batch = micro.batch
        assert batch.values is not None and batch.returns is not None
        values: Tensor = self.model(micro.layout.to(self.device))
        mask = self._here(batch.loss_mask)
        token_loss, maps = clipped_value_loss(
            values, self._here(batch.values), self._here(batch.returns), clip=self.settings.value_clip or math.inf
        )
        # Where there is no loss token the loss has no meaning, and may be anything.
        weights = self._here(batch.loss_weights).to(token_loss.dtype)
        loss = (weights * token_loss.where(mask, 0.0)).sum()
        loss.backward()
        totals.add(loss, mask, {"clip_frac": maps["value_clip_fraction"].double()})
        return values.detach()
