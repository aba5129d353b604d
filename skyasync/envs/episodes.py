"""The environments of one process.

Invariant: an episode is closed exactly once: by the step that is done, by an error in it, by ``close``, or, if one of
its calls has been given up as hanging, by that call if it ever returns. Calls of one episode never overlap: ``close``
waits for the call that runs. What leaves this module has been checked: plain text, a finite reward, finite metrics.
"""

from __future__ import annotations

import contextlib
import inspect
import pickle
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from traceback import format_exc
from typing import Any, NamedTuple, TypedDict, cast

from skyasync.envs.base import BaseTextEnv, Conversation
from skyasync.envs.check import check_metrics, check_prompt, check_step
from skyasync.envs.registry import EnvFactory


class StepResult(TypedDict):
    """A checked step; ``metrics`` are the episode's, given with the step that is done."""

    observations: Conversation | str
    reward: float
    done: bool
    metrics: dict[str, float]
    sampling_params: dict[str, Any]


class Call(NamedTuple):
    """``method`` is "init", "step" or "close"; ``number`` is the caller's."""

    number: int
    method: str
    episode: str
    args: tuple[Any, ...]


class Answer(NamedTuple):
    """To the call with this number: a result, or the error in its place."""

    number: int
    result: Any
    error: Exception | None = None


@dataclass
class _Episode:
    env: BaseTextEnv
    busy: bool = False
    ended: bool = False  # to be closed by the call that runs, when it returns


class Episodes:
    """Holds environments by the name of their episode. Safe to use from several threads.

    Args:
        env_config: handed to every environment.
        max_observation_chars: a longer observation is an error of its environment.
    """

    def __init__(self, env_config: dict[str, Any], max_observation_chars: int) -> None:
        self._env_config = env_config
        self._max_observation_chars = max_observation_chars
        self._factories: dict[str, EnvFactory] = {}
        self._episodes: dict[str, _Episode] = {}
        self._lock = threading.Lock()

    def define(self, name: str, factory: EnvFactory) -> None:
        self._factories[name] = factory

    def is_async(self, call: Call) -> bool:
        """Whether this call's environment has ``async def`` methods, so that it belongs on an event loop."""
        if call.method == "init":
            return has_async_methods(self._factories[call.args[0]])
        episode = self._episodes.get(call.episode)
        return episode is not None and has_async_methods(episode.env)

    async def run(self, call: Call) -> Answer:
        """Carry out one call; never raises an ``Exception``."""
        try:
            return Answer(call.number, await getattr(self, f"_{call.method}")(call.episode, *call.args))
        except (Exception, SystemExit) as caught:
            error = caught if isinstance(caught, Exception) else RuntimeError(f"the environment raised {caught!r}")
            error.add_note(f"Raised by the environment of {call.episode}, in its process:\n{format_exc()}")
            with contextlib.suppress(Exception):  # the first error is the one to tell
                await self._end(call.episode)
            return Answer(call.number, None, portable(error))

    def give_up(self, name: str) -> None:
        """Forget an episode whose call hangs; that call closes it if it ever returns."""
        with self._lock:
            if episode := self._episodes.pop(name, None):
                episode.ended = True

    async def _init(self, name: str, env_class: str, extras: dict[str, Any], prompt: Any) -> Conversation | str:
        episode = _Episode(self._factories[env_class](env_config=self._env_config, extras=extras), busy=True)
        self._episodes[name] = episode
        try:
            start = await _result(episode.env.init(prompt))
        finally:
            await self._returned(name, episode)
        with _naming(name):
            return check_prompt(start, raw=episode.env.raw_text)

    async def _step(self, name: str, action: str) -> StepResult:
        episode = self._episodes[name]
        with self._lock:
            episode.busy = True
        try:
            output = await _result(episode.env.step(action))
        finally:
            await self._returned(name, episode)
        with _naming(name):
            step = check_step(output, raw=episode.env.raw_text, most_chars=self._max_observation_chars)
        metrics = await self._end(name) if step["done"] else {}
        return cast(StepResult, {**step, "metrics": metrics})

    async def _close(self, name: str) -> dict[str, float]:
        return await self._end(name)

    async def _returned(self, name: str, episode: _Episode) -> None:
        """A call has returned: whoever wanted to close its episode meanwhile left that to it."""
        with self._lock:
            episode.busy, ended = False, episode.ended
        if ended:
            self._episodes.pop(name, None)
            await _closed(episode.env)
            raise RuntimeError("the episode has been ended meanwhile")

    async def _end(self, name: str) -> dict[str, float]:
        """Close an episode and give its metrics; nothing if it has ended, or a call of it still runs."""
        with self._lock:
            episode = self._episodes.get(name)
            if episode is None:
                return {}
            if episode.busy:
                episode.ended = True
                return {}
            del self._episodes[name]
        return await _closed(episode.env)


@contextlib.contextmanager
def _naming(episode: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"the environment of {episode}: {error}") from None


async def _closed(env: BaseTextEnv) -> dict[str, float]:
    try:
        return check_metrics(env.get_metrics())
    finally:
        await _result(env.close())


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def has_async_methods(env: Any) -> bool:
    """Of an environment, or of the class that makes one."""
    return any(inspect.iscoroutinefunction(getattr(env, method, None)) for method in ("init", "step", "close"))


def drive(call: Call, coroutine: Coroutine[Any, Any, Answer]) -> Answer:
    """The answer of ``Episodes.run`` where there is no event loop, for environments that do not await."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        answer: Answer = ended.value
        return answer
    coroutine.close()
    problem = f"the environment of {call.episode} awaits, but its class has no async def among init, step and close"
    return Answer(call.number, None, TypeError(problem))


def overdue(call: Call, limit_s: float) -> TimeoutError:
    return TimeoutError(
        f"the environment of {call.episode} did not answer within {limit_s:g} s (environment.step_timeout_s)"
    )


def portable(error: Exception) -> Exception:
    """The error itself if it survives the way to another process, else one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        stand_in = RuntimeError(f"{type(error).__qualname__}: {error}")
        for note in getattr(error, "__notes__", ()):
            stand_in.add_note(note)
        return stand_in
    return error
