"""Agent programs, in processes of their own: many episodes at once, async ones on an event loop,
others in threads.

Invariant: an episode ends with its score or with an error that is its own: the program's, its time
limit's, or that of its process, which is then replaced. A process that cannot end an episode is
killed; its other episodes fail with a ``ProcessLostError`` and may be played again. What leaves a
process has been checked: a finite reward and finite metrics, or text that says what went wrong. A
program knows its own episode's key and no other, and none of the environment variables that look
like secrets.
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
MOST_METRICS = 256
MOST_FRAMES = 20  # of a traceback, from its end


class AgentError(Exception):
    """A program failed: the episode's own fault."""


class PassingAgentError(AgentError):
    """A program failed in a way that may succeed later."""


class NonFiniteAgentError(AgentError):
    """The reward that it returned is NaN or infinite."""


@dataclass(frozen=True)
class AgentScore:
    """What a program has returned: the episode's reward, or (in ``rewards``) that of each call by
    its answer's id.

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
    if (
        isinstance(result, dict)
        and result
        and all(str(name).startswith(ANSWER_IDS) for name in result)
    ):
        return AgentScore(
            rewards={
                str(name): _finite(f"reward of {name}", value) for name, value in result.items()
            }
        )
    known = {"reward", "metrics"}
    if isinstance(result, dict) and (result.keys() - known or "reward" not in result):
        raise ValueError(
            f"the program returned a dictionary with {sorted(map(str, result))}; it takes reward and metrics"
        )
    score = result if isinstance(result, dict) else {"reward": result}
    metrics = score.get("metrics") or {}
    if not isinstance(metrics, dict):
        raise ValueError(
            f"the program returned metrics that are {type(metrics).__name__}; they must be a dictionary"
        )
    if len(metrics) > MOST_METRICS:
        raise ValueError(
            f"the program returned {len(metrics)} metrics; there may be {MOST_METRICS}"
        )
    return AgentScore(
        _finite("reward", score["reward"]),
        {str(name): _finite(f"metric {name}", value) for name, value in metrics.items()},
    )


def _finite(name: str, value: object) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, Real)
        or not abs(cast(float, value)) <= LARGEST
    ):
        kind = (
            NonFiniteRewardError
            if isinstance(value, Real) and not isinstance(value, bool)
            else ValueError
        )
        raise kind(
            f"the program returned {value!r:.80} as its {name:.200}; it must be a finite number of float32"
        )
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
            for name in [
                name for name in os.environ if SECRET.search(name) and not name.startswith("RAY_")
            ]:
                if name not in allowed:
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
            UserError: if that cannot be done, or it is none.
        """
        try:
            self._program = load_program(self._reference, self._config)
        except UserError:
            raise
        except BaseException as error:
            problem = (
                f"generator.agent_program={self._reference} cannot be imported: {_traceback(error)}"
            )
            raise UserError(problem) from None

    def is_async(self, call: Call) -> bool:
        return True

    async def run(self, call: Call) -> Answer:
        if (
            call.method == "close"
        ):  # an abandoned episode; a thread goes on, with a key that is invalid
            task = self._playing.get(call.key)
            if task:
                task.cancel()
            return Answer(call.number, None)
        task = self._playing[call.key] = asyncio.create_task(self._play(*call.args))
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            self._playing.pop(call.key, None)
        if task.cancelled():
            return Answer(
                call.number, None, AgentError(f"{call.name}: the program was cancelled from within")
            )
        error = task.exception()
        if error:
            kind = PassingAgentError if self._patience.is_transient(error) else AgentError
            kind = NonFiniteAgentError if isinstance(error, NonFiniteRewardError) else kind
            return Answer(call.number, None, kind(f"{call.name}: {_traceback(error)}"))
        return Answer(call.number, task.result())

    def overdue(self, call: Call) -> Exception:
        return TimeoutError(f"the agent program of {call.name} could not be ended")

    def give_up(self, key: str) -> None:
        self._playing.pop(key, None)

    async def _play(
        self, data: dict[str, Any], base_url: str, api_key: str, is_eval: bool
    ) -> AgentScore:
        program = self._program
        assert program is not None
        more = accepted(program, {"config": self._config, "is_eval": is_eval})
        call = partial(program, data, base_url=base_url, api_key=api_key, **more)

        def call_in_thread() -> object:
            try:
                return call()
            except StopIteration as error:  # a future cannot carry this one
                raise RuntimeError(repr(error)) from error

        try:
            if inspect.iscoroutinefunction(program):
                return check_score(await call())
            result = await asyncio.get_running_loop().run_in_executor(self._threads, call_in_thread)
            return check_score(await result if inspect.isawaitable(result) else result)
        except (
            SystemExit,
            KeyboardInterrupt,
        ) as error:  # these would end the process, and all its episodes
            raise RuntimeError(f"the program raised {type(error).__name__}: {error}") from error


def load_program(reference: str, settings: dict[str, Any] | None = None) -> Callable[..., Any]:
    """The function at ``module:function``, or one that calls ``run`` of the class there.

    Args:
        settings: a class is created with those of them that it takes.

    Raises:
        UserError: if there is none, or it cannot be called with a row, a base URL and a key.
    """
    program = resolve_reference(reference, kind="generator.agent_program")
    if inspect.isclass(program) and callable(getattr(program, "run", None)):
        return other_frameworks().agent_program(program, settings or {})
    try:
        inspect.signature(program).bind({}, base_url="", api_key="")
    except TypeError as error:
        raise UserError(
            f"generator.agent_program={reference} must be a function (data, base_url, api_key), sync or async, with "
            f"further parameters only from: config, is_eval ({error})"
        ) from error
    return program


def _traceback(error: BaseException) -> str:
    frames = "".join(format_exception(error, limit=-MOST_FRAMES))
    return f"{type(error).__qualname__}: {error}\n{frames}"


# ---------------------------------------------------------------- in the controller


class AgentPool:
    """Spreads episodes over processes.

    Args:
        start: starts a process with an ``AgentProcess``; called again for each one that must be
            replaced.
        count: how many there are.
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
            # Its end is not waited for; a process that cannot end it is killed.
            process.post("close", key).add_done_callback(
                lambda closed: (
                    process.kill() if not closed.cancelled() and closed.exception() else None
                )
            )
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
    """Starts an ``AgentProcess`` in a Ray actor: on this machine if the endpoint's ``host`` is its
    loopback."""

    def start() -> RpcTransport:
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
