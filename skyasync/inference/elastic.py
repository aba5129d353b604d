"""Engines that join and leave a run while it continues, as a file in its folder says.

```
 a line is added   ──▶ made, started ──▶ weight sync, proven by digests ──▶ takes requests.
 a line is removed ──▶ between two syncs: gets no request ──▶ its requests continue at the others
 ──▶ shut down.
```

Invariant: the file lists the engines by their names, one per line: a server's address, or the
number of one of the run's own. An error of a joining engine or of the file does not end the run: it
is logged in a line. The last healthy engine does not leave. An engine that joined fails and is
replaced as the others are (``supervisor``).

| who waits  | for what                              | woken by                                                     |
|------------|---------------------------------------|--------------------------------------------------------------|
| ``_watch`` | a change of the file                  | the clock, every ``interval_s``                              |
| ``_join``  | its engine's start, the end of a sync | the engine; the sync; ``limit_s`` from its start on          |
| ``_leave`` | the end of a sync                     | the sync                                                     |
| ``_leave`` | its requests' answers so far          | the engine; ``LEAVING_S``, then what is known of them is used |
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from skyasync.callbacks import RunExtension, Watched
from skyasync.errors import headline
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import InferenceEngine
from skyasync.inference.supervisor import EngineSupervisor, ended_on_error
from skyasync.utils.task_group import within

if TYPE_CHECKING:
    from skyasync.weight_sync.sync import WeightSync

log = logging.getLogger(__name__)

FILE = "engines.txt"
HEAD = "# The engines of this run, one a line: one that is added joins, one that is taken away leaves.\n"
RETRY_S = 30.0  # before the next attempt with a server that could not join
LEAVING_S = 30.0  # for a leaving engine to end its requests; then their known tokens are used

MakeEngine = Callable[[str], Awaitable[InferenceEngine]]


class ElasticEngines(RunExtension):
    """Makes the engines those of the file, from the beginning of training to ``close``.

    Args:
        make: an engine by its name, not started; what it raises is why it cannot join.
        names: of the client's engines, in order.
        file: written if it does not exist.
        interval_s: how often it is looked at.
        limit_s: how long a joining engine may take to get its weights.
    """

    def __init__(
        self,
        client: InferenceClient,
        weights: WeightSync,
        supervisor: EngineSupervisor,
        make: MakeEngine,
        names: Sequence[str],
        file: Path,
        *,
        interval_s: float,
        limit_s: float,
    ) -> None:
        self.joined = 0
        self.left = 0
        self._client = client
        self._weights = weights
        self._supervisor = supervisor
        self._make = make
        self._file = file
        self._interval_s = interval_s
        self._limit_s = limit_s
        self._indexes: dict[str, int] = {}
        for index, name in enumerate(names):
            self._indexes[name.rstrip("/")] = index
        self._servers = any(map(is_server, names))
        self._retry_times: dict[str, float] = {}  # name -> when it may be asked again
        self._logged_lines: set[str] = set()
        self._text = ""
        self._watch_task: asyncio.Task[None] | None = None

    def on_start(self, trainer: Watched) -> None:
        if self._watch_task is None:
            if not self._file.exists():  # else it was changed before a controller was restarted
                write_engine_list(self._file, list(self._indexes))
            self._watch_task = asyncio.get_running_loop().create_task(self._watch())

    def on_step_end(self, trainer: Watched, metrics: dict[str, float]) -> None:
        if self.joined or self.left:
            metrics |= {"engines/joined": float(self.joined), "engines/left": float(self.left)}
            metrics["engines/alive"] = float(len(self._client.pool.healthy))

    async def close(self) -> None:
        """No engine joins or leaves any more; engines that are joining are ended."""
        task = self._watch_task
        self._watch_task = None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._file.unlink(missing_ok=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                text = self._file.read_text(encoding="utf-8")
            except (OSError, ValueError):
                continue
            if text != self._text:
                self._text = text
                self._retry_times.clear()
                self._logged_lines.clear()
            names = read_engine_list(text)
            if names:  # an empty file may be half written
                for name in names:
                    if name not in self._indexes:
                        await self._join(name)
                for name in list(self._indexes):  # a copy: ``_leave`` changes it
                    if name not in names:
                        await self._leave(name)

    async def _join(self, name: str) -> None:
        clock = asyncio.get_running_loop().time
        start_s = clock()
        problem = wrong_name(name, servers=self._servers)
        if problem:
            self._warn(f"{self._file.name}: {problem}")
            return
        if start_s < self._retry_times.get(name, 0.0):
            return
        try:
            async with ended_on_error(await self._make(name)) as engine:
                await engine.start()
                async with (
                    within(self._limit_s, f"the first weight sync of engine {name}"),
                    self._weights.between_syncs() as update,
                ):
                    await engine.update_weights(update)
                    index = await self._client.join(engine)
        except Exception as error:
            if is_server(name):  # it may be started later
                self._retry_times[name] = clock() + RETRY_S
                retry = "asked again"
            else:
                self._retry_times[name] = float("inf")
                retry = f"left out until {self._file.name} changes"
            self._warn(f"engine {name} could not join and is {retry}: {headline(error)}")
            return
        self._indexes[name] = index
        self._supervisor.watch(index)
        self.joined += 1
        duration_s = clock() - start_s
        log.info(
            "engine %s has joined after %.1f s, with the weights of version %d",
            name,
            duration_s,
            update.version,
        )

    async def _leave(self, name: str) -> None:
        index = self._indexes[name]
        async with self._weights.quiet():  # in a sync by NCCL the others would wait for it
            if not set(self._client.pool.healthy) - {index}:
                self._warn(f"engine {name} stays: it is the last healthy one")
                return
            self._supervisor.forget(index)
            request_count = await self._client.remove(index, LEAVING_S)
        del self._indexes[name]
        self.left += 1
        log.info("engine %s has left; %d requests continue on the others", name, request_count)
        await asyncio.gather(self._client.engines[index].shutdown(), return_exceptions=True)

    def _warn(self, line: str) -> None:
        """Log a line, once until the file changes."""
        if line not in self._logged_lines:
            self._logged_lines.add(line)
            log.warning("%s", line)


def read_engine_list(text: str) -> list[str]:
    """The names in a file, without duplicates, in order."""
    names: dict[str, None] = {}
    for line in text.splitlines():
        name, _, _ = line.partition("#")
        name = name.strip().rstrip("/")
        if name:
            names[name] = None
    return list(names)


def write_engine_list(file: Path, names: Sequence[str]) -> None:
    """Write atomically: a reader finds the old or the new file."""
    new_file = file.with_name(f".{file.name}")
    lines = [f"{name}\n" for name in names]
    new_file.write_text(HEAD + "".join(lines), encoding="utf-8")
    new_file.replace(file)


def is_server(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def wrong_name(name: str, *, servers: bool) -> str:
    """The problem with the name of an engine that shall join; empty if there is none.

    Args:
        servers: the run's engines are servers.
    """
    if servers and not is_server(name):
        return (
            f"{name!r} is not the address of a server, as the run's engines are (http://host:port)"
        )
    if not servers and (is_server(name) or not re.fullmatch(r"\w[\w.-]*", name)):
        return f"{name!r} is not the number of an engine: this run starts its engines itself"
    return ""
