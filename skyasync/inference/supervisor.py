"""Heartbeats of engines, and replacements of engines that fail while a run continues.

```
 healthy ──(a call raises a failure, or no heartbeat in time)──▶ failed ──kill, start──▶ loaded
 ──weights──▶ healthy
```

Invariant: an engine that takes requests holds the weights that the other engines have, proven by
their digests. A replacement is admitted between two weight syncs; a sync that comes while an engine
loads continues without it. Restarts are limited per hour: then, or if a replacement's weights are
not what was sent, the run ends with the first error.

| who waits                   | for what                              | woken by                                       |
|-----------------------------|---------------------------------------|------------------------------------------------|
| ``_watch``, one an engine   | its progress; during an update, stats | the engine; ``heartbeat_timeout_s``: a failure |
| ``_restart``, one a failure | a replacement: its start, its weights | the engine; its start's limit; ``limit_s``     |
| ``_restart``                | the end of a weight sync              | the sync; ``limit_s``                          |
| ``_replace``, if colocated  | the engines' turn on the devices      | the sync after the current training step       |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any

from skyasync.callbacks import RunExtension, Watched
from skyasync.errors import UserError, headline
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import EngineFailedError, InferenceEngine
from skyasync.inference.pool import LostWork
from skyasync.observability.timeline import Timeline
from skyasync.utils.task_group import within
from skyasync.weight_sync.update import WeightSyncError

if TYPE_CHECKING:
    from skyasync.weight_sync.colocation import Colocation
    from skyasync.weight_sync.sync import WeightSync

log = logging.getLogger(__name__)

HOUR_S = 3600.0
POLLED_PER_S = 50.0  # of all engines, for their new tokens; other heartbeats carry none
PROCESS_DELAY_S = 1.0  # this process may have been too busy to read an answer that has arrived


class EngineSupervisor(RunExtension):
    """Watches the engines' heartbeats, and replaces engines that fail.

    It runs from the first weight sync to ``close``.

    Args:
        max_restarts: per hour (``generator.max_engine_restarts``), at least 1.
        heartbeat_s: how often an engine is asked for a heartbeat, and for its progress
            (``POLLED_PER_S``).
        heartbeat_timeout_s: an engine that does not answer within this time has failed.
        limit_s: how long a replacement may take to get its weights.
        timeline: restarts are recorded there; an attribute too.
        colocation: of engines and policy, if they share devices.
    """

    def __init__(
        self,
        client: InferenceClient,
        weights: WeightSync,
        *,
        max_restarts: int,
        heartbeat_s: float,
        heartbeat_timeout_s: float,
        limit_s: float,
        timeline: Timeline | None = None,
        colocation: Colocation | None = None,
    ) -> None:
        self.failures = 0
        self.restarts = 0
        self.timeline = timeline or Timeline(None)
        self._client = client
        self._weights = weights
        self._limit_s = limit_s
        self._colocation = colocation
        self._heartbeat_s = heartbeat_s
        self._timeout_s = heartbeat_timeout_s
        self._max_restarts = max_restarts
        self._restart_times: deque[float] = deque()  # of the last hour
        self._recovery_s = 0.0  # the longest since the last step
        self._tasks: set[asyncio.Task[None]] = set()
        self._restart_tasks: dict[int, asyncio.Task[None]] = {}

    def on_start(self, trainer: Watched) -> None:
        self.begin()

    def on_step_end(self, trainer: Watched, metrics: dict[str, float]) -> None:
        if self.failures:
            metrics |= {
                "engines/deaths": float(self.failures),
                "engines/restarts": float(self.restarts),
            }
        if self._recovery_s:
            metrics["engines/recovery_s"] = self._recovery_s
            self._recovery_s = 0.0

    def begin(self) -> None:
        """Begin to handle failures, which then do not end the run. A second call does nothing."""
        if self._client.pool.on_failure is not None:
            return
        self._client.pool.on_failure = self._failed
        for index in range(len(self._client.engines)):
            self.watch(index)

    def watch(self, index: int) -> None:
        """One more engine."""
        self._start(self._watch(index))

    def forget(self, index: int) -> None:
        """An engine leaves: it is not restarted."""
        task = self._restart_tasks.pop(index, None)
        if task:
            task.cancel()

    async def close(self) -> None:
        """Stop watching, and end replacements that are not ready; a failure is an error again."""
        self._client.pool.on_failure = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _failed(self, index: int, error: BaseException, lost_work: LostWork) -> None:
        self.failures += 1
        if not self._client.engines[index].restartable:
            self._client.give_up(error)
        elif self._take_restart(error):
            log.warning(
                "engine %d has failed, and is started again (%d of %d restarts this hour): "
                "%d requests %s, from %d tokens that are known; %s",
                index,
                len(self._restart_times),
                self._max_restarts,
                lost_work.requests,
                "continue on the others" if self._client.pool.healthy else "wait for it",
                lost_work.tokens,
                headline(error),
            )
            self._restart_tasks[index] = self._start(self._restart(index, error, lost_work))

    def _take_restart(self, error: BaseException) -> bool:
        """Count a restart; if none is left in this hour, the run ends with the first error."""
        now = asyncio.get_running_loop().time()
        while self._restart_times and now - self._restart_times[0] >= HOUR_S:
            self._restart_times.popleft()
        if len(self._restart_times) < self._max_restarts:
            self._restart_times.append(now)
            return True
        usage = f"{len(self._restart_times)} of {self._max_restarts} restarts this hour are used"
        error.add_note(f"the engine is not started again: {usage} (generator.max_engine_restarts)")
        self._client.give_up(error)
        return False

    async def _restart(self, index: int, error: BaseException, lost_work: LostWork) -> None:
        loop = asyncio.get_running_loop()
        start = self.timeline.now()
        failed_at = loop.time()
        failed_engine = self._client.engines[index]
        while True:
            failed_engine.kill()
            try:
                version = await self._replace(index, failed_engine)
                break
            except (WeightSyncError, UserError) as fatal_error:  # a restart would raise it again
                self._client.give_up(fatal_error)
                return
            except Exception as next_error:
                reason = headline(next_error)
                error.add_note(f"and the engine that was started in its place: {reason}")
                if not self._take_restart(error):
                    return
                log.warning(
                    "engine %d did not come back, and is started again (%d of %d restarts this hour): %s",
                    index,
                    len(self._restart_times),
                    self._max_restarts,
                    reason,
                )
        duration_s = loop.time() - failed_at
        self.restarts += 1
        self._recovery_s = max(self._recovery_s, duration_s)
        self.timeline.add_span(
            f"engine {index} is replaced",
            "engines",
            start,
            self.timeline.now(),
            error=headline(error),
            requests=lost_work.requests,
            tokens_known=lost_work.tokens,
        )
        log.info(
            "engine %d is back after %.1f s, with the weights of version %d",
            index,
            duration_s,
            version,
        )

    async def _replace(self, index: int, failed_engine: InferenceEngine) -> int:
        """Start a replacement and update its weights, whose version is returned.

        A shared device has memory for an engine only while the policy is in host memory: in the
        engines' turn.
        """
        action = f"the first weight sync of engine {index}"
        colocation = self._colocation
        # Of hybrid engines only some share their device.
        if colocation is None or (colocation.hybrid and index not in colocation.hybrid):
            async with ended_on_error(failed_engine.successor()) as engine:
                await engine.start()
                async with within(self._limit_s, action), self._weights.between_syncs() as update:
                    await engine.update_weights(update)
                    await self._client.admit(index, engine)
            return update.version
        while True:
            await colocation.wait_for_engines()
            async with (
                self._weights.between_syncs() as update,
                colocation.for_engines() as engines_have_turn,
            ):
                if not engines_have_turn:  # the turn has ended during the wait for a sync
                    continue
                async with ended_on_error(failed_engine.successor()) as engine:
                    await engine.start()
                    async with within(self._limit_s, action):
                        await engine.update_weights(update)
                        await self._client.admit(index, engine)
                return update.version

    async def _watch(self, index: int) -> None:
        """Poll an engine until the supervisor is closed; one that does not answer has failed."""
        polled_at = asyncio.get_running_loop().time() - index / POLLED_PER_S  # not all at once
        while True:
            await asyncio.sleep(self._heartbeat_s)
            if not self._client.pool.router.healthy[index]:  # it is being replaced
                continue
            engine = self._client.engines[index]
            now = asyncio.get_running_loop().time()
            own_answer = None
            tokens = now - polled_at >= len(self._client.engines) / POLLED_PER_S
            polled_at = now if tokens else polled_at
            poll = asyncio.ensure_future(self._client.poll(index, tokens=tokens))
            try:
                overdue = await self._overdue(poll)
                # vLLM's core answers nothing while it loads weights: the process in front of it
                # must answer then.
                while overdue and self._client.updating:
                    own_answer = asyncio.ensure_future(engine.stats())
                    if await self._overdue(own_answer):
                        break
                    own_answer.exception()  # a failure, which its calls raise
                    overdue = await self._overdue(poll)
                if not overdue:
                    # The requests of an engine that fails raise its error.
                    with contextlib.suppress(Exception):
                        poll.result()
                elif self._client.engines[index] is engine:
                    problem = f"engine {index} did not answer within {self._timeout_s:g} s (generator.heartbeat_timeout_s)"
                    self._client.pool.fail(index, EngineFailedError(problem))
            finally:
                poll.cancel()
                if own_answer is not None:
                    own_answer.cancel()

    async def _overdue(self, answer: asyncio.Future[Any]) -> bool:
        """Wait for an answer; true if it has not come in time."""
        await asyncio.wait({answer}, timeout=self._timeout_s)
        if not answer.done():
            await asyncio.wait({answer}, timeout=PROCESS_DELAY_S)
        return not answer.done()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


@contextlib.asynccontextmanager
async def ended_on_error(engine: InferenceEngine) -> AsyncIterator[InferenceEngine]:
    """The engine, which is killed if an error or cancellation leaves the block."""
    try:
        yield engine
    except BaseException:
        engine.kill()
        raise
