"""Reward functions and how they are called: several on one response, each within its time limit.

Functions that are marked as quick are called directly. Coroutines run concurrently on an event loop
in a thread of its own. All others run in reward workers, which are subprocesses: a function that
hangs on a response can only be ended with its process. So this works in any thread, also in one
that runs an event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import pickle
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from skyasync.errors import RAISED_BY, UserError, nearest
from skyasync.rewards import capabilities_of, find
from skyasync.rewards.signature import (
    BY_NAME,
    Function,
    Inputs,
    Score,
    Signature,
    call,
    read_result,
    signature_of,
)
from skyasync.utils.rpc import GRACE_S
from skyasync.utils.rpc_server import separate_limit
from skyasync.utils.subprocess_worker import NoAnswerError, SubprocessPool

log = logging.getLogger(__name__)

# More than one: a response that takes its full time limit must not delay all others.
REWARD_WORKERS = 8


@dataclass(frozen=True)
class RewardFunction:
    """A reward function, ready to be called.

    Args:
        name: the reference by which the configuration or a row names it.
        named: its parameters.
        needs: the parameters without a default.
        takes_all: it has a parameter such as ``**extra``.
        portable: the pickled function, if a reward worker calls it; else empty.
    """

    name: str
    function: Function
    named: frozenset[str]
    needs: frozenset[str]
    takes_all: bool
    asynchronous: bool
    quick: bool
    portable: bytes
    signature: Signature

    @classmethod
    def of(cls, reference: str, function: Function | None = None) -> RewardFunction:
        """The function behind a name.

        Raises:
            UserError: if there is none, or it takes arguments without names.
        """
        function = find(reference) if function is None else function
        if not callable(function):
            raise UserError(f"reward function {reference!r} cannot be called: it is {function!r}")
        parameters = inspect.signature(function).parameters.values()
        unnamed: list[str] = []
        named: set[str] = set()
        needs: set[str] = set()
        takes_all = False
        for parameter in parameters:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                unnamed.append(parameter.name)
            elif parameter.kind is parameter.VAR_KEYWORD:
                takes_all = True
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                named.add(parameter.name)
                if parameter.default is parameter.empty:
                    needs.add(parameter.name)
        if unnamed:
            raise UserError(
                f"reward function {reference!r} takes {', '.join(unnamed)} by position only: name them"
            )
        asynchronous = inspect.iscoroutinefunction(function)
        if not asynchronous:  # an object with ``async def __call__``
            asynchronous = inspect.iscoroutinefunction(type(function).__call__)
        quick = capabilities_of(function).quick
        pickled = b""
        if not (quick or asynchronous):
            pickled = portable(function, reference)
        return cls(
            name=reference,
            function=function,
            named=frozenset(named),
            needs=frozenset(needs),
            takes_all=takes_all,
            asynchronous=asynchronous,
            quick=quick,
            portable=pickled,
            signature=signature_of(function),
        )

    @property
    def looks_at_tokens(self) -> bool:
        """Whether the function needs the engine's tokens, not only the response's text."""
        return self.signature.needs_tokens or bool({"prompt_ids", "completion_ids"} & self.named)

    def arguments(self, inputs: Inputs) -> dict[str, Any]:
        """The inputs that the function takes.

        Raises:
            UserError: if one that it needs is not there.
        """
        offered = self.signature.arguments(inputs)
        for name in sorted(self.needs - offered.keys()):
            close = nearest(name, inputs, count=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            columns = ", ".join(column for column in inputs if column not in BY_NAME)
            raise UserError(
                f"reward function {self.name} needs {name!r}: {hint}the row gives: {columns}"
            )
        taken = set(self.named)
        if self.takes_all:
            taken |= offered.keys() - BY_NAME
            taken |= self.signature.shown
        return {name: value for name, value in offered.items() if name in taken}


@lru_cache(maxsize=256)
def reward_function(name: str, function: Function | None = None) -> RewardFunction:
    """``RewardFunction.of``, cached: a run calls it for every response."""
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
    functions: Sequence[RewardFunction], inputs: Inputs, limit_s: float
) -> list[Score]:
    """One score per function; coroutines run while the others are called.

    Neither a function's time, which ``limit_s`` bounds, nor the wait for a reward worker counts
    towards the time limit of the environment's step: many responses may wait for the workers while
    functions hang.

    Raises:
        UserError: for what a function returned or lacks.
        Exception: what a function raised, with a note that names it.
    """
    # All coroutines are started before any function is called, so that they run meanwhile.
    running: list[Future[Score] | None] = []
    for function in functions:
        running.append(_start(function, inputs, limit_s) if function.asynchronous else None)
    scores = []
    for function, future in zip(functions, running, strict=True):
        try:
            if future is not None:
                with separate_limit():
                    score = _result(future, limit_s)
            else:
                arguments = function.arguments(inputs)
                if function.quick:
                    score = call(function.name, function.function, arguments)
                else:
                    name = f"reward function {function.name}"
                    with separate_limit():
                        score = reward_workers().call(name, function.portable, arguments, limit_s)
        except NoAnswerError as problem:
            log.warning("reward function %s gave no reward: %s", function.name, problem)
            score = Score(0.0, no_reward=True)
        except UserError:  # its message names the function already
            raise
        except Exception as error:
            error.add_note(f"{RAISED_BY} {function.name}")
            raise
        scores.append(score)
    return scores


def _start(function: RewardFunction, inputs: Inputs, limit_s: float) -> Future[Score]:
    async def limited() -> Score:
        try:
            async with asyncio.timeout(limit_s) as timer:
                arguments, logged = function.signature.with_logs(function.arguments(inputs))
                returned = await function.function(**arguments)
                return read_result(function.name, function.signature, returned, logged)
        except TimeoutError:
            if not timer.expired():
                raise  # the function itself raised it
            raise NoAnswerError(f"it did not return within {limit_s:g} s") from None

    return asyncio.run_coroutine_threadsafe(limited(), _loop())


def _result(future: Future[Score], limit_s: float) -> Score:
    # The coroutine has its own timer. This wait is longer, for one that blocks its event loop.
    try:
        return future.result(limit_s + GRACE_S)
    except TimeoutError:
        if future.done():
            raise  # the function itself raised it
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
    """A function that returns a ``Score``; pickled by its name if other processes can import it."""

    name: str
    function: Function

    @property
    def is_importable(self) -> bool:
        return ":" in self.name or (self.function.__module__ or "").startswith("skyasync.rewards.")

    def __call__(self, **arguments: object) -> Score:
        return call(self.name, self.function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.is_importable:
            return (_loaded, (self.name,))
        return (_NamedFunction, (self.name, self.function))


def portable(function: Function, name: str) -> bytes:
    """The function, pickled: by its name, or with its code if the program registered it."""
    named = _NamedFunction(name, function)
    if named.is_importable:
        return pickle.dumps(named)
    from ray import cloudpickle  # pickle alone cannot send functions of the program's main file

    return cloudpickle.dumps(named)


def _loaded(name: str) -> _NamedFunction:
    function = find(name)
    capabilities_of(function).load()  # in this process, outside of the first call's time limit
    return _NamedFunction(name, function)
