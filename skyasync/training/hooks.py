"""What an algorithm may override, for every plan alike.

Invariant: each hook does by itself what the configuration says, is called by the trainer's steps in the order in which
they stand here, and is handed all that it decides on: a hook of one's own needs to know no other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyasync.config.schema import Config
from skyasync.rollout.types import Group
from skyasync.training import estimates
from skyasync.training.views import Views

if TYPE_CHECKING:  # torch is imported when training starts, so that a wrong setting is refused at once
    from skyasync.models.batch import RolloutBatch, ScoredBatch, TrainingBatch


class AlgorithmHooks(Views):
    """``RayPPOTrainer`` inherits it; a mixin that overrides one combines with every plan."""

    cfg: Config

    def postprocess_generator_output(self, groups: list[Group]) -> list[Group]:
        """Change trajectories or their rewards before anything is computed from them.

        Called with a whole batch, or, where groups are trained or replaced as they come, with those that arrive
        together.
        """
        return groups

    def filter_groups(self, groups: list[Group]) -> list[Group]:
        """Choose which groups are trained: by default those that ``dynamic_sampling`` keeps."""
        return estimates.filter_groups(self.cfg.trainer.algorithm, groups)

    def drop_truncated(self, groups: list[Group]) -> list[Group]:
        """Leave out trajectories that did not end by themselves, if ``truncated_responses=drop``."""
        return estimates.drop_truncated(self.cfg.trainer.algorithm, groups, self.metrics)

    async def ask_roles(self, batch: RolloutBatch) -> RolloutBatch:
        """Let models and scorers of one's own look at a batch, before its rewards are shaped.

        ``await self.dispatch.ask("role", "method", batch)``; see ``skyasync.workers.roles``.
        """
        return batch

    def shape_rewards(self, batch: RolloutBatch) -> RolloutBatch:
        """Truncation, length penalty, scale, clip, normalisation of ``batch.rewards``."""
        return estimates.shape_rewards(self.cfg.trainer.algorithm, batch, self.metrics)

    def apply_reward_kl_penalty(self, batch: ScoredBatch) -> ScoredBatch:
        """Subtract the KL penalty from the token rewards, if ``use_kl_in_reward``."""
        algorithm, controller = self.cfg.trainer.algorithm, self.learner.kl_controller
        return estimates.penalize_rewards(algorithm, controller, batch, self.metrics)

    def compute_advantages_and_returns(self, batch: ScoredBatch) -> ScoredBatch:
        """Make advantages of ``batch.rewards``: a ``TrainingBatch``, or the batch with ``batch.advantages`` set."""
        return estimates.advantages(self.cfg.trainer.algorithm, batch)

    def add_teacher_advantages(self, batch: TrainingBatch) -> TrainingBatch:
        """Add what a teacher says of each token to ``batch.advantages``, if there is one (``trainer.teacher``)."""
        return estimates.teach(self.cfg.trainer.teacher, batch, self.metrics)
