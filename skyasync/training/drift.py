"""How far the policy that is trained is from the one that sampled, of a whole batch, as metrics.

Invariant: ``gap/...`` compares two computations of the same weights; where the trainer has log-probabilities of others
(behind an update of the same step) there is none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # with torch
    from torch import Tensor

    from skyasync.models.batch import TrainingBatch

log = logging.getLogger(__name__)


def drift_metrics(
    batch: TrainingBatch, step: int, weigh: Callable[[TrainingBatch], Tensor | None] | None, *, exact: bool
) -> dict[str, float]:
    """Also by staleness.

    Args:
        step: the policy's version before the training step.
        weigh: gives the correction's factors.
        exact: the trainer's log-probabilities are of that version, and computed, not taken from the engine.
    """
    from skyasync.algorithms.off_policy import gap_metrics, off_policy_metrics, stuck_ratio

    proximal, behaviour, mask = batch.proximal_logprobs, batch.behaviour_logprobs, batch.loss_mask
    if proximal is None or behaviour[mask].isnan().any():
        return {}
    staleness = step - batch.versions
    weights = weigh(batch) if weigh is not None else None
    metrics = off_policy_metrics(proximal, behaviour, mask, staleness, weights)
    if exact:
        metrics |= gap_metrics(proximal, behaviour, mask, staleness)
    if problem := stuck_ratio(proximal, behaviour, mask, staleness):
        log.warning("step %d: %s", step + 1, problem)
        metrics["warnings/stuck_ratio"] = 1.0
    return metrics
