"""Samples of a group that need not be played to their end: early stopping and oversampling.

Invariant: every trajectory requested comes back once. Early stopping ends a group only if no
rewards that its other samples could earn would bring it into training: what is trained is the same
with and without it. Oversampling starts more samples per group and takes the first that are
complete: a sample that replaces a dropped one gets its name, and a failed episode is taken only if
too few others are complete.

Oversampling trains on shorter responses than the policy writes (``docs/stragglers.md`` says by how
much), so it is off by default.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from skyasync.algorithms.shaping import cannot_be_inside
from skyasync.config.schema.algorithm import DynamicSamplingConfig
from skyasync.errors import UserError
from skyasync.inference.interface import GenerationOutput
from skyasync.rollout.types import (
    Group,
    Prompt,
    PromptId,
    RolloutRequest,
    Segment,
    Trajectory,
    TrajectoryId,
)
from skyasync.utils.task_group import together

StopRule = Callable[[Sequence[float], int], bool]
"""From the rewards so far and the size of the group: it will be left out of training."""
Progress = Callable[[], Awaitable[dict[str, GenerationOutput]]]
Episode = Coroutine[Any, Any, Trajectory]


def early_stop_rule(cfg: DynamicSamplingConfig) -> StopRule | None:
    """None without ``early_end``."""
    if not cfg.early_end:
        return None

    def stops(rewards: Sequence[float], samples: int) -> bool:
        if not cfg.reward_min <= rewards[-1] <= cfg.reward_max:
            key = "trainer.algorithm.dynamic_sampling"
            raise UserError(
                f"a reward of {rewards[-1]:g} is outside {key}.reward_min={cfg.reward_min:g} and {key}.reward_max="
                f"{cfg.reward_max:g}, by which {key}.early_end decides: set them to the environment's bounds"
            )
        return cannot_be_inside(
            rewards,
            samples,
            low=cfg.low,
            high=cfg.high,
            min_reward=cfg.reward_min,
            max_reward=cfg.reward_max,
        )

    return stops


class GroupMonitor:
    """Watches the groups of one call of a generator as their episodes end.

    Args:
        requested: every trajectory of the call.
        stops: ends the other samples of a group as soon as it holds.
        metric: by which groups are filtered; the first complete group must have it.
    """

    def __init__(
        self, requested: Sequence[TrajectoryId], stops: StopRule | None = None, metric: str = ""
    ) -> None:
        self._stops = stops
        self._metric = metric
        self._sizes = Counter(identity.prompt for identity in requested)
        self._running: dict[PromptId, set[asyncio.Task[Trajectory]]] = defaultdict(set)
        self._rewards: dict[PromptId, list[float]] = defaultdict(list)
        self._ended: dict[PromptId, list[Trajectory]] = defaultdict(list)
        self._stopped: dict[PromptId, Segment] = {}  # with its prompt

    async def play(self, identity: TrajectoryId, episode: Episode) -> Trajectory:
        """The trajectory of the episode, or an empty one if its group is stopped meanwhile.

        Raises:
            UserError: if it completes a group without the metric.
        """
        own = asyncio.current_task()
        prompt = identity.prompt
        task = asyncio.ensure_future(episode)
        self._running[prompt].add(task)
        try:
            trajectory = await task
        except asyncio.CancelledError:
            if prompt not in self._stopped or (own is not None and own.cancelling()):
                raise
            trajectory = Trajectory(identity, [replace(self._stopped[prompt])], "abort")
        else:
            if self._stops is not None:
                self._rewards[prompt].append(trajectory.reward)
                if prompt not in self._stopped and self._stops(
                    self._rewards[prompt], self._sizes[prompt]
                ):
                    self._stopped[prompt] = trajectory.segments[0]
                    for other in self._running[prompt]:
                        other.cancel()
        finally:
            self._running[prompt].discard(task)
        if self._metric:
            ended = self._ended[prompt]
            ended.append(trajectory)
            if len(ended) == self._sizes[prompt]:
                Group(Prompt(prompt, [], ""), self._ended.pop(prompt)).metric_values(self._metric)
        return trajectory


def with_extra_samples(requests: Sequence[RolloutRequest], extra: int) -> list[RolloutRequest]:
    """The same groups with ``extra`` more samples each, as copies of the last sample of the
    group."""
    samples: list[RolloutRequest] = []
    for prompt, same in groupby(requests, key=lambda request: request.id.prompt):
        samples += same
        last = samples[-1]
        for number in range(extra):
            samples.append(replace(last, id=TrajectoryId(prompt, last.id.repetition + 1 + number)))
    return samples


@dataclass(eq=False)
class _OversampledGroup:
    """A group whose samples run, and of which the first ``len(requested)`` are taken."""

    requested: list[TrajectoryId]
    running: dict[asyncio.Task[Trajectory], TrajectoryId] = field(default_factory=dict)
    complete: list[Trajectory] = field(default_factory=list)
    failed: list[Trajectory] = field(default_factory=list)

    def taken(self) -> list[Trajectory]:
        """Under the names that were requested: a sample that was requested keeps its name."""
        first = sorted(
            [*self.complete, *self.failed][: len(self.requested)],
            key=lambda each: each.id.repetition,
        )
        own = {each.id: each for each in first if each.id in self.requested}
        others = iter([each for each in first if each.id not in own])
        for name in self.requested:
            if name not in own:
                own[name] = next(others)
                own[name].id = name
        return [own[name] for name in self.requested]


async def first_complete(
    requested: Sequence[TrajectoryId], episodes: dict[TrajectoryId, Episode], progress: Progress
) -> list[Trajectory]:
    """The trajectories requested. The first error cancels all episodes, and is raised as it was.

    Args:
        episodes: of every sample that is started, the extra ones as well.
        progress: tells how far requests are; it is called before samples are dropped.
    """
    groups = {
        prompt: _OversampledGroup(list(same))
        for prompt, same in groupby(requested, key=lambda name: name.prompt)
    }
    ended: asyncio.Queue[asyncio.Task[Trajectory]] = asyncio.Queue()
    group_of: dict[asyncio.Task[Trajectory], _OversampledGroup] = {}
    for name, episode in episodes.items():
        task = asyncio.create_task(episode)
        task.add_done_callback(ended.put_nowait)
        group_of[task] = groups[name.prompt]
        groups[name.prompt].running[task] = name
    try:
        while any(group.running for group in groups.values()):
            task = await ended.get()
            group = group_of[task]
            if task not in group.running:
                continue
            del group.running[task]
            trajectory = task.result()
            if len(group.complete) < len(group.requested):
                (group.failed if trajectory.metrics.get("given_up") else group.complete).append(
                    trajectory
                )
            if len(group.complete) == len(group.requested) and group.running:
                # Drop what still runs; count it, and the tokens that its turns in flight have: at
                # least.
                so_far = await progress()
                dropped = list(group.running)
                names = {str(name) for name in group.running.values()}
                group.running.clear()
                for task in dropped:
                    task.cancel()
                await asyncio.gather(*dropped, return_exceptions=True)
                tokens = sum(
                    len(out.token_ids)
                    for turn, out in so_far.items()
                    if turn.rpartition("-t")[0] in names
                )
                counts = {"dropped": float(len(dropped)), "dropped_tokens": tokens / len(dropped)}
                group.complete[0].metrics |= counts
    except BaseException:
        for task in group_of:
            task.cancel()
        await asyncio.gather(*group_of, return_exceptions=True)
        raise
    return [trajectory for group in groups.values() for trajectory in group.taken()]


async def play_episodes(
    requested: Sequence[TrajectoryId],
    episodes: dict[TrajectoryId, Episode],
    monitor: GroupMonitor | None = None,
    progress: Progress | None = None,
) -> list[Trajectory]:
    """The trajectories requested. The first error cancels all episodes, and is raised as it was.

    Args:
        progress: given if there are more episodes than requested; see ``first_complete``.
    """
    if monitor is not None:
        episodes = {name: monitor.play(name, episode) for name, episode in episodes.items()}
    if progress is not None:
        return await first_complete(requested, episodes, progress)
    async with together() as tasks:
        played = [tasks.start(episode) for episode in episodes.values()]
    return [episode.result() for episode in played]
