"""The hooks that an algorithm may override, for every plan alike.

Invariant: the trainer's steps call the hooks in the order of this class. By default a hook follows
the configuration. A hook gets all that it decides on, so it depends on no other hook; hooks that
compare the groups of a batch get complete batches. Metrics are written into ``self.metrics``.
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING

from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.rollout.types import Group
from skyasync.trainer.context import Metrics, RunContext
from skyasync.trainer.learner import Learner

if TYPE_CHECKING:  # torch is imported when training starts: settings are checked without it
    from skyasync.models.batch import RolloutBatch, ScoredBatch, TrainingBatch


class AlgorithmHooks:
    """``RayPPOTrainer`` inherits it; a mixin that overrides a hook combines with every plan."""

    cfg: Config
    context: RunContext
    learner: Learner

    @property
    def metrics(self) -> Metrics:
        """The metrics of the current step; a hook may add to them."""
        return self.context.phases.metrics

    def postprocess_generator_output(self, groups: list[Group]) -> list[Group]:
        """Change trajectories or their rewards before anything is computed from them.

        Called with a complete batch. If groups are trained or replaced as they come, called with
        the groups that arrive together.
        """
        return groups

    def filter_groups(self, groups: list[Group]) -> list[Group]:
        """Choose which groups are trained: by default those that ``dynamic_sampling`` keeps.

        Groups with rewards that are not finite stay: ``on_nonfinite`` decides about them.
        """
        from skyasync.algorithms.shaping import group_filter

        algorithm = self.cfg.trainer.algorithm
        has_signal = group_filter(algorithm)
        metric = algorithm.dynamic_sampling.metric
        chosen_groups = []
        for group in groups:
            finite = all(map(isfinite, group.rewards))
            if not finite or has_signal(group.metric_values(metric)):
                chosen_groups.append(group)
        return chosen_groups

    def drop_truncated(self, groups: list[Group]) -> list[Group]:
        """Leave out truncated trajectories, if ``truncated_responses=drop``."""
        if self.cfg.trainer.algorithm.truncated_responses != "drop":
            return groups
        remaining_groups = []
        dropped_count = 0
        for group in groups:
            trajectories = [t for t in group.trajectories if t.stop_reason == "stop"]
            dropped_count += len(group.trajectories) - len(trajectories)
            if trajectories:
                remaining_groups.append(replace(group, trajectories=trajectories))
        # Plans that stream call this several times in a step.
        self.metrics["response/dropped"] = self.metrics.get("response/dropped", 0.0) + dropped_count
        return remaining_groups

    async def ask_roles(self, batch: RolloutBatch) -> RolloutBatch:
        """Let a user's models and scorers see a batch before its rewards are shaped.

        ``await self.dispatch.ask("role", "method", batch)``; see ``skyasync.workers.roles``.
        """
        return batch

    def shape_rewards(self, batch: RolloutBatch) -> RolloutBatch:
        """Truncate, penalize, scale, clip and normalise ``batch.rewards``, ``[batch, length]``.

        With ``truncated_responses=mask`` truncated responses leave the loss.
        """
        from skyasync.algorithms.shaping import overlong_filter, shape_rewards

        algorithm = self.cfg.trainer.algorithm
        raw_rewards = batch.rewards
        batch.rewards = shape_rewards(
            algorithm,
            raw_rewards,
            batch.loss_mask,
            truncated=batch.truncated,
            group_ids=batch.group_ids,
            trajectory_ids=batch.trajectory_ids,
        )
        if batch.rewards is not raw_rewards:
            samples = _trajectory_count(batch)
            mean = float(batch.rewards.sum()) / samples
            self.context.phases.mean("reward/shaped_mean", mean, samples)
        if algorithm.truncated_responses == "mask":
            batch.loss_mask = overlong_filter(batch.loss_mask, batch.truncated)
        return batch

    def apply_reward_kl_penalty(self, batch: ScoredBatch) -> ScoredBatch:
        """Subtract the KL penalty from the token rewards, if ``use_kl_in_reward``.

        Raises:
            ValueError: if the batch lacks the log-probabilities that it takes.
        """
        algorithm = self.cfg.trainer.algorithm
        controller = self.learner.kl_controller
        if not algorithm.use_kl_in_reward:
            return batch
        from skyasync.algorithms.kl import penalize_rewards

        proximal = batch.proximal_logprobs
        reference = batch.reference_logprobs
        if proximal is None or reference is None:
            raise ValueError(
                "a KL penalty in the reward takes proximal_logprobs and reference_logprobs"
            )
        batch.rewards, kl = penalize_rewards(
            batch.rewards,
            proximal,
            reference,
            batch.loss_mask,
            coef=controller.value,
            estimator=algorithm.kl_estimator_type,
            bound=algorithm.kl_clamp,
        )
        self.context.phases.mean("reward/kl", float(kl), int(batch.loss_mask.any(1).sum()))
        self.metrics["reward/kl_coef"] = controller.value
        controller.update(float(kl), _trajectory_count(batch))
        return batch

    def compute_advantages_and_returns(self, batch: ScoredBatch) -> ScoredBatch:
        """Compute advantages from ``batch.rewards``, and from the critic's values if there are any.

        Returns:
            A ``TrainingBatch``, or the batch with ``batch.advantages``, ``[batch, length]``.
        """
        from skyasync.algorithms.advantages import compute_advantages
        from skyasync.models.batch import TrainingBatch

        response_lengths = (batch.versions >= 0).sum(1)  # [batch]; other tokens have version -1
        advantages, returns = compute_advantages(
            self.cfg.trainer.algorithm,
            batch.rewards,
            batch.loss_mask,
            batch.group_ids,
            batch.values,
            batch.trajectory_ids,
            response_lengths,
        )
        if batch.values is None:  # no critic learns from the returns
            return batch.to_stage(TrainingBatch, advantages=advantages, returns=None)
        return batch.to_stage(TrainingBatch, advantages=advantages, returns=returns)

    def add_teacher_advantages(self, batch: TrainingBatch) -> TrainingBatch:
        """Add the teacher's part to ``batch.advantages``, if there is one (``trainer.teacher``).

        Raises:
            ValueError: if the batch lacks the policy's log-probabilities, which the teacher's are
                compared with.
        """
        from skyasync.algorithms.kl import teacher_advantages

        if batch.teacher_logprobs is None:
            return batch
        if batch.proximal_logprobs is None:
            raise ValueError(
                "a teacher's log-probabilities are compared with proximal_logprobs, and the batch has none"
            )
        # [batch, length], like the advantages
        distillation, kl = teacher_advantages(
            batch.proximal_logprobs, batch.teacher_logprobs, batch.loss_mask
        )
        batch.advantages = batch.advantages + self.cfg.trainer.teacher.weight * distillation
        self.context.phases.mean("teacher/kl", float(kl), int(batch.loss_mask.sum()))
        return batch


def _trajectory_count(batch: RolloutBatch) -> int:
    if batch.trajectory_ids is None:
        return len(batch)
    return len(batch.trajectory_ids.unique())


def with_advantages(batch: ScoredBatch) -> TrainingBatch:
    """The training batch that the hook returned, or made from its batch with advantages.

    Raises:
        UserError: if the advantages are missing, or have another shape than the loss mask.
    """
    from skyasync.models.batch import TrainingBatch

    # A ``ScoredBatch`` has no such field: a user's hook may have set the attribute.
    advantages = getattr(batch, "advantages", None)
    if advantages is None:
        raise UserError(
            "compute_advantages_and_returns must set batch.advantages, and returned a batch without them"
        )
    if advantages.shape != batch.loss_mask.shape:
        raise UserError(
            f"compute_advantages_and_returns must give each token its advantage, {tuple(batch.loss_mask.shape)}; "
            f"batch.advantages has shape {tuple(advantages.shape)}"
        )
    if isinstance(batch, TrainingBatch):
        return batch
    return batch.to_stage(TrainingBatch)
