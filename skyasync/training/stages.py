"""From one stage of a batch to the next, where a hook of the user's may have had its hand in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyasync.errors import UserError

if TYPE_CHECKING:
    from skyasync.models.batch import RolloutBatch, ScoredBatch, TrainingBatch, UpdateBatch


def check_experts(batch: RolloutBatch) -> None:
    """Raises ``UserError`` unless the experts are known of every token that a loss token follows."""
    from skyasync.models.router_replay import unknown_expert

    experts = batch.routed_experts
    if experts is None:
        lacking = int(batch.loss_mask.sum())
    else:
        lacking = int((batch.loss_mask[:, 1:] & (experts[:, :-1, 0, 0] == unknown_expert(experts.dtype))).sum())
    if lacking:
        raise UserError(
            f"trainer.policy.router_replay=R3 replays the experts that the engine chose, and of {lacking} generated "
            f"tokens they are not known: trajectories must be the generator's own, not made of lists; else set "
            f"trainer.policy.router_replay=none"
        )


def with_advantages(batch: ScoredBatch) -> TrainingBatch:
    """What the hook returned: it may have made the next stage, or set ``batch.advantages`` on what it was given."""
    from skyasync.models.batch import TrainingBatch

    if isinstance(batch, TrainingBatch):
        return batch
    if not hasattr(batch, "advantages"):
        raise UserError("compute_advantages_and_returns must set batch.advantages, and returned a batch without them")
    return batch.to_stage(TrainingBatch)


def joined(parts: list[UpdateBatch]) -> UpdateBatch:
    """Batches one below the other."""
    from skyasync.models.batch import UpdateBatch

    return parts[0] if len(parts) == 1 else UpdateBatch.concatenate(parts)
