"""The learning rate of an optimizer step, a pure function of its number.

Invariant: warm-up and what follows are of the run's own steps, so a resumed run goes on where it was. The schedules
behind the warm-up are those of transformers, by their names (``SCHEDULES``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from skyasync.config.schema import OptimizerConfig
from skyasync.errors import UserError


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Learning rate of optimizer step ``step`` (from 0).

    Linear warm-up over ``num_warmup_steps``, or ``warmup_ratio`` of all steps (the first step already learns, by
    ``warmup_lr_rate`` of the rate where the schedule is told one), then what ``scheduler`` says.

    Raises:
        UserError: for a schedule that needs a known end, and has none.
    """
    ends = config.scheduler not in ("constant", "constant_with_warmup", "inverse_sqrt") or config.warmup_ratio > 0
    if ends and total_steps <= 0:
        raise UserError(f"scheduler={config.scheduler} needs a known number of steps: set trainer.max_training_steps")
    warmup = config.num_warmup_steps or math.ceil(config.warmup_ratio * total_steps)
    if step < warmup and "warmup_lr_rate" not in config.scheduler_kwargs:
        return config.lr * (step + 1) / warmup
    if config.scheduler in ("constant", "constant_with_warmup"):
        return config.lr
    if config.scheduler in ("linear", "cosine") and not config.scheduler_kwargs:
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        fall = 1.0 - progress if config.scheduler == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return config.lr * fall
    options = tuple(sorted(config.scheduler_kwargs.items()))
    return config.lr * _of_transformers(config.scheduler, config.lr, warmup, total_steps, options)(step)


@lru_cache(maxsize=16)
def _of_transformers(
    name: str, lr: float, warmup: int, total_steps: int, options: tuple[tuple[str, object], ...]
) -> Callable[[int], float]:
    """Step -> share of the peak rate. Their schedulers drive an optimizer; this one has nothing to train."""
    import torch
    from torch.optim import SGD
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import get_scheduler

    nothing = SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    found = get_scheduler(name, nothing, warmup, total_steps, scheduler_specific_kwargs=dict(options))
    assert isinstance(found, LambdaLR)
    share: Callable[[int], float] = found.lr_lambdas[0]
    return share
