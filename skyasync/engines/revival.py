"""Engines that die while a run goes on, and those that take their places.

```
 living ──(a call raises a death, or no heartbeat in time)──▶ dead ──kill, start──▶ loaded ──weights──▶ living
```

Invariant: whoever takes requests holds the weights that the other engines have, proven by their digests. A place is
filled between two weight syncs (a sync that comes while an engine loads goes on without it), and only so often an hour:
then, or when a newcomer's weights are not what was sent, the run ends with the error that was first.

| who waits                  | for what                           | woken by                                           |
|----------------------------|------------------------------------|----------------------------------------------------|
| ``_listen``, one an engine | its news                           | the engine; ``heartbeat_timeout_s``, which ends it |
| ``_revive``, one a death   | a newcomer: its start, its weights | the engine; ``engine_start_timeout_s``,``limit_s`` |
| ``_revive``                | the end of a weight sync           | the sync; ``limit_s``                              |
| ``_replace_in_turn``       | the engines' turn on the devices   | the sync behind the training step under way        |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from skyasync.callbacks import TrainerCallback, Watched
from skyasync.engines.client import InferenceClient
from skyasync.engines.protocol import EngineDiedError
from skyasync.engines.roster import Loss
from skyasync.errors import UserError, headline
from skyasync.observe.timeline import Timeline
from skyasync.together import within
from skyasync.weight_sync.update import WeightSyncError, WeightUpdate

log = logging.getLogger(__name__)

HOUR_S = 3600.0
OWN_DELAY_S = 1.0  # an answer may be there, and this process have been too busy to read it


class Turns(Protocol):
    """Whose turn it is on devices that engines share with the policy; see ``skyasync.weight_sync.colocation``."""

    async def engines_turn(self) -> None: ...
    def for_engines(self) -> AbstractAsyncContextManager[bool]: ...


class Weights(Protocol):
    """What the living engines have; see ``skyasync.weight_sync.sync.WeightSync``."""

    def between_syncs(self) -> AbstractAsyncContextManager[WeightUpdate]: ...


@dataclass
class Budget:
    """So many restarts in an hour."""

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


class Revival(TrainerCallback):
    """Listens for the engines' heartbeats and replaces those that have died; from the first weight sync to ``close``.

    Args:
        max_restarts: an hour (``generator.max_engine_restarts``), at least 1.
        heartbeat_s: how often an engine is asked for its news.
        heartbeat_timeout_s: one that does not answer within that is dead.
        limit_s: how long a newcomer may take to be given its weights.
        turns: of engines and policy, where they share devices.
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
        turns: Turns | None = None,
    ) -> None:
        self._turns = turns
        self.deaths = self.restarts = 0
        self._client, self._weights, self._limit_s = client, weights, limit_s
        self._heartbeat_s, self._timeout_s = heartbeat_s, heartbeat_timeout_s
        self._budget = Budget(max_restarts)
        self._timeline = timeline or Timeline(None)
        self._recovery_s = 0.0  # the longest since the last step
        self._tasks: set[asyncio.Task[None]] = set()
        self._reviving: dict[int, asyncio.Task[None]] = {}

    def on_train_begin(self, trainer: Watched) -> None:
        self.begin()

    def on_step_end(self, trainer: Watched, metrics: dict[str, float]) -> None:
        if self.deaths:
            metrics |= {"engines/deaths": float(self.deaths), "engines/restarts": float(self.restarts)}
        if self._recovery_s:
            metrics["engines/recovery_s"], self._recovery_s = self._recovery_s, 0.0

    def begin(self) -> None:
        """From now on a death does not end the run. Again, when the workers have been started anew: nothing."""
        if self._client.roster.survivor is self:
            return
        self._client.roster.survivor = self
        for index in range(len(self._client.engines)):
            self.listen(index)

    def listen(self, index: int) -> None:
        """To one more engine."""
        self._start(self._listen(index))

    def forget(self, index: int) -> None:
        """An engine leaves: it is not started again, nor waited for."""
        if task := self._reviving.pop(index, None):
            task.cancel()

    def write_to(self, timeline: Timeline) -> None:
        """What happens from here on is on this one."""
        self._timeline = timeline

    async def close(self) -> None:
        """Listen no more; newcomers that are not ready are ended. From now on a death is an error."""
        self._client.roster.survivor = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def died(self, index: int, error: BaseException, loss: Loss) -> None:
        """The client has lost this engine."""
        self.deaths += 1
        engine: Any = self._client.engines[index]
        if not hasattr(engine, "successor"):  # a client's own kind of engine
            self._client.give_up(error)
        elif self._take_restart(error):
            others = "go on at the others" if self._others else "wait for it"
            log.warning(
                "engine %d has died, and is started again (%s): %d requests %s, from %d tokens that are known; %s",
                index, self._budget, loss.requests, others, loss.tokens, headline(error),
            )  # fmt: skip
            self._reviving[index] = self._start(self._revive(index, error, loss))

    @property
    def _others(self) -> bool:
        return bool(self._client.roster.routes.living)

    def _take_restart(self, error: BaseException) -> bool:
        """Count one; else the run ends, with the error that was first."""
        if self._budget.take(self._now()):
            return True
        error.add_note(f"the engine is not started again: {self._budget} are used (generator.max_engine_restarts)")
        self._client.give_up(error)
        return False

    async def _revive(self, index: int, error: BaseException, loss: Loss) -> None:
        began, since = self._now(), self._timeline.now()
        while True:
            try:
                version = await (self._replace_in_turn(index) if self._turns else self._replace(index))
                break
            except (WeightSyncError, UserError) as wrong:  # no death: it would come again
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
            requests=loss.requests, tokens_known=loss.tokens,
        )  # fmt: skip
        log.info("engine %d is back after %.1f s, with the weights of version %d", index, took, version)

    async def _replace(self, index: int) -> int:
        """End what is left of an engine and start the next one in its place; the version of its weights."""
        old: Any = self._client.engines[index]
        old.kill()
        engine = old.successor()
        try:
            await engine.start()
            async with (
                within(self._limit_s, f"the first weight sync of engine {index}"),
                self._weights.between_syncs() as update,
            ):
                await engine.update_weights(update)
                await self._client.admit(index, engine)
        except BaseException:
            engine.kill()
            raise
        return update.version

    async def _replace_in_turn(self, index: int) -> int:
        """As ``_replace``, where there is room for an engine only while the policy is in host memory."""
        old: Any = self._client.engines[index]
        old.kill()
        assert self._turns is not None
        while True:
            await self._turns.engines_turn()
            async with self._weights.between_syncs() as update, self._turns.for_engines() as ours:
                if not ours:  # it has ended while a sync was waited for
                    continue
                engine = old.successor()
                try:
                    await engine.start()
                    async with within(self._limit_s, f"the first weight sync of engine {index}"):
                        await engine.update_weights(update)
                        await self._client.admit(index, engine)
                except BaseException:
                    engine.kill()
                    raise
                return update.version

    async def _listen(self, index: int) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            if index not in self._client.roster.routes.dead:
                await self._beat(index)

    async def _beat(self, index: int) -> None:
        engine = self._client.engines[index]
        news = asyncio.ensure_future(self._client.hear(index))
        try:
            await asyncio.wait({news}, timeout=self._timeout_s)
            if not news.done():
                await asyncio.wait({news}, timeout=OWN_DELAY_S)
            if news.done():
                with contextlib.suppress(Exception):  # of an engine that failed, which its requests raise
                    news.result()
            elif self._client.engines[index] is engine:
                late = f"engine {index} did not answer within {self._timeout_s:g} s (generator.heartbeat_timeout_s)"
                self._client.roster.lose(index, EngineDiedError(late))
        finally:
            news.cancel()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
