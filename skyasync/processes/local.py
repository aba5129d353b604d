"""A host on its caller's event loop, for runs that live in one process.

Invariant: nothing here starts a thread or reads a clock other than the event loop's, so it runs on virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from skyasync.processes.calls import Answer, Call, Service
from skyasync.processes.host import HEARTBEAT_S, within


class LocalHost:
    """Carries calls out as they come: quick ones at once, those that await as tasks."""

    def __init__(self, service: Service, limit_s: float = 0.0) -> None:
        self.service, self._limit_s = service, limit_s
        self._tasks: set[asyncio.Task[Answer]] = set()

    async def load(self, *args: object) -> Exception | None:
        try:
            self.service.load(*args)
        except Exception as error:
            return error
        return None

    async def exchange(self, calls: Sequence[Call]) -> tuple[list[Answer], int]:
        answers = []
        for call in calls:
            if self.service.is_async(call):
                self._tasks.add(asyncio.create_task(within(self._limit_s or None, self.service, call)))
            else:
                answers.append(await self.service.run(call))
        if not answers and self._tasks:
            await asyncio.wait(self._tasks, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
        ended = {task for task in self._tasks if task.done()}
        self._tasks -= ended
        return answers + [task.result() for task in ended], 0

    def end(self) -> None:
        self.kill()

    def kill(self) -> None:
        for task in self._tasks:
            task.cancel()
