"""What reward models say of finished episodes, in their rewards.

Invariant: an episode is scored once, when its group has been played: before anything is filtered, kept for a checkpoint
or trained, and while other groups are played and others train. What has no response, or was given up, has no score. The
model is asked one thing at a time; what ends meanwhile is asked next, at once:

    played   a  b c    d           a model's batches are as large as it is slow
    asked    a┈┈┈ bc┈┈┈┈ d┈┈┈
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from skyasync.config.schema import Config
from skyasync.config.schema.reward_models import RewardModel, reward_models
from skyasync.rollout.types import Group, Prompt, Trajectory
from skyasync.together import together
from skyasync.training.learner import Learner
from skyasync.training.phases import Phases
from skyasync.workers.roles import REWARD_ROLE, ROLES


class Judging:
    """Asks the reward model, if there is one.

    Attributes:
        apart: it may be asked while engines compute: its devices are not theirs.
    """

    def __init__(self, cfg: Config, phases: Phases, learner: Learner) -> None:
        role = ROLES[REWARD_ROLE]
        self.active = role.wanted(cfg)
        self.apart = self.active and not (cfg.trainer.placement.colocate_all and role.shares(cfg))
        self._models = reward_models(cfg.trainer.reward) if self.active else {}
        self._phases, self._learner = phases, learner
        self._waiting: list[list[Group]] = []
        self._asking = asyncio.Lock()

    async def while_playing(
        self, play: Callable[[Prompt], Awaitable[list[Group]]], prompts: Sequence[Prompt]
    ) -> list[Group]:
        """The groups of these prompts, each scored as soon as ``play`` has given it."""

        async def one(prompt: Prompt) -> list[Group]:
            groups = await play(prompt)
            await self.add_scores(groups)
            return groups

        async with together() as tasks:
            played = [tasks.start(one(prompt)) for prompt in prompts]
        return [group for task in played for group in task.result()]

    async def add_scores(self, groups: list[Group]) -> None:
        """Add its scores to the rewards of these groups, each on its episode's last action."""
        if not self.active or not any(group.trajectories for group in groups):
            return
        self._waiting.append(groups)
        try:
            async with self._asking:
                if any(waiting is groups for waiting in self._waiting):  # else somebody before has asked for these too
                    asked = list(self._waiting)
                    await self._score([group for some in asked for group in some])
                    self._forget(*asked)
        finally:
            self._forget(groups)

    def _forget(self, *asked: list[Group]) -> None:
        """By identity: others may have come and gone meanwhile."""
        self._waiting = [waiting for waiting in self._waiting if not any(waiting is some for some in asked)]

    async def _score(self, groups: list[Group]) -> None:
        from skyasync.rollout.collate import collate_in_turns

        batch = await collate_in_turns(groups)
        with self._phases.timed("reward", track="reward model"):
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
