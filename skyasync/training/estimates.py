"""From groups to advantages: what each algorithm hook does unless it is overridden.

Invariant: everything here sees whole groups, and what the configuration asks of whole batches sees whole batches.
Functions of their arguments alone; metrics that they find are written into the mapping they are given.
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING

from skyasync.config.algorithm import AlgorithmConfig
from skyasync.config.schema import TeacherConfig
from skyasync.rollout.types import Group

if TYPE_CHECKING:  # torch is imported when training starts, so that a wrong setting is refused at once
    from skyasync.algorithms.kl import AdaptiveKLController, FixedKLController
    from skyasync.models.batch import RolloutBatch, ScoredBatch, TrainingBatch
    from skyasync.training.phases import Metrics


def filter_groups(algorithm: AlgorithmConfig, groups: list[Group]) -> list[Group]:
    """Those that ``dynamic_sampling`` keeps; rewards that are not finite are no matter of taste (``on_nonfinite``)."""
    from skyasync.algorithms.filters import group_filter

    keep, metric = group_filter(algorithm), algorithm.dynamic_sampling.metric
    return [g for g in groups if not all(map(isfinite, g.rewards)) or keep(g.judged_by(metric))]


def drop_truncated(algorithm: AlgorithmConfig, groups: list[Group], metrics: Metrics) -> list[Group]:
    """The groups without trajectories that did not end by themselves, if ``truncated_responses=drop``."""
    if algorithm.truncated_responses != "drop":
        return groups
    kept = [replace(g, trajectories=[t for t in g.trajectories if t.stop_reason == "stop"]) for g in groups]
    dropped = sum(len(group.trajectories) for group in groups) - sum(len(group.trajectories) for group in kept)
    metrics["response/dropped"] = metrics.get("response/dropped", 0.0) + dropped
    return [group for group in kept if group.trajectories]


def shape_rewards(algorithm: AlgorithmConfig, batch: RolloutBatch, metrics: Metrics) -> RolloutBatch:
    """Truncation, length penalty, scale, clip, normalisation; truncated responses leave the loss, if asked for."""
    from skyasync.algorithms.shaping import overlong_filter, shape_rewards

    before = batch.rewards
    batch.rewards = shape_rewards(
        algorithm, before, batch.loss_mask, truncated=batch.truncated, group_ids=batch.group_ids,
        trajectory_ids=batch.trajectory_ids,
    )  # fmt: skip
    if batch.rewards is not before:
        rows = len(batch) if batch.trajectory_ids is None else len(batch.trajectory_ids.unique())
        metrics["reward/shaped_mean"] = float(batch.rewards.sum()) / rows
    if algorithm.truncated_responses == "mask":
        batch.loss_mask = overlong_filter(batch.loss_mask, batch.truncated)
    return batch


def penalize_rewards(
    algorithm: AlgorithmConfig,
    controller: FixedKLController | AdaptiveKLController,
    batch: ScoredBatch,
    metrics: Metrics,
) -> ScoredBatch:
    """Subtract the KL penalty from the token rewards, if ``use_kl_in_reward``.

    Raises:
        ValueError: if the batch lacks the log-probabilities that it takes.
    """
    if not algorithm.use_kl_in_reward:
        return batch
    from skyasync.algorithms.kl import penalize_rewards

    proximal, reference = batch.proximal_logprobs, batch.reference_logprobs
    if proximal is None or reference is None:
        raise ValueError("a KL penalty in the reward takes proximal_logprobs and reference_logprobs")
    batch.rewards, kl = penalize_rewards(
        batch.rewards, proximal, reference, batch.loss_mask,
        coef=controller.value, estimator=algorithm.kl_estimator_type, bound=algorithm.kl_clamp,
    )  # fmt: skip
    metrics |= {"reward/kl": float(kl), "reward/kl_coef": controller.value}
    controller.update(float(kl), len(batch))
    return batch


def teach(settings: TeacherConfig, batch: TrainingBatch, metrics: Metrics) -> TrainingBatch:
    """Add the teacher's part to the advantages, where there is one.

    Raises:
        ValueError: if the batch lacks the policy's log-probabilities, which the teacher's are compared with.
    """
    from skyasync.algorithms.distillation import teacher_advantages

    if batch.teacher_logprobs is None:
        return batch
    if batch.proximal_logprobs is None:
        raise ValueError("a teacher's log-probabilities are compared with proximal_logprobs, and the batch has none")
    taught, kl = teacher_advantages(batch.proximal_logprobs, batch.teacher_logprobs, batch.loss_mask)
    batch.advantages = batch.advantages + settings.weight * taught
    metrics["teacher/kl"] = float(kl)
    return batch


def advantages(algorithm: AlgorithmConfig, batch: ScoredBatch) -> TrainingBatch:
    """The batch with advantages and returns, which are made of ``batch.rewards``, and of the critic's values."""
    from skyasync.algorithms.advantages import compute_advantages
    from skyasync.models.batch import TrainingBatch

    found, returns = compute_advantages(
        algorithm, batch.rewards, batch.loss_mask, batch.group_ids, batch.values, batch.trajectory_ids
    )
    return batch.to_stage(TrainingBatch, advantages=found, returns=None if batch.values is None else returns)
