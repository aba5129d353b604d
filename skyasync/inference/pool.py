"""The engines of a run: which of them are healthy, and which calls wait for each.

Invariant: once an engine has failed, no caller waits for it. Calls of it are cancelled and count as
unanswered; what it answers later is ignored. The engine that takes its place starts with a new
state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from skyasync.inference.interface import EngineFailedError, InferenceEngine
from skyasync.inference.router import Router

R = TypeVar("R")
Calls = set[asyncio.Future[Any]]  # tasks that wait for an engine's answer


class LostWork(NamedTuple):
    """What a failure interrupts: requests that continue at other engines, and the tokens that are
    known of them."""

    requests: int
    tokens: int


class EnginePool:
    """The engines by their numbers.

    Args:
        recover: has the requests of a failed engine continue at other engines.

    Attributes:
        calls: of each engine; they are cancelled when it fails.
        on_failure: is called with a failed engine's number, the error, and what ``recover`` has
            returned. None: the first failure is the error of the caller.
        asleep: engines that are healthy, and are called only to wake, or for their state.
        end: why no engine will answer any more, if that is so.
    """

    def __init__(
        self, engines: Sequence[InferenceEngine], recover: Callable[[int], LostWork]
    ) -> None:
        self.engines = list(engines)
        self.router = Router(len(engines))
        self.calls: list[Calls] = [set() for _ in engines]
        self.on_failure: Callable[[int, BaseException, LostWork], None] | None = None
        self.asleep: set[int] = set()
        self.end: BaseException | None = None
        self._recover = recover

    @property
    def healthy(self) -> list[int]:
        return [index for index, healthy in enumerate(self.router.healthy) if healthy]

    @property
    def awake(self) -> list[int]:
        return [index for index in self.healthy if index not in self.asleep]

    async def all(
        self,
        call: Callable[[InferenceEngine], Coroutine[Any, Any, R]],
        among: Sequence[int] | None = None,
    ) -> dict[int, R]:
        """The answers of these engines (None: all that are awake), by their numbers, without those
        that fail."""
        if self.end is not None:
            raise self.end
        engines = self.awake if among is None else among
        answers = await asyncio.gather(
            *(self.ask(index, call(self.engines[index])) for index in engines)
        )
        return {index: answer[0] for index, answer in zip(engines, answers, strict=True) if answer}

    async def all_or_none(
        self,
        members: Sequence[int],
        call: Callable[[InferenceEngine], Coroutine[Any, Any, Any]],
        name: str,
    ) -> None:
        """Call these engines, which wait for each other in the call: if one fails, all of them have
        failed.

        Args:
            name: of the call, for the error.

        Raises:
            EngineFailedError: if one did.
        """
        if self.end is not None:
            raise self.end
        failed = [index for index in members if not self.router.healthy[index]]
        calls: dict[int, asyncio.Future[tuple[Any] | None]] = {}
        if not failed:
            calls = {i: asyncio.ensure_future(self.ask(i, call(self.engines[i]))) for i in members}
        waiting = set(calls.values())
        while waiting and not failed:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            failed = [
                index
                for index, answer in calls.items()
                if answer.done() and answer.result() is None
            ]
        if failed:
            error = EngineFailedError(
                f"engine {failed[0]} has failed in a call in which the others wait: {name}"
            )
            for index in [index for index, answer in calls.items() if not answer.done()]:
                self.fail(index, error)
            raise error

    def ask(
        self, index: int, request: Coroutine[Any, Any, R]
    ) -> Coroutine[Any, Any, tuple[R] | None]:
        """An engine's answer to a call of it; None if it fails before.

        The call is on its way when this returns: requests that are made after it must not overtake
        it.
        """
        call = asyncio.ensure_future(request)
        calls = self.calls[index]
        calls.add(call)

        async def answer() -> tuple[R] | None:
            try:
                await asyncio.wait({call})
                if call.cancelled() and call not in calls:
                    return None
                return (call.result(),)
            except EngineFailedError as error:
                if not self.fail(index, error, call):
                    raise
                return None
            finally:
                calls.discard(call)
                call.cancel()

        return answer()

    def fail(
        self, index: int, error: BaseException, noticed_by: asyncio.Future[Any] | None = None
    ) -> bool:
        """An engine has failed: continue without it. False if ``on_failure`` is None.

        Args:
            noticed_by: the call that raised the error; None if no call did.
        """
        if self.on_failure is None:
            return False
        calls = self.calls[index]
        if not self.router.healthy[index] or (noticed_by is not None and noticed_by not in calls):
            return True  # it is known already
        self.router.healthy[index] = False
        waiting = calls - {noticed_by}
        calls.clear()  # tells those who wait why they are cancelled
        self.calls[index] = set()
        for task in waiting:
            task.cancel()
        self.on_failure(index, error, self._recover(index))
        return True
