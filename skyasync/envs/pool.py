"""The environments of a run, and the processes that play their episodes.

Invariant: an episode stays in one process from start to end and is closed exactly once: by the step
that is done, by an error in it, by ``close`` or by ``abandon``. An error in one episode reaches its
caller alone. The episodes of a process that is lost are lost with it.

Messages are saved where possible: an environment whose ``init`` does nothing starts with its first
step, and one that costs nothing (``BaseTextEnv.instant``) is played in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

from skyasync.envs import env_factory
from skyasync.envs.base import BaseTextEnv, Conversation, EnvConfig, Metrics, Row, TurnTokens
from skyasync.envs.episodes import EnvLimits, EnvSettings, Episodes, StepResult
from skyasync.errors import TransientError
from skyasync.models.images import images_of
from skyasync.utils.rpc import (
    HEARTBEAT_S,
    Answer,
    Call,
    LocalTransport,
    RayTransport,
    RpcClient,
    RpcPool,
    RpcTransport,
    key_of,
    within,
)


@dataclass(slots=True)
class _Route:
    """The process that plays an episode.

    Args:
        home: the process; None is this one.
        key: of the episode in its process.
        opening: further arguments of the first step, if the episode starts with it.
        retries: of steps with transient errors.
    """

    home: RpcClient | None
    key: str
    opening: tuple[Any, ...] = ()
    retries: int = 0


class EnvPool:
    """Spreads episodes over processes.

    Args:
        start: makes a process with ``Episodes`` of these settings; called again for each one that
            must be replaced.
        workers: the number of processes.
    """

    def __init__(
        self, start: Callable[[], RpcTransport], workers: int, settings: EnvSettings
    ) -> None:
        # A step that blocks the process's event loop delays the heartbeat by its time limit.
        silence_s = HEARTBEAT_S + settings.step_timeout_s
        self.pool = RpcPool(start, workers, "the environment", silence_s)
        self.pool.fill()
        self.env_config = settings.env_config
        self._local = Episodes(settings)
        self._patience = settings.patience
        self._routes: dict[str, _Route] = {}  # by episode
        # Tasks in this process. The event loop alone would not prevent their garbage collection.
        self._running: set[asyncio.Task[Answer]] = set()
        self._classes: dict[str, type[BaseTextEnv]] = {}

    def end(self) -> None:
        """Ask the processes to end, with their episodes in flight."""
        self.pool.end()

    def env_class(self, name: str) -> type[BaseTextEnv]:
        """The class of these environments."""
        if name not in self._classes:
            self._classes[name] = env_factory(name)
            self._local.add(name, self._classes[name])
        return self._classes[name]

    def plays_here(self, env_class: str, extras: Row) -> bool:
        """Whether episodes of this row are played in this process."""
        return self.env_class(env_class).instant(self.env_config, extras)

    def starts_from_prompt(self, env_class: str, prompt: Conversation | str) -> bool:
        """Whether episodes start from the prompt itself, so that no call of ``init`` is needed."""
        target = self.env_class(env_class)
        methods = (target.__new__, target.__init__, target.init)
        if methods != (BaseTextEnv.__new__, BaseTextEnv.__init__, BaseTextEnv.init):
            return False
        # With images ``init`` pays: the first steps would each send them, in a message of their
        # own, while the calls of ``init`` of a group leave in one message, which has them once.
        return not images_of(prompt)

    async def init(
        self, episode: str, env_class: str, extras: Row, prompt: Conversation | str
    ) -> Conversation | str:
        """Start an episode; returns the conversation (or text) that it starts from."""
        if self.starts_from_prompt(env_class, prompt):
            await self.init_group({episode: extras}, env_class, prompt)
            return prompt
        await self._take(episode, env_class, is_local=self.plays_here(env_class, extras))
        start: Conversation | str = await self._ask("init", episode, env_class, extras, prompt)
        return start

    async def init_group(
        self, extras: Mapping[str, Row], env_class: str, prompt: Conversation | str
    ) -> None:
        """Start episodes of one row that start from the prompt as it is.

        Args:
            extras: by episode.
        """
        is_local = self.plays_here(env_class, next(iter(extras.values())))
        for episode, row in extras.items():
            route = await self._take(episode, env_class, is_local=is_local)
            route.opening = (env_class, row, prompt)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Send the calls that are made inside at its end, in one message per process."""
        with self.pool.collecting():
            yield

    async def _take(self, episode: str, env_class: str, *, is_local: bool) -> _Route:
        """Choose the episode's process."""
        home = None if is_local else self.pool.take(episode)
        route = _Route(home, key_of(episode))
        self._routes[episode] = route
        if route.home is not None:
            try:
                # Once per process and class; further calls return at once.
                await route.home.load(env_class, env_class, self.env_class(env_class))
            except Exception:
                self._leave(episode)
                raise
        return route

    async def step(self, episode: str, action: str, seen: TurnTokens | None = None) -> StepResult:
        route = self._routes[episode]
        opening = route.opening
        route.opening = ()  # the environment exists after its first step
        result: StepResult = await self._ask("step", episode, action, seen, *opening)
        if result["done"]:
            if route.retries:
                result["metrics"] = result["metrics"] | {"retries": float(route.retries)}
            self._leave(episode)
        return result

    async def close(self, episode: str) -> Metrics:
        """End an episode that is not done; ends nothing if it already has."""
        if episode not in self._routes:
            return {}
        metrics: Metrics = await self._ask("close", episode)
        self._leave(episode)
        return metrics

    def abandon(self, episode: str) -> None:
        """Close an episode that has failed or been cancelled, without waiting for it."""
        if episode not in self._routes:
            return
        route = self._routes[episode]
        if route.home is None:
            self._start(Call(0, "close", route.key, ()))
        else:
            future = route.home.post("close", route.key)
            future.add_done_callback(_retrieve_exception)
        self._leave(episode)

    async def _ask(self, method: str, episode: str, *args: object) -> Any:  # noqa: ANN401
        """The result of a call of the episode's process.

        A call with a transient error is repeated, except "close"; if all tries fail the episode is
        over. Any other error has ended the episode in its process. A call whose caller is
        cancelled continues.
        """
        route = self._routes[episode]
        tries = 0
        while True:
            tries += 1
            try:
                if route.home is not None:
                    return await route.home.post(method, route.key, *args)
                call = Call(0, method, route.key, args)
                if self._local.is_async(call):
                    answer = await asyncio.shield(self._start(call))
                else:  # it never waits, so no cancellation can interrupt it
                    answer = await self._local.run(call)
                if answer.error is None:
                    return answer.result
                raise answer.error
            except TransientError as error:
                if method == "close":  # the episode is over in any case
                    raise
                if not await self._patience.wait(tries, f"the environment of {episode}", error):
                    self.abandon(episode)
                    raise
                route.retries += 1
            except Exception:
                self._leave(episode)
                raise

    def _start(self, call: Call) -> asyncio.Task[Answer]:
        """Start a call that continues if its caller is cancelled."""
        task = asyncio.get_running_loop().create_task(within(None, self._local, call))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def _leave(self, episode: str) -> None:
        route = self._routes.pop(episode, None)
        if route is not None and route.home is not None:
            self.pool.give_back(route.home, episode)


def _retrieve_exception(future: asyncio.Future[Any]) -> None:
    """Avoid asyncio's warning about an exception that no caller waits for."""
    if not future.cancelled():
        future.exception()


def local_pool(
    env_config: EnvConfig | None = None, workers: int = 1, **settings: Unpack[EnvLimits]
) -> EnvPool:
    """A pool inside this process, for single-process runs and virtual time.

    An environment's methods run on the caller's event loop: one that blocks blocks them all.
    """
    env_settings = EnvSettings(env_config or {}, **settings)

    def start() -> RpcTransport:
        return LocalTransport(Episodes(env_settings), env_settings.step_timeout_s)

    return EnvPool(start, workers, env_settings)


def ray_pool(settings: EnvSettings, workers: int) -> EnvPool:
    """A pool of ``workers`` actors."""
    make = partial(Episodes, settings)
    start = partial(RayTransport, make, settings.step_timeout_s, settings.max_threads)
    return EnvPool(start, workers, settings)
