"""Environments in processes of their own.

Invariant: an episode lives in one worker from ``init`` to its end and is closed exactly once: by the step that
is done, by an error in it, by ``close`` or by ``abandon``. An error in one episode reaches its caller alone. Calls
made in one turn of the event loop travel to a worker in one message.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from numbers import Real
from traceback import format_exc
from typing import Any, TypedDict

from skyasync.envs.base import BaseTextEnv, BaseTextEnvStepOutput, Conversation
from skyasync.envs.registry import EnvFactory, env_factory


class StepResult(BaseTextEnvStepOutput):
    """``metrics`` are the episode's, given with the step that is done."""

    metrics: dict[str, float]


class _Call(TypedDict):
    method: str
    episode: str
    args: tuple[Any, ...]


class EnvWorker:
    """Holds the episodes of one process."""

    def __init__(self, env_config: dict[str, Any]) -> None:
        self._env_config = env_config
        self._factories: dict[str, EnvFactory] = {}
        self._episodes: dict[str, BaseTextEnv] = {}

    def define(self, name: str, factory: EnvFactory) -> None:
        self._factories[name] = factory

    def run(self, calls: list[_Call]) -> list[tuple[Any, Exception | None]]:
        """Each call's result or error, in order."""
        return [self._run_one(call) for call in calls]

    def _run_one(self, call: _Call) -> tuple[Any, Exception | None]:
        try:
            return getattr(self, f"_{call['method']}")(call["episode"], *call["args"]), None
        except Exception as error:
            error.add_note(f"Raised by the environment of {call['episode']}, in its process:\n{format_exc()}")
            with contextlib.suppress(Exception):  # the first error is the one to tell
                self._close(call["episode"])
            return None, error

    def _init(self, episode: str, name: str, extras: dict[str, Any], prompt: Conversation) -> Conversation:
        env = self._factories[name](env_config=self._env_config, extras=extras)
        self._episodes[episode] = env
        return env.init(prompt)[0]

    def _step(self, episode: str, action: str) -> StepResult:
        env = self._episodes[episode]
        output = env.step(action)
        _check_reward(output["reward"], episode)
        metrics = self._close(episode) if output["done"] else {}
        return {**output, "metrics": metrics}

    def _close(self, episode: str) -> dict[str, float]:
        env = self._episodes.pop(episode, None)
        if env is None:
            return {}
        try:
            return env.get_metrics()
        finally:
            env.close()


def _check_reward(reward: Any, episode: str) -> None:
    if isinstance(reward, bool) or not isinstance(reward, Real) or not math.isfinite(reward):
        raise ValueError(f"the reward of {episode} is {reward!r}; it must be a finite number")


WorkerCall = Callable[..., Awaitable[Any]]


class EnvPool:
    """Spreads episodes over workers.

    Args:
        workers: one function per worker: ``await call(method, *args)`` runs an ``EnvWorker``'s method there.
        step_timeout_s: how long a message of calls may take; then ``TimeoutError`` names its first episode.
    """

    def __init__(self, workers: list[WorkerCall], step_timeout_s: float = 60.0) -> None:
        self._workers = workers
        self._step_timeout_s = step_timeout_s
        self._defined: dict[str, asyncio.Task[None]] = {}
        self._outbox: dict[int, list[tuple[_Call, asyncio.Future[Any]]]] = {}
        self._homes: dict[str, int] = {}
        self._next_home = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def init(self, episode: str, env_class: str, extras: dict[str, Any], prompt: Conversation) -> Conversation:
        """Begin an episode; returns the conversation it starts from."""
        await self._define(env_class)
        self._homes[episode] = self._next_home
        self._next_home = (self._next_home + 1) % len(self._workers)
        return await self._call("init", episode, env_class, extras, prompt)

    async def step(self, episode: str, action: str) -> StepResult:
        result: StepResult = await self._call("step", episode, action)
        if result["done"]:
            self._homes.pop(episode, None)
        return result

    async def close(self, episode: str) -> dict[str, float]:
        """End an episode that is not done; ends nothing if it already has."""
        if episode not in self._homes:
            return {}
        metrics = await self._call("close", episode)
        self._homes.pop(episode, None)
        return metrics

    def abandon(self, episode: str) -> None:
        """Have an episode closed without waiting for it; for episodes that have failed or been cancelled."""
        home = self._homes.pop(episode, None)
        if home is not None:
            future = self._post(home, "close", episode)
            future.add_done_callback(lambda closed: closed.cancelled() or closed.exception())  # nobody asks for it

    async def _define(self, name: str) -> None:
        if name not in self._defined:
            factory = env_factory(name)
            self._defined[name] = asyncio.ensure_future(self._define_everywhere(name, factory))
        await asyncio.shield(self._defined[name])

    async def _define_everywhere(self, name: str, factory: EnvFactory) -> None:
        async with asyncio.timeout(self._step_timeout_s):
            await asyncio.gather(*(call("define", name, factory) for call in self._workers))

    async def _call(self, method: str, episode: str, *args: Any) -> Any:
        try:
            return await self._post(self._homes[episode], method, episode, *args)
        except Exception:  # its worker has closed it; an episode whose caller is cancelled goes on until ``abandon``
            self._homes.pop(episode, None)
            raise

    def _post(self, home: int, method: str, episode: str, *args: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if home not in self._outbox:
            self._outbox[home] = []
            asyncio.get_running_loop().call_soon(self._dispatch, home)
        self._outbox[home].append(({"method": method, "episode": episode, "args": args}, future))
        return future

    def _dispatch(self, home: int) -> None:
        task = asyncio.get_running_loop().create_task(self._carry(home, self._outbox.pop(home)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, home: int, letters: list[tuple[_Call, asyncio.Future[Any]]]) -> None:
        try:
            async with asyncio.timeout(self._step_timeout_s):
                answers = await self._workers[home]("run", [call for call, _ in letters])
        except Exception as error:
            answers = [(None, _explain(error, letters[0][0]["episode"], self._step_timeout_s))] * len(letters)
        for (_, future), (result, problem) in zip(letters, answers, strict=True):
            with contextlib.suppress(asyncio.InvalidStateError):  # its caller may have been cancelled
                if problem is None:
                    future.set_result(result)
                else:
                    future.set_exception(problem)


def _explain(error: Exception, episode: str, limit_s: float) -> Exception:
    if isinstance(error, TimeoutError):
        return TimeoutError(
            f"the environments of {episode} and the episodes stepped with it did not answer within {limit_s:g} s "
            f"(environment.step_timeout_s)"
        )
    return error


def local_pool(env_config: dict[str, Any] | None = None, workers: int = 1) -> EnvPool:
    """A pool inside this process, for single-process runs and virtual time."""

    def caller(worker: EnvWorker) -> WorkerCall:
        async def call(method: str, *args: Any) -> Any:
            return getattr(worker, method)(*args)

        return call

    return EnvPool([caller(EnvWorker(env_config or {})) for _ in range(workers)])
