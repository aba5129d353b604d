"""Reward functions and how they are called: several on one response, each within its time limit.

Functions that are marked as quick are called directly. Coroutines run concurrently on an event loop of their own. All
others run in reward workers, which are subprocesses, since they read what a model wrote. So it works in any thread,
also in one that runs an event loop.
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

from skyasync.errors import UserError, nearest
from skyasync.rewards.registry import find
from skyasync.rewards.score import Score, call, call_async
from skyasync.rewards.signature import BY_NAME, Signature, parameter_names, signature_of, wrong_return
from skyasync.utils.rpc import GRACE_S
from skyasync.utils.subprocess_worker import NoAnswerError, SubprocessPool

log = logging.getLogger(__name__)

REWARD_WORKERS = 8  # at most: a response that takes its whole limit must not hold up all others


@dataclass(frozen=True)
class RewardFunction:
    """A reward function, ready to be called. ``named``: its parameters; ``accepts``: the same, or None for all."""

    name: str
    function: Callable[..., Any]
    accepts: frozenset[str] | None
    needs: frozenset[str]
    asynchronous: bool
    quick: bool
    portable: bytes  # for a reward worker, if it is called there
    named: frozenset[str] = frozenset()
    signature: Signature = Signature()  # noqa: RUF009  (it has no state)

    @classmethod
    def of(cls, reference: str, function: Callable[..., Any] | None = None) -> RewardFunction:
        """The function behind a name.

        Raises:
            UserError: if there is none, or it takes arguments without names.
        """
        found = find(reference) if function is None else function
        if not callable(found):
            raise UserError(f"reward function {reference!r} cannot be called: it is {found!r}")
        parameters = inspect.signature(found).parameters.values()
        unnamed = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
        if unnamed:
            raise UserError(f"reward function {reference!r} takes {', '.join(unnamed)} by position only: name them")
        if wrong := wrong_return(found):
            raise UserError(
                f"reward function {reference!r} returns {wrong}: return a number, or a mapping with 'reward'"
            )
        anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        asynchronous = inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(type(found).__call__)
        quick = getattr(found, "quick", False)
        return cls(
            reference,
            found,
            None if anything else frozenset(p.name for p in named),
            frozenset(p.name for p in named if p.default is p.empty),
            asynchronous,
            quick,
            b"" if quick or asynchronous else portable(found, reference),
            parameter_names(found),
            signature_of(found),
        )

    @property
    def looks_at_tokens(self) -> bool:
        """It needs what the engine read and wrote, not only the response's text."""
        return self.signature.needs_tokens or bool({"prompt_ids", "completion_ids"} & self.named)

    def check(self, known: Mapping[str, Any]) -> None:
        """Raises ``UserError`` if a value that the function needs is not among those known."""
        self._refuse_missing(self.signature.arguments(known), known)

    def arguments(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """The known values that the function takes.

        Raises:
            UserError: if one that it needs is not known.
        """
        offered = self.signature.arguments(known)
        self._refuse_missing(offered, known)
        takes_all, named = self.accepts is None, self.named
        shown = offered.keys() - BY_NAME | self.signature.shown
        return {name: v for name, v in offered.items() if name in named or (takes_all and name in shown)}

    def _refuse_missing(self, offered: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        for name in sorted(self.needs - offered.keys()):
            close = nearest(name, known, count=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            given = ", ".join(name for name in known if name not in BY_NAME)
            raise UserError(f"reward function {self.name} needs {name!r}: {hint}the row gives: {given}")


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


def score_response(functions: Sequence[RewardFunction], known: Mapping[str, Any], limit_s: float) -> list[Score]:
    """One score per function; coroutines run while the others are called.

    Raises:
        UserError: for what a function returned or lacks.
        Exception: what a function raised, with a note that names it.
    """
    started = [_start(function, known, limit_s) if function.asynchronous else None for function in functions]
    scores = []
    for function, running in zip(functions, started, strict=True):
        try:
            scores.append(_score(function, running, known, limit_s))
        except NoAnswerError as problem:
            log.warning("reward function %s gave no verdict: %s", function.name, problem)
            scores.append(Score(0.0, no_reward=True))
        except UserError:
            raise
        except Exception as error:
            error.add_note(f"raised by reward function {function.name}")
            raise
    return scores


def _score(function: RewardFunction, running: Future[Score] | None, known: Mapping[str, Any], limit_s: float) -> Score:
    if running is not None:
        try:
            return running.result(limit_s + GRACE_S)
        except TimeoutError:
            if running.done():
                raise  # the function's own
            raise NoAnswerError(f"it kept its event loop for more than {limit_s:g} s") from None
    arguments = function.arguments(known)
    if function.quick:
        return call(function.name, function.function, arguments)
    score: Score = reward_workers().call(f"reward function {function.name}", function.portable, arguments, limit_s)
    return score


def _start(function: RewardFunction, known: Mapping[str, Any], limit_s: float) -> Future[Score]:
    async def limited() -> Score:
        try:
            async with asyncio.timeout(limit_s) as timer:
                return await call_async(function.name, function.function, function.arguments(known))
        except TimeoutError:
            if not timer.expired():
                raise  # the function's own
            raise NoAnswerError(f"it did not return within {limit_s:g} s") from None

    return asyncio.run_coroutine_threadsafe(limited(), _loop())


@cache
def reward_workers() -> SubprocessPool:
    """Of this process."""
    return SubprocessPool(REWARD_WORKERS)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process's coroutines, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rewards", daemon=True).start()
    return loop


# ---------------------------------------------------------------- on their way to a worker


@dataclass(frozen=True)
class _NamedFunction:
    """A function that returns a ``Score``; it is pickled by its name if other processes know that."""

    name: str
    function: Callable[..., Any]

    def __call__(self, **arguments: object) -> Score:
        return call(self.name, self.function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_found, (self.name,)) if _known_everywhere(self) else (_NamedFunction, (self.name, self.function))


def portable(function: Callable[..., Any], name: str) -> bytes:
    """The function, pickled: by its name, or, for one that the program registered, with its code."""
    named = _NamedFunction(name, function)
    if _known_everywhere(named):
        return pickle.dumps(named)
    from ray import cloudpickle  # also for functions of the program's own file

    return cloudpickle.dumps(named)


def _known_everywhere(named: _NamedFunction) -> bool:
    return ":" in named.name or getattr(named.function, "__module__", "").startswith("skyasync.rewards.")


def _found(name: str) -> _NamedFunction:
    function = find(name)
    getattr(function, "load", lambda: None)()
    return _NamedFunction(name, function)
