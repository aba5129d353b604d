"""The learning rate as a function of the optimizer step alone, so that a resumed run needs no state for it."""

from __future__ import annotations

import math

from skyasync.config.schema import OptimizerConfig
from skyasync.errors import UserError


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Learning rate of optimizer step ``step`` (from 0).

    Linear warm-up over ``num_warmup_steps`` (the first step already learns), then constant, or decaying to zero
    at ``total_steps``.

    Raises:
        UserError: for a decaying schedule without a known end.
    """
    warmup = config.num_warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.scheduler == "constant":
        return config.lr
    if total_steps <= 0:
        raise UserError(f"scheduler={config.scheduler} needs a known number of steps: set trainer.max_training_steps")
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if config.scheduler == "linear":
        return config.lr * (1.0 - progress)
    return config.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
