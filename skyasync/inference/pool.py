"""The engines of a run: which of them are healthy, and which calls wait for each.

Invariant: once an engine has failed nobody waits for it: calls of it are cancelled and count as unanswered, and what it
says later is ignored. The engine that takes its place starts anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple, Protocol

from skyasync.inference.interface import EngineFailedError, InferenceEngine
from skyasync.inference.router import Router

Calls = set[asyncio.Future[Any]]  # tasks that wait for an engine's answer


class LostWork(NamedTuple):
    """What a failure interrupts: requests that must continue elsewhere, and the tokens that are known of them."""

    requests: int
    tokens: int


class FailureHandler(Protocol):
    """Replaces a failed engine, or gives up."""

    def failed(self, index: int, error: BaseException, lost: LostWork) -> None: ...


class RequestOwner(Protocol):
    """Had requests at a failed engine."""

    def recover_requests(self, index: int) -> LostWork: ...


class EnginePool:
    """Attributes: failure_handler: is told of failures; None: the first failure is the error of the caller. end: why no
    engine will answer any more, if that is so."""

    def __init__(self, engines: Sequence[InferenceEngine], owner: RequestOwner) -> None:
        self.engines = list(engines)
        self.router = Router(len(engines))
        self.failure_handler: FailureHandler | None = None
        self.end: BaseException | None = None
        self._owner = owner
        self._calls: list[Calls] = [set() for _ in engines]

    @property
    def healthy(self) -> list[int]:
        return self.router.healthy

    @property
    def calls(self) -> Calls:
        """All calls of all engines."""
        return set[asyncio.Future[Any]]().union(*self._calls)

    def track(self, index: int, task: asyncio.Future[Any]) -> None:
        """This task waits for that engine, and is cancelled when the engine fails."""
        calls = self._calls[index]
        calls.add(task)
        task.add_done_callback(calls.discard)

    async def all(self, method: str, *args: object) -> dict[int, Any]:
        """The answers of the healthy engines, by their numbers, without those that fail meanwhile."""
        if self.end is not None:
            raise self.end
        healthy = self.healthy
        answers = await asyncio.gather(*(self.ask(i, getattr(self.engines[i], method)(*args)) for i in healthy))
        return {index: answer[0] for index, answer in zip(healthy, answers, strict=True) if answer}

    async def all_or_none(self, members: Sequence[int], method: str, *args: object) -> None:
        """Call these engines, which wait for each other in it: if one has failed, or fails, all of them have.

        Raises:
            EngineFailedError: if one did.
        """
        if self.end is not None:
            raise self.end
        failed = [index for index in members if not self.router.loads[index].healthy]
        asked = {} if failed else {i: self.ask(i, getattr(self.engines[i], method)(*args)) for i in members}
        calls = {i: asyncio.ensure_future(call) for i, call in asked.items()}
        waiting = set(calls.values())
        while waiting and not failed:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            failed = [index for index, call in calls.items() if call.done() and call.result() is None]
        if failed:
            error = EngineFailedError(
                f"engine {failed[0]} has died in a call in which the others wait for it ({method})"
            )
            for index in [index for index, call in calls.items() if not call.done()]:
                self.fail(index, error)
            raise error

    def ask(self, index: int, asked: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, tuple[Any] | None]:
        """An engine's answer to a call of it; None if it fails before.

        The call is on its way when this returns: requests that are made after it must not overtake it.
        """
        call = asyncio.ensure_future(asked)
        calls = self._calls[index]
        calls.add(call)
        return self._answer(index, call, calls)

    async def _answer(self, index: int, call: asyncio.Future[Any], calls: Calls) -> tuple[Any] | None:
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

    def fail(self, index: int, error: BaseException, noticed_by: asyncio.Future[Any] | None = None) -> bool:
        """An engine has failed: continue without it. False if there is no ``failure_handler``.

        Args:
            noticed_by: the call that raised it; None if none did.
        """
        if self.failure_handler is None:
            return False
        calls, load = self._calls[index], self.router.loads[index]
        if not load.healthy or (noticed_by is not None and noticed_by not in calls):
            return True  # it is known already
        load.healthy = False
        waiting = calls - {noticed_by}
        calls.clear()  # tells those who wait why they are cancelled
        self._calls[index] = set()
        for task in waiting:
            task.cancel()
        self.failure_handler.failed(index, error, self._owner.recover_requests(index))
        return True

    def add(self, engine: InferenceEngine) -> int:
        """One more, which is not asked for anything until it is admitted."""
        self.engines.append(engine)
        self._calls.append(set())
        return self.router.add()

    def admit(self, index: int, engine: InferenceEngine) -> None:
        """From now on this one has the place."""
        self.engines[index] = engine
        self.router.renew(index)
