"""The environments of one process.

Invariant: an episode is closed exactly once: by the step that is done, by an error in it, or by
``close``. If one of its calls was given up because it hangs, that call closes the episode if it
ever returns. A transient error of a step leaves the episode as it was. Calls of one episode never
overlap: ``close`` waits for the call that runs. All results have been checked: plain text, a finite
reward, finite metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from traceback import format_exc
from typing import Any, NamedTuple, TypedDict, cast

from skyasync.config.schema import Config
from skyasync.envs.base import (
    BaseTextEnv,
    Conversation,
    EnvConfig,
    InvalidEnvOutputError,
    Metrics,
    Row,
    TurnTokens,
    check_metrics,
    check_prompt,
    check_step,
)
from skyasync.errors import NonFiniteRewardError, TransientError
from skyasync.utils.rpc import Answer, Call, RetryPolicy, portable


class EnvSettings(NamedTuple):
    """Settings of environments, ``environment.*``.

    Args:
        step_timeout_s: of one call, in seconds.
        max_threads: threads at a time in one process.
        patience: tries of a call that raises transient errors.
    """

    env_config: EnvConfig
    step_timeout_s: float = 60.0
    max_threads: int = 512
    patience: RetryPolicy = RetryPolicy()

    @staticmethod
    def of(cfg: Config, env_config: EnvConfig) -> EnvSettings:
        """The settings of a run; ``env_config`` is passed to its environments."""
        environment = cfg.environment
        return EnvSettings(
            env_config=env_config,
            step_timeout_s=environment.step_timeout_s,
            max_threads=environment.max_threads,
            patience=RetryPolicy.of(environment),
        )


class EnvLimits(TypedDict, total=False):
    """Fields of ``EnvSettings`` by name."""

    step_timeout_s: float
    max_threads: int
    patience: RetryPolicy


class StepResult(TypedDict):
    """A checked step; ``metrics`` are the episode's, and empty before the step that is done."""

    observations: Conversation | str
    reward: float
    done: bool
    metrics: Metrics
    sampling_params: dict[str, Any]


@dataclass(slots=True)
class _Episode:
    env: BaseTextEnv
    busy: bool = True
    ended: bool = False  # the call that runs closes it when it returns


class Episodes:
    """A ``Service`` that holds environments by the key of their episode. Thread-safe.

    Its calls are "init", "step" and "close". A "step" that names a class and extras makes the
    environment first, if its ``init`` does nothing.
    """

    def __init__(self, settings: EnvSettings) -> None:
        self._settings = settings
        self._classes: dict[str, type[BaseTextEnv]] = {}
        self._episodes: dict[str, _Episode] = {}
        self._lock = threading.Lock()

    def load(self, name: str, env_class: type[BaseTextEnv]) -> None:
        """Make an environment known, and load what its episodes share."""
        env_class.load(self._settings.env_config)
        self.add(name, env_class)

    def add(self, name: str, env_class: type[BaseTextEnv]) -> None:
        """Make an environment known that has nothing to load."""
        self._classes[name] = env_class

    def is_async(self, call: Call) -> bool:
        """Whether this call's environment has ``async def`` methods, and needs an event loop."""
        # The name of the class, if the call makes the environment: see _init and _step.
        if call.method == "init":
            names = call.args[:1]
        else:
            names = call.args[2:3]
        if names:
            env_class = self._classes[names[0]]
        else:
            episode = self._episodes.get(call.key)  # one look: another thread may remove it
            if episode is None:
                return False
            env_class = type(episode.env)
        return _awaits(env_class)  # type: ignore[arg-type]  # a class can be hashed

    async def run(self, call: Call) -> Answer:
        methods: dict[str, Callable[..., Awaitable[object]]]
        methods = {"init": self._init, "step": self._step, "close": self._close}
        try:
            return Answer(call.number, await methods[call.method](call.key, *call.args))
        except asyncio.CancelledError:  # of this process, which ends: there is no one to answer
            raise
        except BaseException as caught:  # also SystemExit, which would end a thread or event loop
            name = f"the environment of {call.name}"
            error: Exception
            if isinstance(caught, InvalidEnvOutputError):
                error = ValueError(f"{name}: {caught}")
            elif isinstance(caught, NonFiniteRewardError):
                error = NonFiniteRewardError(f"{name}: {caught}")
            elif isinstance(caught, Exception):
                error = caught
            else:
                error = RuntimeError(f"{name} raised {caught!r}")
            error.add_note(f"Raised by {name}, in its process:\n{format_exc()}")
            error = self._settings.patience.as_transient(error)
            # After a transient error of a step the episode stays: the caller repeats or closes it.
            if not isinstance(error, TransientError) or call.method != "step":
                with contextlib.suppress(Exception):  # the error above is the one to report
                    await self._close(call.key)
            return Answer(call.number, None, portable(error))

    def overdue(self, call: Call) -> Exception:
        limit_s = self._settings.step_timeout_s
        return TimeoutError(
            f"the environment of {call.name} did not answer within {limit_s:g} s (environment.step_timeout_s)"
        )

    def give_up(self, name: str) -> None:
        """Forget an episode whose call hangs; that call closes it if it ever returns."""
        with self._lock:
            episode = self._episodes.pop(name, None)
            if episode:
                episode.ended = True

    async def _init(
        self, name: str, env_class: str, extras: Row, prompt: Conversation | str
    ) -> Conversation | str:
        episode = self._make(name, env_class, extras)
        start = await self._call(name, episode, lambda env: env.init(prompt))
        return check_prompt(start, raw=episode.env.raw_text)

    def _make(self, name: str, env_class: str, extras: Row) -> _Episode:
        env = self._classes[env_class](env_config=self._settings.env_config, extras=extras)
        episode = _Episode(env)
        self._episodes[name] = episode
        return episode

    async def _step(
        self,
        name: str,
        action: str,
        seen: TurnTokens | None = None,
        env_class: str = "",
        extras: Row | None = None,
        opening: Conversation | str = "",
    ) -> StepResult:
        if env_class and name not in self._episodes:
            episode = self._make(name, env_class, extras or {})
            episode.env.opening = opening
        else:
            episode = self._episodes[name]
        episode.busy = True
        if seen is not None:
            episode.env.seen = seen
        output = await self._call(name, episode, lambda env: env.step(action))
        step = check_step(output, raw=episode.env.raw_text)
        if step["done"]:
            step["metrics"] = await self._close(name)
        else:
            step["metrics"] = {}
        return cast(StepResult, step)

    async def _call(
        self, name: str, episode: _Episode, method: Callable[[BaseTextEnv], Any]
    ) -> Any:  # noqa: ANN401
        """The return value of a method of the environment.

        If the episode was ended meanwhile, it is closed, and an error is raised.
        """
        try:
            result = method(episode.env)
            if inspect.isawaitable(result):
                result = await result
        finally:
            with self._lock:  # against ``_close`` and ``give_up``, which other threads may run
                episode.busy = False
                ended = episode.ended
                if ended:
                    self._episodes.pop(name, None)
            if ended:
                await _close_env(episode.env)
        if ended:
            raise RuntimeError("the episode was ended meanwhile")
        return result

    async def _close(self, name: str) -> Metrics:
        """Close an episode; returns its metrics, or none if it has ended or a call still runs."""
        with self._lock:
            episode = self._episodes.get(name)
            if episode is None:
                return {}
            if episode.busy:  # calls of one episode must not overlap
                episode.ended = True
                return {}
            del self._episodes[name]
        return await _close_env(episode.env)


@cache
def _awaits(env_class: type[BaseTextEnv]) -> bool:
    methods = (env_class.init, env_class.step, env_class.close)
    return any(map(inspect.iscoroutinefunction, methods))


async def _close_env(env: BaseTextEnv) -> Metrics:
    """Close an environment, also if its metrics raise; returns the metrics."""
    try:
        return check_metrics(env.get_metrics())
    finally:
        closing = env.close()
        if inspect.isawaitable(closing):
            await closing
