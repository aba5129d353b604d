"""The process that runs agent programs: many episodes at once, async ones on its event loop, others in threads.

Invariant: what leaves this process is JSON text that has been checked: a finite reward and finite metrics, or what went
wrong. A program knows its own episode's key and no other, and none of the variables that look like secrets.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import re
import threading
from collections.abc import Callable, Collection
from numbers import Real
from traceback import format_exception
from typing import Any

from skyasync.errors import UserError
from skyasync.registry import resolve_reference

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
THREAD = "agent program"
MOST_FRAMES = 20  # of a traceback, from its end


class AgentProcess:
    """Lives in a Ray actor, or in this process for tests.

    Args:
        program: ``generator.agent_program``.
        config: free settings, handed to programs that have a parameter ``config``.
    """

    def __init__(self, program: str, config: dict[str, Any]) -> None:
        self._reference, self._config = program, config
        self._program: Callable[..., Any] | None = None
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    def isolate(self, kept: Collection[str]) -> None:
        """Forget the environment variables that look like secrets; for a process of its own.

        Args:
            kept: those that programs may see.
        """
        for name in [name for name in os.environ if SECRET.search(name) and not name.startswith("RAY_")]:
            if name not in kept:
                del os.environ[name]

    async def load(self) -> str:
        """Import the program; the text of what is wrong with it, or nothing."""
        try:
            self._program = await asyncio.to_thread(load_program, self._reference)
        except UserError as error:
            return str(error)
        except BaseException as error:
            return f"generator.agent_program={self._reference} cannot be imported: {_story(error)}"
        return ""

    async def play(self, episode: str, data: dict[str, Any], base_url: str, api_key: str, is_eval: bool) -> str:
        """Run the program on one row; see ``read_score`` for what comes back."""
        assert self._program is not None
        offered = {"config": self._config, "is_eval": is_eval}
        arguments = {"base_url": base_url, "api_key": api_key, **_accepted(self._program, offered)}
        task = self._tasks[episode] = asyncio.ensure_future(_run(self._program, data, arguments))
        try:
            await asyncio.wait([task])
        finally:
            self._tasks.pop(episode, None)
        return _report(task)

    async def cancel(self, episode: str) -> None:
        """End an episode that nobody waits for any more; a thread goes on, without a key that works."""
        if task := self._tasks.get(episode):
            task.cancel()


def load_program(reference: str) -> Callable[..., Any]:
    """The function behind ``module:function``.

    Raises:
        UserError: if there is none, or it cannot be called with a row, a base URL and a key.
    """
    program = resolve_reference(reference, kind="generator.agent_program")
    try:
        inspect.signature(program).bind({}, base_url="", api_key="")
    except TypeError as error:
        raise UserError(
            f"generator.agent_program={reference} must be a function (data, base_url, api_key), sync or async, with "
            f"further parameters only from: config, is_eval ({error})"
        ) from error
    return program


def _accepted(program: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(program).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in offered.items() if takes_all or name in parameters}


async def _run(program: Callable[..., Any], data: dict[str, Any], arguments: dict[str, Any]) -> Any:
    try:
        if inspect.iscoroutinefunction(program):
            result = await program(data, **arguments)
        else:
            result = await _in_thread(lambda: program(data, **arguments))
            result = await result if inspect.isawaitable(result) else result
    except (SystemExit, KeyboardInterrupt) as error:  # these would end the process, and all that it plays
        raise RuntimeError(f"the program raised {type(error).__name__}: {error}") from error
    return check_score(result)


async def _in_thread(function: Callable[[], Any]) -> Any:
    """In a thread of its own, which may hang for ever without being in anyone's way."""
    loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def answer(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(result)

    def run() -> None:
        try:
            result, problem = function(), None
        except BaseException as error:
            # A future cannot carry this one.
            result, problem = None, RuntimeError(repr(error)) if isinstance(error, StopIteration) else error
        loop.call_soon_threadsafe(answer, result, problem)

    threading.Thread(target=run, daemon=True, name=THREAD).start()
    return await future


def check_score(result: Any) -> dict[str, Any]:
    """The reward and the metrics of what a program has returned.

    Raises:
        ValueError: if it is neither a finite number nor a dictionary with a finite ``reward``.
    """
    known = {"reward", "metrics"}
    if isinstance(result, dict) and (result.keys() - known or "reward" not in result):
        raise ValueError(
            f"the program returned a dictionary with {sorted(map(str, result))}; it takes reward and metrics"
        )
    score = result if isinstance(result, dict) else {"reward": result}
    metrics = score.get("metrics") or {}
    if not isinstance(metrics, dict):
        raise ValueError(f"the program returned metrics that are {type(metrics).__name__}; they must be a dictionary")
    return {
        "reward": _finite("reward", score["reward"]),
        "metrics": {str(name): _finite(f"metric {name}", value) for name, value in metrics.items()},
    }


def _finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"the program returned {value!r:.80} as its {name}; it must be a finite number")
    return float(value)


def _report(task: asyncio.Task[Any]) -> str:
    if task.cancelled():
        return json.dumps({"error": "the program was cancelled from within"})
    error = task.exception()
    return json.dumps(task.result() if error is None else {"error": _story(error), "kind": type(error).__qualname__})


def _story(error: BaseException) -> str:
    """What happened, the last frames included."""
    frames = "".join(format_exception(error, limit=-MOST_FRAMES))
    return f"{type(error).__qualname__}: {error}\n{frames}"
