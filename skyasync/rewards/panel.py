"""Several reward functions on one response.

Invariant: every function's verdict is there, in order, within its limit: quick ones are called directly, coroutines
run side by side on a loop of their own, everything else in a judge's process. So it works in any thread, also
where an event loop runs.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from skyasync.errors import UserError, nearest
from skyasync.processes.apart import NoAnswerError
from skyasync.processes.calls import GRACE_S
from skyasync.rewards.judge import Judge, portable
from skyasync.rewards.registry import find
from skyasync.rewards.score import Score, call, call_async
from skyasync.rewards.signature import BY_NAME, Signature, parameter_names, signature_of, wrong_return

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Member:
    """A reward function, ready to be called. ``named``: its parameters; ``accepts``: the same, or None for all."""

    name: str
    function: Callable[..., Any]
    accepts: frozenset[str] | None
    needs: frozenset[str]
    asynchronous: bool
    quick: bool
    portable: bytes  # how the judge finds it, if it is called there
    named: frozenset[str] = frozenset()
    signature: Signature = Signature()  # noqa: RUF009  (it has no state)

    @classmethod
    def of(cls, reference: str, function: Callable[..., Any] | None = None) -> Member:
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
        """Those of the known values that the function takes.

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
def member_of(name: str, function: Callable[..., Any] | None = None) -> Member:
    """``Member.of``, remembered."""
    return Member.of(name, function)


def load(members: Sequence[Member]) -> None:
    """Have the judge import the functions that it is to call, before the first of them is needed.

    Raises:
        UserError: for a module that cannot be loaded.
    """
    for member in members:
        if member.portable:
            _judge().load(member.name, member.portable)


def judge(members: Sequence[Member], known: Mapping[str, Any], limit_s: float) -> list[Score]:
    """One score per function; coroutines run while the others are called.

    Raises:
        UserError: for what a function returned or lacks.
        Exception: what a function raised, with a note that names it.
    """
    started = [_start(member, known, limit_s) if member.asynchronous else None for member in members]
    scores = []
    for member, running in zip(members, started, strict=True):
        try:
            scores.append(_verdict(member, running, known, limit_s))
        except NoAnswerError as problem:
            log.warning("reward function %s gave no verdict: %s", member.name, problem)
            scores.append(Score(0.0, unjudged=True))
        except UserError:
            raise
        except Exception as error:
            error.add_note(f"raised by reward function {member.name}")
            raise
    return scores


def _verdict(member: Member, running: Future[Score] | None, known: Mapping[str, Any], limit_s: float) -> Score:
    if running is not None:
        try:
            return running.result(limit_s + GRACE_S)
        except TimeoutError:
            if running.done():
                raise  # the function's own
            raise NoAnswerError(f"it kept its event loop for more than {limit_s:g} s") from None
    arguments = member.arguments(known)
    if member.quick:
        return call(member.name, member.function, arguments)
    return _judge().call(member.name, member.portable, arguments, limit_s)


def _start(member: Member, known: Mapping[str, Any], limit_s: float) -> Future[Score]:
    async def limited() -> Score:
        try:
            async with asyncio.timeout(limit_s) as timer:
                return await call_async(member.name, member.function, member.arguments(known))
        except TimeoutError:
            if not timer.expired():
                raise  # the function's own
            raise NoAnswerError(f"it did not return within {limit_s:g} s") from None

    return asyncio.run_coroutine_threadsafe(limited(), _loop())


@cache
def _judge() -> Judge:
    """The judge of this process."""
    return Judge()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process's coroutines, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rewards", daemon=True).start()
    return loop
