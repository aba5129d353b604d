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
"""Whether training will leave a group out, by the rewards so far and the size of the group."""
Progress = Callable[[], Awaitable[dict[str, GenerationOutput]]]
Episode = Coroutine[Any, Any, Trajectory]


def early_stop_rule(cfg: DynamicSamplingConfig) -> StopRule | None:
    """The rule of ``early_end``; None without it."""
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
        self._stop_rule = stops
        self._metric = metric
        self._sizes = Counter(identity.prompt for identity in requested)
        self._running: dict[PromptId, set[asyncio.Task[Trajectory]]] = defaultdict(set)
        self._rewards: dict[PromptId, list[float]] = defaultdict(list)
        self._ended_trajectories: dict[PromptId, list[Trajectory]] = defaultdict(list)
        self._stopped: dict[PromptId, Segment] = {}  # with its prompt

    async def play(self, identity: TrajectoryId, episode: Episode) -> Trajectory:
        """The trajectory of the episode, or an empty one if its group is stopped meanwhile.

        Raises:
            UserError: if it completes a group without the metric.
        """
        play_task = asyncio.current_task()
        prompt = identity.prompt
        # A task, so that the other samples of the group can cancel it.
        task = asyncio.ensure_future(episode)
        self._running[prompt].add(task)
        try:
            trajectory = await task
        except asyncio.CancelledError:
            # Either the group was stopped, or this task is cancelled itself.
            if prompt not in self._stopped or (play_task is not None and play_task.cancelling()):
                raise
            trajectory = Trajectory(identity, [replace(self._stopped[prompt])], "abort")
        else:
            if self._stop_rule is not None:
                rewards = self._rewards[prompt]
                rewards.append(trajectory.reward)
                if prompt not in self._stopped and self._stop_rule(rewards, self._sizes[prompt]):
                    self._stopped[prompt] = trajectory.segments[0]
                    for sibling in self._running[prompt]:
                        sibling.cancel()
        finally:
            self._running[prompt].discard(task)
        if self._metric:
            ended_trajectories = self._ended_trajectories[prompt]
            ended_trajectories.append(trajectory)
            if len(ended_trajectories) == self._sizes[prompt]:
                del self._ended_trajectories[prompt]
                # for its error alone
                Group(Prompt(prompt, [], ""), ended_trajectories).metric_values(self._metric)
        return trajectory


def with_extra_samples(requests: Sequence[RolloutRequest], extra: int) -> list[RolloutRequest]:
    """The same groups with ``extra`` more samples each, copies of the last one of the group."""
    samples: list[RolloutRequest] = []
    for prompt, group in groupby(requests, key=lambda request: request.id.prompt):
        samples += group
        last_sample = samples[-1]
        # Its repetition is the largest of the group: the numbers after it are free.
        for number in range(extra):
            samples.append(
                replace(
                    last_sample, id=TrajectoryId(prompt, last_sample.id.repetition + 1 + number)
                )
            )
    return samples


@dataclass(eq=False)
class _OversampledGroup:
    """A group whose samples run, and of which the first ``len(requested)`` are taken."""

    requested: list[TrajectoryId]
    running: dict[asyncio.Task[Trajectory], TrajectoryId] = field(default_factory=dict)
    complete: list[Trajectory] = field(default_factory=list)
    failed: list[Trajectory] = field(default_factory=list)

    def taken(self) -> list[Trajectory]:
        """The samples under the names that were requested; a requested sample keeps its name."""
        samples = [*self.complete, *self.failed][: len(self.requested)]
        # By number: the names do not depend on the order in which the chosen samples ended.
        samples.sort(key=lambda trajectory: trajectory.id.repetition)
        by_name: dict[TrajectoryId, Trajectory] = {}
        extra: list[Trajectory] = []
        for trajectory in samples:
            if trajectory.id in self.requested:
                by_name[trajectory.id] = trajectory
            else:
                extra.append(trajectory)
        replacements = iter(extra)
        for name in self.requested:
            if name not in by_name:
                by_name[name] = next(replacements)
                by_name[name].id = name
        return [by_name[name] for name in self.requested]


async def first_complete(
    requested: Sequence[TrajectoryId], episodes: dict[TrajectoryId, Episode], progress: Progress
) -> list[Trajectory]:
    """The trajectories requested. The first error cancels all episodes, and is raised as it was.

    Args:
        episodes: of every sample that is started, the extra ones as well.
        progress: tells how far requests are; it is called before samples are dropped.
    """
    groups = {}
    for prompt, names in groupby(requested, key=lambda name: name.prompt):
        groups[prompt] = _OversampledGroup(list(names))
    ended_tasks: asyncio.Queue[asyncio.Task[Trajectory]] = asyncio.Queue()
    group_of: dict[asyncio.Task[Trajectory], _OversampledGroup] = {}
    for name, episode in episodes.items():
        task = asyncio.create_task(episode)
        task.add_done_callback(ended_tasks.put_nowait)  # a queue keeps the order in which they end
        group_of[task] = groups[name.prompt]
        groups[name.prompt].running[task] = name
    try:
        while any(group.running for group in groups.values()):
            task = await ended_tasks.get()
            group = group_of[task]
            if task not in group.running:  # it was dropped
                continue
            del group.running[task]
            trajectory = task.result()  # raises its error
            if len(group.complete) < len(group.requested):
                if trajectory.metrics.get("given_up"):
                    # A failed episode ends early: counted, it would replace a longer response.
                    group.failed.append(trajectory)
                else:
                    group.complete.append(trajectory)
            if len(group.complete) == len(group.requested) and group.running:
                await _drop_running(group, progress)
    except BaseException:
        # No episode outlives the call; errors of cancelled ones do not replace the first.
        for task in group_of:
            task.cancel()
        await asyncio.gather(*group_of, return_exceptions=True)
        raise
    return [trajectory for group in groups.values() for trajectory in group.taken()]


async def _drop_running(group: _OversampledGroup, progress: Progress) -> None:
    """Cancel the samples that still run; count them, and the tokens of their turns in flight."""
    outputs = await progress()  # before the requests are cancelled
    dropped_tasks = list(group.running)
    names = {str(name) for name in group.running.values()}
    group.running.clear()
    for task in dropped_tasks:
        task.cancel()
    await asyncio.gather(*dropped_tasks, return_exceptions=True)
    tokens = 0  # at least: turns that have ended are not in flight
    for request_id, output in outputs.items():
        episode, _, _ = request_id.rpartition("-t")
        if episode in names:
            tokens += len(output.token_ids)
    metrics = group.complete[0].metrics
    metrics["dropped"] = float(len(dropped_tasks))
    metrics["dropped_tokens"] = tokens / len(dropped_tasks)


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
        episode_tasks = [tasks.start(episode) for episode in episodes.values()]
    return [episode.result() for episode in episode_tasks]
