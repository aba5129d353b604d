"""Reward functions and how they are called: several on one response, each within its time limit.

Functions that are marked as quick are called directly. Coroutines run concurrently on an event loop
of their own. All others run in reward workers, which are subprocesses, since they read what a model
wrote. So it works in any thread, also in one that runs an event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from skyasync.errors import RAISED_BY, UserError, nearest
from skyasync.rewards import capabilities_of, find
from skyasync.rewards.signature import BY_NAME, Score, Signature, call, read_result, signature_of
from skyasync.utils.rpc import GRACE_S
from skyasync.utils.rpc_server import separate_limit
from skyasync.utils.subprocess_worker import NoAnswerError, SubprocessPool

log = logging.getLogger(__name__)

REWARD_WORKERS = 8  # at most: a response that takes its whole limit must not hold up all others


@dataclass(frozen=True)
class RewardFunction:
    """A reward function, ready to be called.

    Args:
        named: its parameters.
        needs: those of them without a default.
        takes_all: it has a parameter such as ``**extra``.
        portable: for a reward worker, if it is called there.
    """

    name: str
    function: Callable[..., Any]
    named: frozenset[str]
    needs: frozenset[str]
    takes_all: bool
    asynchronous: bool
    quick: bool
    portable: bytes
    signature: Signature

    @classmethod
    def of(cls, reference: str, function: Callable[..., Any] | None = None) -> RewardFunction:
        """The function behind a name.

        Raises:
            UserError: if there is none, or it takes arguments without names.
        """
        function = find(reference) if function is None else function
        if not callable(function):
            raise UserError(f"reward function {reference!r} cannot be called: it is {function!r}")
        parameters = inspect.signature(function).parameters.values()
        unnamed = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
        if unnamed:
            raise UserError(
                f"reward function {reference!r} takes {', '.join(unnamed)} by position only: name them"
            )
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            type(function).__call__
        )
        quick = capabilities_of(function).quick
        return cls(
            reference,
            function,
            frozenset(p.name for p in named),
            frozenset(p.name for p in named if p.default is p.empty),
            any(p.kind is p.VAR_KEYWORD for p in parameters),
            asynchronous,
            quick,
            b"" if quick or asynchronous else portable(function, reference),
            signature_of(function),
        )

    @property
    def looks_at_tokens(self) -> bool:
        """Whether the function needs the engine's tokens, not only the response's text."""
        return self.signature.needs_tokens or bool({"prompt_ids", "completion_ids"} & self.named)

    def arguments(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """The known values that the function takes.

        Raises:
            UserError: if one that it needs is not known.
        """
        offered = self.signature.arguments(known)
        for name in sorted(self.needs - offered.keys()):
            close = nearest(name, known, count=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            given = ", ".join(name for name in known if name not in BY_NAME)
            raise UserError(
                f"reward function {self.name} needs {name!r}: {hint}the row gives: {given}"
            )
        if self.takes_all:
            shown = offered.keys() - BY_NAME | self.signature.shown
        else:
            shown = set()
        return {
            name: value for name, value in offered.items() if name in self.named or name in shown
        }


@lru_cache(maxsize=256)
def reward_function(name: str, function: Callable[..., Any] | None = None) -> RewardFunction:
    """``RewardFunction.of``, remembered."""
    return RewardFunction.of(name, function)


def load_functions(functions: Sequence[RewardFunction]) -> None:
    """Have the reward workers import their functions before the first of them is needed.

    Raises:
        UserError: for a module that cannot be loaded.
    """
    for function in functions:
        if function.portable:
            reward_workers().load(f"reward function {function.name}", function.portable)


def score_response(
    functions: Sequence[RewardFunction], known: Mapping[str, Any], limit_s: float
) -> list[Score]:
    """One score per function; coroutines run while the others are called.

    What each function has ``limit_s`` for, and the wait for a reward worker, does not count towards
    the time limit of the environment's step: many responses may wait for the workers while
    functions hang.

    Raises:
        UserError: for what a function returned or lacks.
        Exception: what a function raised, with a note that names it.
    """
    started = [
        _start(function, known, limit_s) if function.asynchronous else None
        for function in functions
    ]
    scores = []
    for function, running in zip(functions, started, strict=True):
        try:
            if running is not None:
                with separate_limit():
                    scores.append(_result(running, limit_s))
                continue
            arguments = function.arguments(known)
            if function.quick:
                scores.append(call(function.name, function.function, arguments))
            else:
                name = f"reward function {function.name}"
                with separate_limit():
                    scores.append(
                        reward_workers().call(name, function.portable, arguments, limit_s)
                    )
        except NoAnswerError as problem:
            log.warning("reward function %s gave no reward: %s", function.name, problem)
            scores.append(Score(0.0, no_reward=True))
        except UserError:
            raise
        except Exception as error:
            error.add_note(f"{RAISED_BY} {function.name}")
            raise
    return scores


def _start(function: RewardFunction, known: Mapping[str, Any], limit_s: float) -> Future[Score]:
    async def limited() -> Score:
        try:
            async with asyncio.timeout(limit_s) as timer:
                arguments, logged = function.signature.with_logs(function.arguments(known))
                returned = await function.function(**arguments)
                return read_result(function.name, function.signature, returned, logged)
        except TimeoutError:
            if not timer.expired():
                raise  # the function's own
            raise NoAnswerError(f"it did not return within {limit_s:g} s") from None

    return asyncio.run_coroutine_threadsafe(limited(), _loop())


def _result(running: Future[Score], limit_s: float) -> Score:
    try:
        return running.result(limit_s + GRACE_S)
    except TimeoutError:
        if running.done():
            raise  # the function's own
        raise NoAnswerError(f"it kept its event loop for more than {limit_s:g} s") from None


@cache
def reward_workers() -> SubprocessPool:
    """The reward workers of this process."""
    return SubprocessPool(REWARD_WORKERS)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process's coroutines, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rewards", daemon=True).start()
    return loop


@dataclass(frozen=True)
class _NamedFunction:
    """A function that returns a ``Score``; it is pickled by its name if other processes know
    that."""

    name: str
    function: Callable[..., Any]

    @property
    def known_everywhere(self) -> bool:
        return ":" in self.name or (self.function.__module__ or "").startswith("skyasync.rewards.")

    def __call__(self, **arguments: object) -> Score:
        return call(self.name, self.function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.known_everywhere:
            return (_loaded, (self.name,))
        return (_NamedFunction, (self.name, self.function))


def portable(function: Callable[..., Any], name: str) -> bytes:
    """The function, pickled: by its name, or, for one that the program registered, with its
    code."""
    named = _NamedFunction(name, function)
    if named.known_everywhere:
        return pickle.dumps(named)
    from ray import cloudpickle  # also for functions of the program's own file

    return cloudpickle.dumps(named)


def _loaded(name: str) -> _NamedFunction:
    function = find(name)
    capabilities_of(function).load()
    return _NamedFunction(name, function)
