"""Engines that come and go while a run goes on, as a file in its folder says.

```
 a line is added ──▶ made, started ──▶ given the others' weights, proven by digests ──▶ takes requests
 a line is gone  ──▶ gets no request any more ──▶ what it has goes on at the others ──▶ shut down
```

Invariant: the file says which engines there shall be, one a line, by their names: a server's address, or the number of
one of the run's own. Nothing that is wrong with a newcomer, or with the file, ends the run: it is told in a line. The
last engine that lives does not leave. A newcomer dies and is replaced as the others are (``revival``).

| who waits  | for what                             | woken by                                                   |
|------------|--------------------------------------|------------------------------------------------------------|
| ``_watch`` | a change of the file                 | the clock, every ``interval_s``                            |
| ``_join``  | its engine's start, the end of a     | the engine; the sync; ``limit_s`` from its start on        |
|            | weight sync                          |                                                            |
| ``_leave`` | its requests' answers so far         | the engine; ``LEAVING_S``, behind which what is known of   |
|            |                                      | them goes on                                               |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from skyasync.callbacks import RunExtension, Watched
from skyasync.engines.client import InferenceClient
from skyasync.engines.protocol import InferenceEngine
from skyasync.engines.revival import Revival, Weights
from skyasync.engines.wanted import is_server, read, write, wrong_name
from skyasync.errors import headline
from skyasync.utils.task_group import within

log = logging.getLogger(__name__)

AGAIN_S = 30.0  # until a server that could not join is asked again
LEAVING_S = 30.0

Make = Callable[[str], Awaitable[InferenceEngine]]


class Membership(RunExtension):
    """Makes the engines those of the file, from the beginning of training to ``close``.

    Args:
        make: an engine by its name, not started; what it raises is why it cannot join.
        names: of the client's engines, in order.
        file: written where it is not there yet.
        interval_s: how often it is looked at.
        limit_s: how long a newcomer may take to be given its weights.
    """

    def __init__(
        self,
        client: InferenceClient,
        weights: Weights,
        revival: Revival,
        make: Make,
        names: Sequence[str],
        file: Path,
        *,
        interval_s: float,
        limit_s: float,
    ) -> None:
        self.joined = self.left = 0
        self._client, self._weights, self._revival, self._make = client, weights, revival, make
        self._file, self._interval_s, self._limit_s = file, interval_s, limit_s
        self._places = {name.rstrip("/"): index for index, name in enumerate(names)}
        self._servers = any(map(is_server, names))
        self._refused: dict[str, float] = {}  # name -> when it may be asked again
        self._told: set[str] = set()
        self._seen = ""
        self._watching: asyncio.Task[None] | None = None

    def on_start(self, trainer: Watched) -> None:
        if self._watching is None:
            if not self._file.exists():  # else a controller that has died had it changed already
                write(self._file, list(self._places))
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    def on_step_end(self, trainer: Watched, metrics: dict[str, float]) -> None:
        if self.joined or self.left:
            living = float(len(self._client.roster.routes.living))
            metrics |= {"engines/joined": float(self.joined), "engines/left": float(self.left)}
            metrics["engines/living"] = living

    async def close(self) -> None:
        """Nobody comes or goes any more; who is on the way is ended."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            self._file.unlink(missing_ok=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            wanted = self._wanted()
            if not wanted:  # it is being written, perhaps
                continue
            for name in [name for name in wanted if name not in self._places and self._may_join(name)]:
                await self._join(name)
            for name in [name for name in self._places if name not in wanted]:
                await self._leave(name)

    def _wanted(self) -> list[str]:
        try:
            text = self._file.read_text(encoding="utf-8")
        except (OSError, ValueError):
            return []
        if text != self._seen:
            self._seen = text
            self._refused.clear()
            self._told.clear()
        return read(text)

    def _may_join(self, name: str) -> bool:
        if problem := wrong_name(name, servers=self._servers):
            self._tell(f"{self._file.name}: {problem}")
            return False
        return self._now() >= self._refused.get(name, 0.0)

    async def _join(self, name: str) -> None:
        began = self._now()
        try:
            engine = await self._make(name)
            try:
                await engine.start()
                async with (
                    within(self._limit_s, f"the first weight sync of engine {name}"),
                    self._weights.between_syncs() as update,
                ):
                    await engine.update_weights(update)
                    index = await self._client.join(engine)
            except BaseException:
                _end(engine)
                raise
        except Exception as error:
            self._refused[name] = self._now() + AGAIN_S if is_server(name) else float("inf")
            again = "asked again" if is_server(name) else f"left out until {self._file.name} changes"
            self._tell(f"engine {name} could not join and is {again}: {headline(error)}")
            return
        self._places[name] = index
        self._revival.listen(index)
        self.joined += 1
        took = self._now() - began
        log.info("engine %s has joined after %.1f s, with the weights of version %d", name, took, update.version)

    async def _leave(self, name: str) -> None:
        index, routes = self._places[name], self._client.roster.routes
        if not [other for other in routes.living if other != index]:
            self._tell(f"engine {name} stays: it is the last one that lives")
            return
        self._revival.forget(index)
        handed = await self._client.let_go(index, LEAVING_S)
        del self._places[name]
        self.left += 1
        log.info("engine %s has left; %d requests go on at the others", name, handed)
        await asyncio.gather(self._client.engines[index].shutdown(), return_exceptions=True)

    def _tell(self, line: str) -> None:
        """Once, until the file changes."""
        if line not in self._told:
            self._told.add(line)
            log.warning("%s", line)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _end(engine: object) -> None:
    if hasattr(engine, "kill"):
        engine.kill()
