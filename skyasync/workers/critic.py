"""The critic: the value of the state before each token, learnt from the returns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from skyasync.algorithms.values import clipped_value_loss
from skyasync.config.schema import CriticConfig
from skyasync.models.backend import MODEL, VALUES, LossFn, LossTerm, OutputRequest
from skyasync.models.batch import TokenBatch, UpdateBatch
from skyasync.workers.model_worker import ModelWorker


class ValueLoss(LossFn):
    """Clipped squared error of values and returns.

    Args:
        part: of the model that learns: a separate critic, or a head on the policy's layers.
        gradient: fraction of the gradient that flows from the head to the layers.
    """

    def __init__(self, settings: CriticConfig, part: str = MODEL, gradient: float = 1.0) -> None:
        self._clip = settings.value_clip or math.inf
        self._part = part
        self._gradient = gradient

    def request(self, batch: UpdateBatch) -> OutputRequest:
        if batch.values is None or batch.returns is None:
            raise ValueError("a critic learns from values and returns, and the batch has none")
        return OutputRequest.of(VALUES, value_gradient=self._gradient)

    def __call__(self, outputs: Mapping[str, Tensor], batch: UpdateBatch) -> dict[str, LossTerm]:
        assert batch.values is not None and batch.returns is not None
        # [batch, length], like the values and the returns
        token_loss, maps = clipped_value_loss(
            outputs[VALUES], batch.values, batch.returns, clip=self._clip
        )
        # Beyond the loss tokens the loss has no meaning, and may be NaN.
        masked_loss = token_loss.where(batch.loss_mask, 0.0)
        loss = (batch.loss_weights.to(token_loss.dtype) * masked_loss).sum()
        clipped = maps["value_clip_fraction"].double()
        return {self._part: LossTerm(loss, batch.loss_mask, {"clip_frac": clipped})}


class CriticWorker(ModelWorker):
    """Holds the critic: ``trainer.critic.model``, or the policy's starting weights, with a head."""

    role_name: ClassVar[str] = "critic"

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **kwargs)
        self.loss = ValueLoss(self.cfg.trainer.critic)

    def values(self, batch: TokenBatch) -> Tensor:
        """Value of the state before each loss token, ``[batch, length]``."""
        return self.backend.forward(batch, OutputRequest.of(VALUES))[VALUES]
