"""Ends the episodes of a group whose rejection is certain before its last sample.

Invariant: a group is ended only if no rewards that its other samples could earn would bring it into training, so what
is trained is the same with and without it; every trajectory asked for comes back, those ended early without a response.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from skyasync.algorithms.filters import cannot_be_inside
from skyasync.arrays import Ints
from skyasync.config.schema.algorithm import DynamicSamplingConfig
from skyasync.errors import UserError
from skyasync.rollout.types import Group, Prompt, PromptId, Segment, Trajectory, TrajectoryId

Decided = Callable[[Sequence[float], int], bool]


def decider(dynamic_sampling: DynamicSamplingConfig) -> Decided | None:
    """From the rewards so far and the size of the group: it will be left out. None if that is not asked for."""
    cfg = dynamic_sampling
    if not cfg.early_end:
        return None

    def decided(rewards: Sequence[float], samples: int) -> bool:
        if not cfg.reward_min <= rewards[-1] <= cfg.reward_max:
            key = "trainer.algorithm.dynamic_sampling"
            raise UserError(
                f"a reward of {rewards[-1]:g} is outside {key}.reward_min={cfg.reward_min:g} and {key}.reward_max="
                f"{cfg.reward_max:g}, by which {key}.early_end decides: set them to the environment's bounds"
            )
        return cannot_be_inside(rewards, samples, low=cfg.low, high=cfg.high, least=cfg.reward_min, most=cfg.reward_max)

    return decided


class HasMetric:
    """Looks at the first group that is complete: has it the metric that groups are filtered by?

    Args:
        asked: every trajectory of the call.
    """

    def __init__(self, metric: str, asked: Sequence[TrajectoryId]) -> None:
        self._metric, self._sizes = metric, Counter(identity.prompt for identity in asked)
        self._ended: dict[PromptId, list[Trajectory]] = defaultdict(list)

    async def play(self, identity: TrajectoryId, episode: Coroutine[Any, Any, Trajectory]) -> Trajectory:
        """The episode's trajectory.

        Raises:
            UserError: if it completes a group without the metric, naming those that there are.
        """
        trajectory = await episode
        ended = self._ended[identity.prompt]
        ended.append(trajectory)
        if len(ended) == self._sizes[identity.prompt]:
            Group(Prompt(identity.prompt, [], ""), self._ended.pop(identity.prompt)).judged_by(self._metric)
        return trajectory


class EarlyEnd:
    """The groups of one call of a generator.

    Args:
        asked: every trajectory of the call.
    """

    def __init__(self, decided: Decided, asked: Sequence[TrajectoryId]) -> None:
        self._decided = decided
        self._sizes: dict[PromptId, int] = {}
        for identity in asked:
            self._sizes[identity.prompt] = self._sizes.get(identity.prompt, 0) + 1
        self._playing: dict[PromptId, set[asyncio.Task[Trajectory]]] = {prompt: set() for prompt in self._sizes}
        self._rewards: dict[PromptId, list[float]] = {prompt: [] for prompt in self._sizes}
        self._ended: dict[PromptId, Ints] = {}  # by the tokens of its prompt

    async def play(self, identity: TrajectoryId, episode: Coroutine[Any, Any, Trajectory]) -> Trajectory:
        """The episode's trajectory, or an empty one if its group has been decided meanwhile."""
        own, prompt = asyncio.current_task(), identity.prompt
        task = asyncio.ensure_future(episode)
        self._playing[prompt].add(task)
        try:
            trajectory = await task
        except asyncio.CancelledError:
            if prompt not in self._ended or (own is not None and own.cancelling()):
                raise
            return Trajectory(identity, [Segment("prompt", self._ended[prompt])], "abort")
        finally:
            self._playing[prompt].discard(task)
        self._judge(trajectory)
        return trajectory

    def _judge(self, trajectory: Trajectory) -> None:
        prompt = trajectory.id.prompt
        self._rewards[prompt].append(trajectory.reward)
        if prompt not in self._ended and self._decided(self._rewards[prompt], self._sizes[prompt]):
            self._ended[prompt] = trajectory.segments[0].tokens
            for task in self._playing[prompt]:
                task.cancel()
