"""What a reward model says of finished episodes, in their rewards.

Invariant: an episode is scored once, when its group has been played: before anything is filtered, kept for a checkpoint
or trained, and in asynchronous plans while others train. What has no response, or was given up, has no score.
"""

from __future__ import annotations

from skyasync.config.schema import Config, RewardConfig
from skyasync.rollout.types import Group, Trajectory
from skyasync.training.learner import Learner
from skyasync.training.phases import Phases
from skyasync.workers.roles import REWARD_ROLE, ROLES

METRIC = "reward_model"
"""The model's own score, unscaled, among an episode's metrics."""


class Judging:
    """Asks the reward model, if there is one."""

    def __init__(self, cfg: Config, phases: Phases, learner: Learner) -> None:
        self.active = ROLES[REWARD_ROLE].wanted(cfg)
        self._settings, self._phases, self._learner = cfg.trainer.reward, phases, learner

    async def add_scores(self, groups: list[Group]) -> None:
        """Add its scores to the rewards of these groups, each on its episode's last action."""
        from skyasync.rollout.collate import collate_in_turns

        if not self.active or not any(group.trajectories for group in groups):
            return
        batch = await collate_in_turns(groups)
        async with self._phases.limited("reward model"):
            scores = (await self._learner.dispatch.ask(REWARD_ROLE, "scores", batch)).tolist()
        row = 0
        for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
            row += len(trajectory.sequences)
            if trajectory.actions and not trajectory.metrics.get("given_up"):
                _add(trajectory, scores[row - 1], self._settings)  # of its last sequence


def scaled(score: float, settings: RewardConfig) -> float:
    """What a score adds to a reward."""
    plain = (score - settings.mean) / settings.std
    bound = settings.clip
    return settings.weight * (min(max(plain, -bound), bound) if bound else plain)


def _add(trajectory: Trajectory, score: float, settings: RewardConfig) -> None:
    trajectory.actions[-1].reward += scaled(score, settings)
    trajectory.metrics = {**trajectory.metrics, METRIC: score}
