"""The frozen model that a KL term compares with.

Invariant: its weights never change; it only answers ``logprobs``.
"""

from __future__ import annotations

from skyasync.config.schema import ModelConfig
from skyasync.workers.base import ModelWorker


class ReferenceWorker(ModelWorker):
    """One rank of the reference: ``trainer.ref.model``, or the policy's starting weights where that has no path."""

    def model_config(self) -> ModelConfig:
        reference = self.cfg.trainer.ref.model
        return reference if reference.path else self.cfg.trainer.policy.model
