"""Starts more samples of a group than are trained, and takes the first that are complete: a straggler waits for nobody.

Invariant: every trajectory asked for comes back once, complete; a sample that takes the place of a dropped one bears
its name, and those that end by themselves stay what they are. An episode that was given up is taken only where too few
others were complete.

What is trained is then shorter than what the policy writes (``docs/plans.md`` says by how much), hence off by default.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from skyasync.inference.interface import GenerationOutput
from skyasync.rollout.types import GeneratorInput, PromptId, Trajectory, TrajectoryId

Progress = Callable[[], Awaitable[dict[str, GenerationOutput]]]
Episode = Coroutine[Any, Any, Trajectory]


def with_spares(asked: GeneratorInput, spares: int) -> GeneratorInput:
    """The same groups with ``spares`` more samples each, as copies of the group's last one."""
    more: GeneratorInput = {**asked}
    names = asked["trajectory_ids"]
    places: list[int] = []
    ids: list[TrajectoryId] = []
    for place, name in enumerate(names):
        places.append(place)
        ids.append(name)
        if place + 1 == len(names) or names[place + 1].prompt != name.prompt:
            places += [place] * spares
            ids += [TrajectoryId(name.prompt, name.repetition + 1 + spare) for spare in range(spares)]
    more["trajectory_ids"] = ids
    more["prompts"] = [asked["prompts"][place] for place in places]
    more["env_classes"] = [asked["env_classes"][place] for place in places]
    more["env_extras"] = [asked["env_extras"][place] for place in places]
    return more


class _Race:
    """A group: its samples run, and ``size`` of them are taken."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.running: dict[asyncio.Task[Trajectory], TrajectoryId] = {}
        self.complete: list[Trajectory] = []
        self.given_up: list[Trajectory] = []
        self.dropped: list[TrajectoryId] = []

    def ended(self, task: asyncio.Task[Trajectory]) -> bool:
        """Take a sample that has ended; whether the group is complete by it."""
        del self.running[task]
        trajectory = task.result()
        if len(self.complete) < self.size:
            (self.given_up if trajectory.metrics.get("given_up") else self.complete).append(trajectory)
        return len(self.complete) == self.size and not self.dropped

    def drop_others(self) -> list[asyncio.Task[Trajectory]]:
        self.dropped = list(self.running.values())
        tasks = list(self.running)
        self.running.clear()
        for task in tasks:
            task.cancel()
        return tasks

    def taken(self, asked: Sequence[TrajectoryId]) -> list[Trajectory]:
        """Under the names that were asked for: who was asked for keeps its name."""
        found = sorted([*self.complete, *self.given_up][: self.size], key=lambda each: each.id.repetition)
        own = {each.id: each for each in found if each.id in asked}
        others = iter([each for each in found if each.id not in own])
        for name in asked:
            if name not in own:
                own[name] = next(others)
                own[name].id = name
        return [own[name] for name in asked]


async def first_complete(
    asked: Sequence[TrajectoryId], episodes: dict[TrajectoryId, Episode], progress: Progress
) -> list[Trajectory]:
    """The trajectories asked for. At the first error all episodes are cancelled and it is raised as it was.

    Args:
        episodes: of every sample that is started, spares as well.
        progress: tells how far requests are; asked for what is dropped.
    """
    names: dict[PromptId, list[TrajectoryId]] = {}
    for name in asked:
        names.setdefault(name.prompt, []).append(name)
    races = {prompt: _Race(len(of_group)) for prompt, of_group in names.items()}
    ended: asyncio.Queue[asyncio.Task[Trajectory]] = asyncio.Queue()
    whose: dict[asyncio.Task[Trajectory], _Race] = {}
    for name, episode in episodes.items():
        task = asyncio.create_task(episode)
        task.add_done_callback(ended.put_nowait)
        whose[task] = races[name.prompt]
        races[name.prompt].running[task] = name
    try:
        while any(race.running for race in races.values()):
            task = await ended.get()
            race = whose[task]
            if task in race.running and race.ended(task) and race.running:
                lengths = await progress()
                cancelled = race.drop_others()
                await asyncio.gather(*cancelled, return_exceptions=True)
                _tell(race, lengths)
    except BaseException:
        for task in whose:
            task.cancel()
        await asyncio.gather(*whose, return_exceptions=True)
        raise
    return [each for prompt, of_group in names.items() for each in races[prompt].taken(of_group)]


def _tell(race: _Race, so_far: dict[str, GenerationOutput]) -> None:
    """How many were dropped, and how many tokens their turns under way had: at least."""
    names = {str(name) for name in race.dropped}
    tokens = sum(len(wrote.token_ids) for turn, wrote in so_far.items() if turn.rpartition("-t")[0] in names)
    if race.dropped:
        told = {"dropped": float(len(race.dropped)), "dropped_tokens": tokens / len(race.dropped)}
        race.complete[0].metrics |= told
