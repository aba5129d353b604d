"""The roles of a run in this process: no cluster, no actors.

Invariant: the same worker classes do the same work as in Ray actors, one call at a time in one thread; the event loop
is not blocked. For experiments that start many short runs, and for tests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import methodcaller
from typing import Any

from skyasync.config.schema import Config
from skyasync.workers.dispatch import Dispatch
from skyasync.workers.roles import POLICY, ROLES


class LocalGroup:
    """One rank of a role, in ``thread``, with the methods of ``RankGroup``. It is loaded when it is made."""

    lost: BaseException | None = None

    def __init__(self, cfg: Config, role: str, thread: ThreadPoolExecutor, total_steps: int = 0) -> None:
        entry = ROLES[role]
        self.worker = entry.worker_class()(cfg, threads=entry.threads(cfg), role=role, total_steps=total_steps)
        self.worker.setup()
        self._thread, self.busy_s = thread, 0.0

    async def start(self, cfg: Config, total_steps: int = 0) -> None: ...

    async def call(self, method: str, *args: object) -> list[Any]:
        return [await self.call_first(method, *args)]

    async def call_first(self, method: str, *args: object) -> Any:
        def timed() -> object:
            start = time.monotonic()
            try:
                return methodcaller(method, *args)(self.worker)
            finally:
                self.busy_s += time.monotonic() - start

        return await asyncio.get_running_loop().run_in_executor(self._thread, timed)

    on_rows = call_first

    def kill(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class LocalDispatch(Dispatch):
    """Every role has one rank, and is loaded when this is made.

    Args:
        total_steps: optimizer steps of the run, for learning rates that decay.
    """

    def __init__(self, cfg: Config, *, roles: Sequence[str] = (POLICY,), total_steps: int = 0) -> None:
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="roles")
        groups = {role: LocalGroup(cfg, role, thread, total_steps) for role in roles}
        super().__init__(cfg, groups)
        self._policy = groups[POLICY].worker
