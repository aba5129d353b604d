"""Environments in processes of their own.

Invariant: an episode lives in one worker from ``init`` to its end and is closed exactly once: by the step that
is done, by an error in it, by ``close`` or by ``abandon``. An error in one episode reaches its caller alone. A worker
in which too many calls hang gets no new episodes: another one takes its place, and it is ended when its last episode
has; a worker that is lost takes its episodes with it, and is replaced at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skyasync.envs.base import Conversation
from skyasync.envs.episodes import StepResult
from skyasync.envs.link import Worker, WorkerLink
from skyasync.envs.local import LocalWorker
from skyasync.envs.registry import EnvFactory, env_factory
from skyasync.envs.tools import ToolSchema, schemas
from skyasync.envs.worker import HEARTBEAT_S, WorkerSettings

MOST_HUNG = 4  # calls that may hang in a worker before it is replaced


class EnvPool:
    """Spreads episodes over workers.

    Args:
        start_worker: makes a worker; called again for each one that must be replaced.
        workers: how many there are at a time.
        step_timeout_s: what the workers allow a call; one that is silent for longer is lost.
    """

    def __init__(self, start_worker: Callable[[], Worker], workers: int, step_timeout_s: float = 60.0) -> None:
        self._start_worker = start_worker
        self._silence_s = HEARTBEAT_S + step_timeout_s
        self._links = [self._new_link() for _ in range(workers)]
        self._homes: dict[str, WorkerLink] = {}
        self._factories: dict[str, EnvFactory] = {}
        self._tools: dict[str, list[ToolSchema]] = {}
        self._next = 0
        self.replaced = 0  # workers

    def takes_text(self, env_class: str) -> bool:
        """Whether these environments are given and give plain text (``raw_text``), not messages."""
        return getattr(self._factory(env_class), "raw_text", False)

    def tools(self, env_class: str) -> list[ToolSchema]:
        """What the model is told of these environments' tools, in OpenAI's form."""
        if env_class not in self._tools:
            self._tools[env_class] = schemas(self._factory(env_class))
        return self._tools[env_class]

    async def init(self, episode: str, env_class: str, extras: dict[str, Any], prompt: Any) -> Conversation | str:
        """Begin an episode; returns the conversation (or text) it starts from."""
        factory = self._factory(env_class)
        self._next = (self._next + 1) % len(self._links)
        link = self._homes[episode] = self._links[self._next - 1]
        link.episodes.add(episode)
        try:
            await link.define(env_class, factory)
            start: Conversation | str = await link.post("init", episode, env_class, extras, prompt)
            return start
        except Exception:
            self._leave(episode)
            raise

    async def step(self, episode: str, action: str) -> StepResult:
        try:
            result: StepResult = await self._homes[episode].post("step", episode, action)
        except Exception:  # its worker has closed it; an episode whose caller is cancelled goes on until ``abandon``
            self._leave(episode)
            raise
        if result["done"]:
            self._leave(episode)
        return result

    async def close(self, episode: str) -> dict[str, float]:
        """End an episode that is not done; ends nothing if it already has."""
        if episode not in self._homes:
            return {}
        try:
            metrics: dict[str, float] = await self._homes[episode].post("close", episode)
        except Exception:
            self._leave(episode)
            raise
        self._leave(episode)
        return metrics

    def abandon(self, episode: str) -> None:
        """Have an episode closed without waiting for it; for episodes that have failed or been cancelled."""
        if episode in self._homes:
            future = self._homes[episode].post("close", episode)
            future.add_done_callback(lambda closed: closed.cancelled() or closed.exception())  # nobody asks for it
            self._leave(episode)

    def _factory(self, name: str) -> EnvFactory:
        if name not in self._factories:
            self._factories[name] = env_factory(name)
        return self._factories[name]

    def _leave(self, episode: str) -> None:
        link = self._homes.pop(episode, None)
        if link is not None:
            link.episodes.discard(episode)
            self._look_at(link)

    def _new_link(self) -> WorkerLink:
        return WorkerLink(self._start_worker(), self._silence_s, self._look_at)

    def _look_at(self, link: WorkerLink) -> None:
        """Replace a worker that is lost or stuck; end one that was replaced and is needed no more."""
        if link in self._links:
            if link.lost is not None or link.hung >= MOST_HUNG:
                self._links[self._links.index(link)] = self._new_link()
                self.replaced += 1
        elif link.idle and link.lost is None:
            link.kill()


def local_pool(env_config: dict[str, Any] | None = None, workers: int = 1, **settings: Any) -> EnvPool:
    """A pool inside this process, for single-process runs and virtual time.

    An environment's methods run on the caller's event loop: one that blocks blocks them all.
    """
    own = WorkerSettings(env_config or {}, **settings)
    return EnvPool(lambda: LocalWorker(own), workers, own.step_timeout_s)
