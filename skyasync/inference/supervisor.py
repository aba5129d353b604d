"""Heartbeats of engines, and replacements of engines that fail while a run continues.

```
 healthy ──(a call raises a failure, or no heartbeat in time)──▶ failed ──kill, start──▶ loaded ──weights──▶ healthy
```

Invariant: an engine that takes requests holds the weights that the other engines have, proven by their digests. A
replacement is admitted between two weight syncs; a sync that comes while an engine loads continues without it. Restarts
are limited per hour: then, or if a replacement's weights are not what was sent, the run ends with the first error.

| who waits                   | for what                              | woken by                                       |
|-----------------------------|---------------------------------------|------------------------------------------------|
| ``_watch``, one an engine   | its progress                          | the engine; ``heartbeat_timeout_s``: a failure |
| ``_restart``, one a failure | a replacement: its start, its weights | the engine; its start's limit; ``limit_s``     |
| ``_restart``                | the end of a weight sync              | the sync; ``limit_s``                          |
| ``_replace_colocated``      | the engines' turn on the devices      | the sync after the current training step       |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from skyasync.callbacks import RunExtension, Watched
from skyasync.errors import UserError, headline
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import EngineFailedError, InferenceEngine
from skyasync.inference.pool import LostWork
from skyasync.observability.timeline import Timeline
from skyasync.utils.task_group import within
from skyasync.weight_sync.update import WeightSyncError, WeightUpdate

log = logging.getLogger(__name__)

HOUR_S = 3600.0
OWN_DELAY_S = 1.0  # an answer may have arrived, and this process have been too busy to read it


class EngineTurns(Protocol):
    """Whose turn it is on devices that engines share with the policy; see ``skyasync.weight_sync.colocation``."""

    async def engines_turn(self) -> None: ...
    def for_engines(self) -> AbstractAsyncContextManager[bool]: ...


class Weights(Protocol):
    """What the healthy engines have; see ``skyasync.weight_sync.sync.WeightSync``."""

    def between_syncs(self) -> AbstractAsyncContextManager[WeightUpdate]: ...


@dataclass
class RestartBudget:
    """At most so many restarts in an hour."""

    per_hour: int
    _taken: deque[float] = field(default_factory=deque)

    def take(self, now: float) -> bool:
        while self._taken and now - self._taken[0] >= HOUR_S:
            self._taken.popleft()
        if len(self._taken) >= self.per_hour:
            return False
        self._taken.append(now)
        return True

    def __str__(self) -> str:
        return f"{len(self._taken)} of {self.per_hour} restarts this hour"


class EngineSupervisor(RunExtension):
    """Watches the engines' heartbeats and replaces engines that fail; from the first weight sync to ``close``.

    Args:
        max_restarts: per hour (``generator.max_engine_restarts``), at least 1.
        heartbeat_s: how often an engine is asked for its progress.
        heartbeat_timeout_s: an engine that does not answer within this time has failed.
        limit_s: how long a replacement may take to get its weights.
        turns: of engines and policy, if they share devices.
    """

    def __init__(
        self,
        client: InferenceClient,
        weights: Weights,
        *,
        max_restarts: int,
        heartbeat_s: float,
        heartbeat_timeout_s: float,
        limit_s: float,
        timeline: Timeline | None = None,
        turns: EngineTurns | None = None,
    ) -> None:
        self.failures = self.restarts = 0
        self._client, self._weights, self._limit_s, self._turns = client, weights, limit_s, turns
        self._heartbeat_s, self._timeout_s = heartbeat_s, heartbeat_timeout_s
        self._budget = RestartBudget(max_restarts)
        self._timeline = timeline or Timeline(None)
        self._recovery_s = 0.0  # the longest since the last step
        self._tasks: set[asyncio.Task[None]] = set()
        self._restarting: dict[int, asyncio.Task[None]] = {}

    def on_start(self, trainer: Watched) -> None:
        self.begin()

    def on_step_end(self, trainer: Watched, metrics: dict[str, float]) -> None:
        if self.failures:
            metrics |= {"engines/deaths": float(self.failures), "engines/restarts": float(self.restarts)}
        if self._recovery_s:
            metrics["engines/recovery_s"], self._recovery_s = self._recovery_s, 0.0

    def begin(self) -> None:
        """From now on a failure does not end the run. A second call does nothing."""
        if self._client.pool.failure_handler is self:
            return
        self._client.pool.failure_handler = self
        for index in range(len(self._client.engines)):
            self.watch(index)

    def watch(self, index: int) -> None:
        """One more engine."""
        self._start(self._watch(index))

    def forget(self, index: int) -> None:
        """An engine leaves: it is not restarted."""
        if task := self._restarting.pop(index, None):
            task.cancel()

    def write_to(self, timeline: Timeline) -> None:
        """Later restarts are recorded there."""
        self._timeline = timeline

    async def close(self) -> None:
        """Stop watching, and end replacements that are not ready. From now on a failure is an error."""
        self._client.pool.failure_handler = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def failed(self, index: int, error: BaseException, lost: LostWork) -> None:
        self.failures += 1
        if not self._client.engines[index].restartable:
            self._client.give_up(error)
        elif self._take_restart(error):
            others = "go on at the others" if self._client.pool.healthy else "wait for it"
            log.warning(
                "engine %d has died, and is started again (%s): %d requests %s, from %d tokens that are known; %s",
                index, self._budget, lost.requests, others, lost.tokens, headline(error),
            )  # fmt: skip
            self._restarting[index] = self._start(self._restart(index, error, lost))

    def _take_restart(self, error: BaseException) -> bool:
        """Count one; if there is none left, the run ends with the first error."""
        if self._budget.take(self._now()):
            return True
        error.add_note(f"the engine is not started again: {self._budget} are used (generator.max_engine_restarts)")
        self._client.give_up(error)
        return False

    async def _restart(self, index: int, error: BaseException, lost: LostWork) -> None:
        began, since = self._now(), self._timeline.now()
        old = self._client.engines[index]
        while True:
            old.kill()
            try:
                version = await (self._replace_colocated(index, old) if self._turns else self._replace(index, old))
                break
            except (WeightSyncError, UserError) as wrong:  # a restart would not mend it
                self._client.give_up(wrong)
                return
            except Exception as another:
                error.add_note(f"and the engine that was started in its place: {headline(another)}")
                if not self._take_restart(error):
                    return
                log.warning("engine %d did not come back, and is started again (%s): %s", index, self._budget,
                            headline(another))  # fmt: skip
        took = self._now() - began
        self.restarts += 1
        self._recovery_s = max(self._recovery_s, took)
        self._timeline.add_span(
            f"engine {index} is replaced", "engines", since, self._timeline.now(), error=headline(error),
            requests=lost.requests, tokens_known=lost.tokens,
        )  # fmt: skip
        log.info("engine %d is back after %.1f s, with the weights of version %d", index, took, version)

    async def _replace(self, index: int, old: InferenceEngine) -> int:
        """Start the next engine in a failed one's place; the version of its weights."""
        async with ended_on_error(old.successor()) as engine:
            await engine.start()
            async with self._sync_limit(index), self._weights.between_syncs() as update:
                await engine.update_weights(update)
                await self._client.admit(index, engine)
        return update.version

    async def _replace_colocated(self, index: int, old: InferenceEngine) -> int:
        """As ``_replace``, on a device that has room for an engine only while the policy is in host memory."""
        assert self._turns is not None
        while True:
            await self._turns.engines_turn()
            async with self._weights.between_syncs() as update, self._turns.for_engines() as ours:
                if not ours:  # the turn has ended during the wait for a sync
                    continue
                async with ended_on_error(old.successor()) as engine:
                    await engine.start()
                    async with self._sync_limit(index):
                        await engine.update_weights(update)
                        await self._client.admit(index, engine)
                return update.version

    def _sync_limit(self, index: int) -> AbstractAsyncContextManager[Any]:
        return within(self._limit_s, f"the first weight sync of engine {index}")

    async def _watch(self, index: int) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            if self._client.pool.router.loads[index].healthy:
                await self._heartbeat(index)

    async def _heartbeat(self, index: int) -> None:
        engine = self._client.engines[index]
        poll = asyncio.ensure_future(self._client.poll(index))
        try:
            await asyncio.wait({poll}, timeout=self._timeout_s)
            if not poll.done():
                await asyncio.wait({poll}, timeout=OWN_DELAY_S)
            if poll.done():
                with contextlib.suppress(Exception):  # of an engine that failed, which its requests raise
                    poll.result()
            elif self._client.engines[index] is engine:
                late = f"engine {index} did not answer within {self._timeout_s:g} s (generator.heartbeat_timeout_s)"
                self._client.pool.fail(index, EngineFailedError(late))
        finally:
            poll.cancel()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


@contextlib.asynccontextmanager
async def ended_on_error(engine: InferenceEngine) -> AsyncIterator[InferenceEngine]:
    """The engine, which is killed if an error or cancellation leaves the block."""
    try:
        yield engine
    except BaseException:
        engine.kill()
        raise
