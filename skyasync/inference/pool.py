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
    """Requests that a failure interrupts, and their tokens, from which other engines continue."""

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
        self,
        engines: Sequence[InferenceEngine],
        recover: Callable[[int], LostWork],
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
        """The answers of the engines by their numbers, without those of engines that fail.

        Args:
            among: the engines to call; None: all that are awake.
        """
        if self.end is not None:
            raise self.end
        engines = self.awake if among is None else among
        calls = [self.ask(index, call(self.engines[index])) for index in engines]
        answers = {}
        for index, answer in zip(engines, await asyncio.gather(*calls), strict=True):
            if answer:  # else the engine has failed
                answers[index] = answer[0]
        return answers

    async def all_or_none(
        self,
        members: Sequence[int],
        call: Callable[[InferenceEngine], Coroutine[Any, Any, Any]],
        name: str,
    ) -> None:
        """Call engines that wait for each other in the call: if one fails, all of them have failed.

        Args:
            name: of the call, for the error.

        Raises:
            EngineFailedError: if one did.
        """
        if self.end is not None:
            raise self.end
        failed_engines = [index for index in members if not self.router.healthy[index]]
        calls: dict[int, asyncio.Future[tuple[Any] | None]] = {}
        if not failed_engines:
            for index in members:
                answer = self.ask(index, call(self.engines[index]))
                calls[index] = asyncio.ensure_future(answer)
        waiting_calls = set(calls.values())
        while waiting_calls and not failed_engines:
            _, waiting_calls = await asyncio.wait(
                waiting_calls, return_when=asyncio.FIRST_COMPLETED
            )
            for index, task in calls.items():
                if task.done() and task.result() is None:
                    failed_engines.append(index)
        if failed_engines:
            error = EngineFailedError(
                f"engine {failed_engines[0]} has failed in a call in which the others wait: {name}"
            )
            # All tasks are looked at before the first failure cancels others.
            unanswered_engines = [index for index, task in calls.items() if not task.done()]
            for index in unanswered_engines:
                self.fail(index, error)
            raise error

    def ask(
        self,
        index: int,
        request: Coroutine[Any, Any, R],
    ) -> Coroutine[Any, Any, tuple[R] | None]:
        """An engine's answer to a call, in a tuple; None if the engine fails.

        The call is on its way when this returns: a later request must not overtake it.
        """
        call = asyncio.ensure_future(request)
        calls = self.calls[index]
        calls.add(call)

        async def answer() -> tuple[R] | None:
            try:
                await asyncio.wait({call})
                if call.cancelled() and call not in calls:  # by ``fail``
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
        self,
        index: int,
        error: BaseException,
        noticed_by: asyncio.Future[Any] | None = None,
    ) -> bool:
        """An engine has failed: continue without it. False if ``on_failure`` is None.

        Args:
            noticed_by: the call that raised the error; None if no call did.
        """
        if self.on_failure is None:
            return False
        calls = self.calls[index]
        if not self.router.healthy[index] or (noticed_by is not None and noticed_by not in calls):
            return True  # an earlier call has noticed the failure
        self.router.healthy[index] = False
        waiting_calls = calls - {noticed_by}
        calls.clear()  # so that ``ask`` knows why its call is cancelled
        self.calls[index] = set()
        for task in waiting_calls:
            task.cancel()
        self.on_failure(index, error, self._recover(index))
        return True
