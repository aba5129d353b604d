"""The environments of a run, and where each episode is played.

Invariant: an episode lives in one process from its beginning to its end and is closed exactly once: by the step that
is done, by an error in it, by ``close`` or by ``abandon``. An error in one episode reaches its caller alone. A process
that is lost takes its episodes with it.

No trip is made for nothing: an environment whose beginning does nothing begins with its first step, and one that costs
nothing (``BaseTextEnv.instant``) is played here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Unpack

from skyasync.envs.base import BaseTextEnv, Conversation, Seen
from skyasync.envs.episodes import EnvSettings, Episodes, Limits, StepResult
from skyasync.envs.registry import EnvFactory, env_factory
from skyasync.envs.tools import ToolSchema, schemas
from skyasync.errors import TransientError
from skyasync.processes.calls import Answer, Call, Worker, key_of
from skyasync.processes.host import HEARTBEAT_S, within
from skyasync.processes.link import Link
from skyasync.processes.local import LocalHost
from skyasync.processes.pool import Pool


class EnvPool:
    """Spreads episodes over processes.

    Args:
        start: makes a process with ``Episodes`` of these settings; called again for each one that must be replaced.
        workers: how many there are at a time.
    """

    def __init__(self, start: Callable[[], Worker], workers: int, settings: EnvSettings) -> None:
        silence_s = HEARTBEAT_S + settings.step_timeout_s
        self.pool: Pool[Link] = Pool(lambda look_at: Link(start(), "the environment", silence_s, look_at), workers)
        self.pool.fill()
        self._env_config, self._played_here = settings.env_config, Episodes(settings)
        self._patience = settings.patience
        self._retries: dict[str, int] = {}  # by episode
        self._homes: dict[str, Link | None] = {}  # None: here
        self._keys: dict[str, str] = {}  # by episode: what it is called where it lives
        self._running: set[asyncio.Task[Answer]] = set()  # here
        self._openings: dict[str, tuple[Any, ...]] = {}  # of episodes that begin with their first step
        self._factories: dict[str, EnvFactory] = {}
        self._tools: dict[str, list[ToolSchema]] = {}

    def end(self) -> None:
        """Have the processes end, with whatever is being played in them."""
        for link in self.pool.let_go():
            link.worker.end()

    def takes_text(self, env_class: str) -> bool:
        """Whether these environments are given and give plain text (``raw_text``), not messages."""
        return getattr(self._factory(env_class), "raw_text", False)

    def tools(self, env_class: str) -> list[ToolSchema]:
        """What the model is told of these environments' tools, in OpenAI's form."""
        if env_class not in self._tools:
            self._tools[env_class] = schemas(self._factory(env_class))
        return self._tools[env_class]

    def sees_tokens(self, env_class: str, extras: dict[str, Any]) -> bool:
        """Whether such an episode is to be shown the tokens of each turn."""
        sees = getattr(self._factory(env_class), "sees_tokens", None)  # a function that makes environments has none
        return sees is not None and bool(sees(self._env_config, extras))

    def judged_by(self, env_class: str, extras: dict[str, Any]) -> list[tuple[str, float]]:
        """A row's reward functions with their weights, if judges that others ask are among them; else nothing."""
        judged_by = getattr(self._factory(env_class), "judged_by", None)
        return judged_by(self._env_config, extras) if judged_by is not None else []

    async def init(
        self, episode: str, env_class: str, extras: dict[str, Any], prompt: Conversation | str
    ) -> Conversation | str:
        """Begin an episode; returns the conversation (or text) it starts from."""
        factory = self._factory(env_class)
        home = self._homes[episode] = None if self._is_instant(factory, extras) else self.pool.take(episode)
        self._keys[episode] = key_of(episode)
        if home is not None:
            try:
                await home.load(env_class, env_class, factory)
            except Exception:
                self._leave(episode)
                raise
        if _begins_with_nothing(factory):
            self._openings[episode] = (env_class, extras, prompt)
            return prompt
        start: Conversation | str = (await self._ask("init", episode, env_class, extras, prompt)).result
        return start

    async def step(self, episode: str, action: str, seen: Seen | None = None) -> StepResult:
        answer = await self._ask("step", episode, action, seen, *self._openings.pop(episode, ()))
        result: StepResult = answer.result
        if result["done"]:
            if retries := self._retries.get(episode):
                result["metrics"] = result["metrics"] | {"retries": float(retries)}
            self._leave(episode)
        return result

    async def close(self, episode: str) -> dict[str, float]:
        """End an episode that is not done; ends nothing if it already has."""
        if episode not in self._homes:
            return {}
        metrics: dict[str, float] = (await self._ask("close", episode)).result
        self._leave(episode)
        return metrics

    def abandon(self, episode: str) -> None:
        """Have an episode closed without waiting for it; for episodes that have failed or been cancelled."""
        if episode not in self._homes:
            return
        home, key = self._homes[episode], self._keys[episode]
        if home is None:
            self._start(Call(0, "close", key, ()))
        else:
            future = home.post("close", key)
            future.add_done_callback(lambda closed: closed.cancelled() or closed.exception())  # nobody asks for it
        self._leave(episode)

    async def _ask(self, method: str, episode: str, *args: object) -> Answer:
        """The answer, if need be to one of several tries (of "close" to the first); behind the last the episode is
        over. An error that does not pass has ended the episode where it lives; one whose caller is cancelled goes on.
        """
        home, key = self._homes[episode], self._keys[episode]
        for number in count(1):
            try:
                if home is not None:
                    return Answer(0, await home.post(method, key, *args))
                call = Call(0, method, key, args)
                waits = self._played_here.is_async(call)
                answer = await (asyncio.shield(self._start(call)) if waits else self._played_here.run(call))
                if answer.error is None:
                    return answer
                raise answer.error
            except TransientError as error:
                if method == "close":
                    raise
                if not await self._patience.wait(number, f"the environment of {episode}", error):
                    self.abandon(episode)
                    raise
                self._retries[episode] = self._retries.get(episode, 0) + 1
            except Exception:
                self._leave(episode)
                raise
        raise AssertionError("unreachable")

    def _start(self, call: Call) -> asyncio.Task[Answer]:
        """A call that goes on whatever becomes of its caller."""
        task = asyncio.get_running_loop().create_task(within(None, self._played_here, call))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def _factory(self, name: str) -> EnvFactory:
        if name not in self._factories:
            self._factories[name] = env_factory(name)
            self._played_here.know(name, self._factories[name])
        return self._factories[name]

    def _is_instant(self, factory: EnvFactory, extras: dict[str, Any]) -> bool:
        instant = getattr(factory, "instant", None)  # a function that makes environments has none
        return instant is not None and bool(instant(self._env_config, extras))

    def _leave(self, episode: str) -> None:
        self._openings.pop(episode, None)
        self._retries.pop(episode, None)
        self._keys.pop(episode, None)
        link = self._homes.pop(episode, None)
        if link is not None:
            self.pool.give_back(link, episode)


def _begins_with_nothing(factory: EnvFactory) -> bool:
    """Whether the class has the beginning of ``BaseTextEnv``."""
    return all(getattr(factory, name, None) is getattr(BaseTextEnv, name) for name in ("__init__", "init"))


def local_pool(env_config: dict[str, Any] | None = None, workers: int = 1, **settings: Unpack[Limits]) -> EnvPool:
    """A pool inside this process, for single-process runs and virtual time.

    An environment's methods run on the caller's event loop: one that blocks blocks them all.
    """
    own = EnvSettings(env_config or {}, **settings)
    return EnvPool(lambda: LocalHost(Episodes(own), own.step_timeout_s), workers, own)


def ray_pool(settings: EnvSettings, workers: int, options: dict[str, Any] | None = None) -> EnvPool:
    """A pool of ``workers`` actors, ``options`` being Ray's for each."""
    from skyasync.processes.on_ray import RayHost

    make = partial(Episodes, settings)
    return EnvPool(lambda: RayHost(make, settings.step_timeout_s, settings.max_threads, options), workers, settings)
