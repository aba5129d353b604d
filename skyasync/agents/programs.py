"""Agent programs in processes of their own, with many episodes at once.

Async programs run on an event loop, others in threads.

Invariant: an episode ends with its score or with an error that is its own: the program's, its time
limit's, or that of its process, which is then replaced. A process that cannot end an episode is
killed; its other episodes fail with a ``ProcessLostError`` and may be played again. A process sends
checked results alone: a finite reward and finite metrics, or the text of an error. A program knows
its own episode's key and no other, and none of the environment variables that look like secrets.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from traceback import format_exception
from typing import Any, cast

from skyasync.errors import NonFiniteRewardError, UserError
from skyasync.other_frameworks import other_frameworks
from skyasync.registry import accepted, resolve_reference
from skyasync.utils.rpc import (
    CLOSE_S,
    HEARTBEAT_S,
    Answer,
    Call,
    RayTransport,
    RetryPolicy,
    RpcPool,
    RpcTransport,
    key_of,
)

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
THREAD = "agent program"
MOST_THREADS = 100_000  # more than there are episodes: a thread that hangs for ever blocks no other
ANSWER_IDS = ("chatcmpl-", "cmpl-", "msg-", "resp-")  # beginnings of the ids of answers
LARGEST = 3.4e38  # that float32 holds
MOST_METRICS = 256  # of one episode: all become metrics of the run
MOST_FRAMES = 20  # of a traceback, from its end


class AgentError(Exception):
    """A program failed: the episode's own fault."""


class PassingAgentError(AgentError):
    """A program failed in a way that may succeed later."""


class NonFiniteAgentError(AgentError):
    """The reward that it returned is NaN or infinite."""


@dataclass(frozen=True)
class AgentScore:
    """The result of a program: the reward of the episode, or of calls (``rewards``) by answer id.

    Calls in ``left_out`` are not trained: the program says that they are no part of the episode.
    """

    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()


def check_score(result: object) -> AgentScore:
    """The score that a program has returned.

    Raises:
        ValueError: if it is neither a finite number, nor a dictionary with a finite ``reward``, nor
            one of a finite reward per answer's id.
    """
    if isinstance(result, AgentScore):
        return result
    if not isinstance(result, dict):
        return AgentScore(_finite("reward", result))
    if result and all(str(name).startswith(ANSWER_IDS) for name in result):
        rewards = {str(name): _finite(f"reward of {name}", value) for name, value in result.items()}
        return AgentScore(rewards=rewards)
    if result.keys() - {"reward", "metrics"} or "reward" not in result:
        raise ValueError(
            f"the program returned a dictionary with {sorted(map(str, result))}; it takes reward and metrics"
        )
    metrics = result.get("metrics") or {}
    if not isinstance(metrics, dict):
        raise ValueError(
            f"the program returned metrics that are {type(metrics).__name__}; they must be a dictionary"
        )
    if len(metrics) > MOST_METRICS:
        raise ValueError(
            f"the program returned {len(metrics)} metrics; there may be {MOST_METRICS}"
        )
    reward = _finite("reward", result["reward"])
    checked = {str(name): _finite(f"metric {name}", value) for name, value in metrics.items()}
    return AgentScore(reward, checked)


def _finite(name: str, value: object) -> float:
    """The number. Raises ``ValueError`` for another type, its subclass for a number out of range."""
    problem = f"the program returned {value!r:.80} as its {name:.200}; it must be a finite number of float32"
    if isinstance(value, bool) or not isinstance(value, Real):  # True is a number in Python
        raise ValueError(problem)
    if not abs(cast(float, value)) <= LARGEST:  # also for NaN
        raise NonFiniteRewardError(problem)
    return float(value)


# ---------------------------------------------------------------- in the process


class AgentProcess:
    """A ``Service`` whose calls are "play" and "close"; they run on one event loop.

    Args:
        program: ``generator.agent_program``.
        config: free settings, for programs with a parameter ``config``.
        allowed: in a process of its own, variables that programs may see though they look like
            secrets.
        patience: says which errors are transient.
    """

    def __init__(
        self,
        program: str,
        config: dict[str, Any],
        allowed: Collection[str] | None = None,
        patience: RetryPolicy = RetryPolicy(),  # noqa: B008  (frozen)
    ) -> None:
        if allowed is not None:
            for name in list(os.environ):
                # Ray's own variables are needed by its worker in this process.
                is_secret = SECRET.search(name) and not name.startswith("RAY_")
                if is_secret and name not in allowed:
                    del os.environ[name]
        self._reference = program
        self._config = config
        self._patience = patience
        self._program: Callable[..., Any] | None = None
        self._playing: dict[str, asyncio.Task[AgentScore]] = {}
        self._threads = ThreadPoolExecutor(MOST_THREADS, THREAD)

    def load(self) -> None:
        """Import the program.

        Raises:
            UserError: if it cannot be imported, or is no program.
        """
        try:
            self._program = load_program(self._reference, self._config)
        except UserError:
            raise
        except BaseException as error:  # a module may call sys.exit
            problem = (
                f"generator.agent_program={self._reference} cannot be imported: {_traceback(error)}"
            )
            raise UserError(problem) from None

    def is_async(self, call: Call) -> bool:
        return True

    async def run(self, call: Call) -> Answer:
        if call.method == "close":  # the episode is abandoned
            task = self._playing.get(call.key)
            if task:
                task.cancel()  # a thread continues, with a key that is invalid
            return Answer(call.number, None)
        task = asyncio.create_task(self._play(*call.args))
        self._playing[call.key] = task
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            self._playing.pop(call.key, None)
        if task.cancelled():
            cancelled = AgentError(f"{call.name}: the program was cancelled from within")
            return Answer(call.number, None, cancelled)
        error = task.exception()
        if error:
            # As text: an exception of a program may not be picklable.
            return Answer(call.number, None, self._kind(error)(f"{call.name}: {_traceback(error)}"))
        return Answer(call.number, task.result())

    def _kind(self, error: BaseException) -> type[AgentError]:
        """The class of error that an error of the program is reported as."""
        if isinstance(error, NonFiniteRewardError):
            return NonFiniteAgentError
        if self._patience.is_transient(error):
            return PassingAgentError
        return AgentError

    def overdue(self, call: Call) -> Exception:
        return TimeoutError(f"the agent program of {call.name} could not be ended")

    def give_up(self, key: str) -> None:
        self._playing.pop(key, None)

    async def _play(
        self, data: dict[str, Any], base_url: str, api_key: str, is_eval: bool
    ) -> AgentScore:
        program = self._program
        assert program is not None
        options = accepted(program, {"config": self._config, "is_eval": is_eval})
        call = partial(program, data, base_url=base_url, api_key=api_key, **options)

        def call_in_thread() -> object:
            try:
                return call()
            except StopIteration as error:  # a future cannot carry this one
                raise RuntimeError(repr(error)) from error

        try:
            if inspect.iscoroutinefunction(program):
                return check_score(await call())
            result = await asyncio.get_running_loop().run_in_executor(self._threads, call_in_thread)
            if inspect.isawaitable(result):  # a function that returns a coroutine
                result = await result
            return check_score(result)
        except (SystemExit, KeyboardInterrupt) as error:
            # These would end the process, and all its episodes.
            raise RuntimeError(f"the program raised {type(error).__name__}: {error}") from error


def load_program(reference: str, settings: dict[str, Any] | None = None) -> Callable[..., Any]:
    """The function at ``module:function``, or one that calls ``run`` of the class there.

    Args:
        settings: a class is created with the settings that it takes.

    Raises:
        UserError: if there is none, or it cannot be called with a row, a base URL and a key.
    """
    program = resolve_reference(reference, kind="generator.agent_program")
    if inspect.isclass(program) and callable(getattr(program, "run", None)):
        return other_frameworks().agent_program(program, settings or {})
    try:  # now: an error of every episode would be found late
        inspect.signature(program).bind({}, base_url="", api_key="")
    except TypeError as error:
        raise UserError(
            f"generator.agent_program={reference} must be a function (data, base_url, api_key), sync or async, with "
            f"further parameters only from: config, is_eval ({error})"
        ) from error
    return program


def _traceback(error: BaseException) -> str:
    """The error in one line, and its frames."""
    frames = "".join(format_exception(error, limit=-MOST_FRAMES))
    return f"{type(error).__qualname__}: {error}\n{frames}"


# ---------------------------------------------------------------- in the controller


class AgentPool:
    """Spreads episodes over processes.

    Args:
        start: starts a process with an ``AgentProcess``, also to replace one.
        count: number of processes.
    """

    def __init__(self, start: Callable[[], RpcTransport], count: int = 1) -> None:
        self.pool = RpcPool(start, count, "the agent program", HEARTBEAT_S + CLOSE_S)

    async def play(
        self,
        episode: str,
        data: dict[str, Any],
        base_url: str,
        api_key: str,
        *,
        is_eval: bool,
        timeout_s: float,
    ) -> AgentScore:
        """Run the program on one row; ``timeout_s=0`` is no limit.

        Raises:
            UserError: if the program cannot be loaded.
            AgentError: if it raises an error, takes too long, or returns no score.
            ProcessLostError: if its process fails.
        """
        process = self.pool.take(episode)
        key = key_of(episode)
        try:
            await process.load("program")
            async with asyncio.timeout(timeout_s or None):
                score: AgentScore = await process.post(
                    "play", key, data, base_url, api_key, is_eval
                )
                return score
        except (TimeoutError, asyncio.CancelledError) as error:

            def kill_if_stuck(closed: asyncio.Future[Any]) -> None:
                if not closed.cancelled() and closed.exception():
                    process.kill()

            # Its end is not waited for; a process that cannot end it is killed.
            process.post("close", key).add_done_callback(kill_if_stuck)
            if isinstance(error, asyncio.CancelledError):
                raise
            problem = (
                f"the program did not end within {timeout_s:g} s (generator.episode_timeout_s)"
            )
            raise AgentError(f"{episode}: {problem}") from None
        finally:
            self.pool.give_back(process, episode)

    async def close(self) -> None:
        """Kill all processes."""
        self.pool.close()


def ray_processes(
    program: str,
    config: dict[str, Any],
    allowed: list[str],
    host: str,
    patience: RetryPolicy = RetryPolicy(),  # noqa: B008  (frozen)
) -> Callable[[], RpcTransport]:
    """A function that starts an ``AgentProcess`` in a Ray actor.

    Args:
        host: of the endpoint; if it is the loopback, the process is on this machine.
    """

    def start() -> RpcTransport:
        # Imported here: episodes can be played without Ray.
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options: dict[str, Any] = {}
        if host.startswith("127.") or host in ("localhost", "::1"):
            node = ray.get_runtime_context().get_node_id()
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        return RayTransport(
            partial(AgentProcess, program, config, allowed, patience), 0.0, options=options
        )

    return start
