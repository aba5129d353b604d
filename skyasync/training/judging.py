"""What reward models say of finished episodes, in their rewards.

Invariant: an episode is scored once, when its group has been played: before anything is filtered, kept for a checkpoint
or trained, and in asynchronous plans while others train. What has no response, or was given up, has no score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from skyasync.config.reward_models import RewardModel, reward_models
from skyasync.config.schema import Config
from skyasync.rollout.types import Group, Trajectory
from skyasync.training.learner import Learner
from skyasync.training.phases import Phases
from skyasync.workers.roles import REWARD_ROLE, ROLES


class Judging:
    """Asks the reward model, if there is one."""

    def __init__(self, cfg: Config, phases: Phases, learner: Learner) -> None:
        self.active = ROLES[REWARD_ROLE].wanted(cfg)
        self._models = reward_models(cfg.trainer.reward) if self.active else {}
        self._phases, self._learner = phases, learner

    async def add_scores(self, groups: list[Group]) -> None:
        """Add its scores to the rewards of these groups, each on its episode's last action."""
        from skyasync.rollout.collate import collate_in_turns

        if not self.active or not any(group.trajectories for group in groups):
            return
        batch = await collate_in_turns(groups)
        async with self._phases.limited("reward model"):
            found = await self._learner.dispatch.ask(REWARD_ROLE, "scores", batch)
        scores = found.reshape(len(found), -1).tolist()
        row = 0
        for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
            row += len(trajectory.sequences)
            if trajectory.actions and not trajectory.metrics.get("given_up"):
                _add(trajectory, scores[row - 1], self._models)  # of its last sequence


def _add(trajectory: Trajectory, scores: Sequence[float], models: Mapping[str, RewardModel]) -> None:
    said = dict(zip(models, scores, strict=True))
    trajectory.actions[-1].reward += sum(models[name].part(score) for name, score in said.items())
    trajectory.metrics = {**trajectory.metrics, **said}
