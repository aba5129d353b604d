"""The environments of a run that lives in one process.

Invariant: nothing here starts a thread or reads a clock other than the event loop's, so it runs on virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from skyasync.envs.episodes import Answer, Call, Episodes, overdue
from skyasync.envs.registry import EnvFactory
from skyasync.envs.worker import HEARTBEAT_S, WorkerSettings


class LocalWorker:
    """Carries calls out on the caller's event loop: quick ones at once, those that await as tasks."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._limit_s = settings.step_timeout_s
        self._episodes = Episodes(settings.env_config, settings.max_observation_chars)
        self._tasks: set[asyncio.Task[Answer]] = set()

    async def define(self, name: str, factory: EnvFactory) -> None:
        self._episodes.define(name, factory)

    async def exchange(self, calls: Sequence[Call]) -> tuple[list[Answer], int]:
        answers = []
        for call in calls:
            if self._episodes.is_async(call):
                self._tasks.add(asyncio.create_task(self._run(call)))
            else:
                answers.append(await self._episodes.run(call))
        if not answers and self._tasks:
            await asyncio.wait(self._tasks, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
        ended = {task for task in self._tasks if task.done()}
        self._tasks -= ended
        return answers + [task.result() for task in ended], 0

    def kill(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _run(self, call: Call) -> Answer:
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._episodes.run(call)
        except TimeoutError:
            await self._episodes.run(call._replace(method="close", args=()))
            return Answer(call.number, None, overdue(call, self._limit_s))
