"""Agent programs in processes of their own.

Invariant: an episode ends with its score or with an error that is its own: the program's, its time limit's, or that of
its process, which is then replaced. A process that does not answer any more is killed; what else it was playing is told
so and may be played again.

| who waits | for what                         | woken by                                              |
|-----------|----------------------------------|-------------------------------------------------------|
| ``play``  | a process that has been loaded   | its ``load``, within ``START_S``                      |
| ``play``  | the program's end                | the process (answer, death), or ``timeout_s``         |
| ``_stop`` | the process to cancel an episode | the process, or ``ANSWER_S``, after which it is killed |
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from skyasync.errors import UserError

START_S = 120.0  # for a process and the imports of a program
CALLS = 100_000  # that a process serves at once: more than there are episodes
ANSWER_S = 30.0  # for a process to cancel an episode: a program on its event loop may compute meanwhile


class AgentError(Exception):
    """A program failed: the episode's own fault."""


class ProcessLostError(Exception):
    """The process that played the episode is gone; which of its episodes is to blame is unknown."""


class Process(Protocol):
    """An ``AgentProcess`` somewhere."""

    async def call(self, method: str, *args: Any) -> Any:
        """Its method's result. Any error means that the process is lost."""

    def kill(self) -> None: ...


@dataclass(frozen=True)
class Score:
    """What a program has returned."""

    reward: float
    metrics: dict[str, float]


@dataclass
class _Place:
    """A process, perhaps still starting, and how many episodes it plays."""

    process: Process
    loaded: asyncio.Task[None]
    playing: int = 0
    lost: bool = False


@dataclass
class AgentPool:
    """Spreads episodes over processes.

    Args:
        make: starts a process; its program is loaded afterwards.
        count: how many there are.
    """

    make: Callable[[], Process]
    count: int = 1
    _places: list[_Place] = field(default_factory=list)
    _stopping: set[asyncio.Task[None]] = field(default_factory=set)

    async def play(self, episode: str, data: dict[str, Any], base_url: str, api_key: str, *, is_eval: bool = False,
                   timeout_s: float = 0.0) -> Score:  # fmt: skip
        """Run the program on one row; ``timeout_s=0`` is no limit.

        Raises:
            UserError: if the program cannot be loaded.
            AgentError: if it raises, takes too long, or returns no score.
            ProcessLostError: if its process dies.
        """
        place = self._choose()
        place.playing += 1
        try:
            await asyncio.shield(place.loaded)
            answer = await self._ask(place, timeout_s, "play", episode, data, base_url, api_key, is_eval)
        except TimeoutError:
            self._stop(place, episode)
            problem = f"the program did not end within {timeout_s:g} s (generator.episode_timeout_s)"
            raise AgentError(f"{episode}: {problem}") from None
        except asyncio.CancelledError:
            self._stop(place, episode)
            raise
        finally:
            place.playing -= 1
        return _read_score(episode, answer)

    async def close(self) -> None:
        """Kill all processes."""
        for task in self._stopping:
            task.cancel()
        places, self._places = self._places, []
        for place in places:
            place.loaded.cancel()
            place.process.kill()

    def _choose(self) -> _Place:
        """The place with the fewest episodes; processes start when they are needed."""
        self._places = [place for place in self._places if not place.lost]
        while len(self._places) < self.count:
            process = self.make()
            loaded = asyncio.ensure_future(_load(process))
            loaded.add_done_callback(lambda task: task.cancelled() or task.exception())  # ``play`` raises it
            self._places.append(_Place(process, loaded))
        return min(self._places, key=lambda place: place.playing)

    async def _ask(self, place: _Place, timeout_s: float, method: str, *args: Any) -> Any:
        """The process's answer. Raises ``TimeoutError`` if it takes too long."""
        try:
            async with asyncio.timeout(timeout_s or None) as timer:
                return await place.process.call(method, *args)
        except Exception as error:
            if timer.expired():
                raise
            self._lose(place)
            raise ProcessLostError(f"the process that runs the agent program was lost: {error}") from error

    def _lose(self, place: _Place) -> None:
        place.lost = True
        place.process.kill()

    def _stop(self, place: _Place, episode: str) -> None:
        """Have an episode cancelled without waiting for it."""

        async def stop() -> None:
            try:
                async with asyncio.timeout(ANSWER_S):
                    await place.process.call("cancel", episode)
            except Exception:
                self._lose(place)

        task = asyncio.ensure_future(stop())
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)


async def _load(process: Process) -> None:
    try:
        async with asyncio.timeout(START_S) as timer:
            problem = await process.call("load")
    except TimeoutError as error:
        if not timer.expired():
            raise
        raise UserError(f"the process of generator.agent_program was not ready within {START_S:g} s") from error
    except Exception as error:
        raise UserError(f"the process of generator.agent_program ended while it was loading: {error}") from error
    if problem:
        raise UserError(problem)


def _read_score(episode: str, answer: str) -> Score:
    told = json.loads(answer)
    if "error" in told:
        raise AgentError(f"{episode}: {told['error']}")
    return Score(told["reward"], told["metrics"])


def ray_processes(program: str, config: dict[str, Any], kept: list[str], host: str) -> Callable[[], Process]:
    """Starts an ``AgentProcess`` in a Ray actor: on this machine if the endpoint's ``host`` is its loopback."""

    def make() -> Process:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from skyasync.endpoint.agent_process import AgentProcess

        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": CALLS}
        if host.startswith("127.") or host in ("localhost", "::1"):
            node = ray.get_runtime_context().get_node_id()
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        actor_class: Any = ray.remote(AgentProcess).options(**options)
        actor = actor_class.remote(program, config)
        actor.isolate.remote(kept)  # its calls begin in order: before anything of the program is imported
        return _RayProcess(actor)

    return make


class _RayProcess:
    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def call(self, method: str, *args: Any) -> Any:
        return await getattr(self._actor, method).remote(*args)

    def kill(self) -> None:
        import ray

        ray.kill(self._actor)
