"""The engines of a run: which of them live, and what is being asked of each.

Invariant: once an engine is lost nobody waits for it: calls of it are cancelled and count as unanswered, and what it
says later is an echo that nobody hears. The one that takes its place has a life of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple, Protocol

from skyasync.engines.protocol import EngineDiedError, InferenceEngine
from skyasync.engines.routes import Routes

Asking = set[asyncio.Future[Any]]  # tasks that wait for an engine's answer


class Loss(NamedTuple):
    """What a death costs: requests that must go on elsewhere, and the tokens that are known of them."""

    requests: int
    tokens: int


class Survivor(Protocol):
    """Who sees to it that a dead engine is replaced, or gives up."""

    def died(self, index: int, error: BaseException, loss: Loss) -> None: ...


class Bereaved(Protocol):
    """Who had requests at a dead engine."""

    def bereave(self, index: int) -> Loss: ...


class Roster:
    """Attributes: survivor: who is told of deaths; None where the first one is the error of whoever asked. end: why no
    engine will answer any more, if that is so."""

    def __init__(self, engines: Sequence[InferenceEngine], bereaved: Bereaved) -> None:
        self.engines = list(engines)
        self.routes = Routes(len(engines))
        self.survivor: Survivor | None = None
        self.end: BaseException | None = None
        self._bereaved = bereaved
        self._asking: list[Asking] = [set() for _ in engines]

    @property
    def asking(self) -> Asking:
        """All that waits for any engine."""
        return set[asyncio.Future[Any]]().union(*self._asking)

    def track(self, index: int, task: asyncio.Future[Any]) -> None:
        """This waits for that engine, and is cancelled when it is lost."""
        asking = self._asking[index]
        asking.add(task)
        task.add_done_callback(asking.discard)

    async def all(self, method: str, *args: object) -> dict[int, Any]:
        """The answers of the living engines, by their numbers; one that dies meanwhile has none."""
        if self.end is not None:
            raise self.end
        living = self.routes.living
        answers = await asyncio.gather(*(self.ask(i, getattr(self.engines[i], method)(*args)) for i in living))
        return {index: answer[0] for index, answer in zip(living, answers, strict=True) if answer}

    async def all_or_none(self, members: Sequence[int], method: str, *args: object) -> None:
        """Call these engines, which wait for each other in it: where one of them is dead, or dies, so are the others.

        Raises:
            EngineDiedError: if one did.
        """
        if self.end is not None:
            raise self.end
        gone = [index for index in members if index in self.routes.dead]
        asked = {} if gone else {i: self.ask(i, getattr(self.engines[i], method)(*args)) for i in members}
        calls = {i: asyncio.ensure_future(call) for i, call in asked.items()}
        waiting = set(calls.values())
        while waiting and not gone:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            gone = [index for index, call in calls.items() if call.done() and call.result() is None]
        if gone:
            error = EngineDiedError(f"engine {gone[0]} has died in a call in which the others wait for it ({method})")
            for index in [index for index, call in calls.items() if not call.done()]:
                self.lose(index, error)
            raise error

    def ask(self, index: int, asked: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, tuple[Any] | None]:
        """What one engine answers to a call of it; None if it dies before.

        The call is on its way when this returns: requests that are made after it must not overtake it.
        """
        call = asyncio.ensure_future(asked)
        asking = self._asking[index]
        asking.add(call)
        return self._answer(index, call, asking)

    async def _answer(self, index: int, call: asyncio.Future[Any], asking: Asking) -> tuple[Any] | None:
        try:
            await asyncio.wait({call})
            if call.cancelled() and call not in asking:
                return None
            return (call.result(),)
        except EngineDiedError as error:
            if not self.lose(index, error, call):
                raise
            return None
        finally:
            asking.discard(call)
            call.cancel()

    def lose(self, index: int, error: BaseException, heard_by: asyncio.Future[Any] | None = None) -> bool:
        """An engine has died: go on without it. False where deaths are not survived.

        Args:
            heard_by: the task that asked it; None if nobody did.
        """
        if self.survivor is None:
            return False
        asking = self._asking[index]
        if index in self.routes.dead or (heard_by is not None and heard_by not in asking):
            return True  # that is known, and this an echo of it
        self.routes.dead.add(index)
        waiting = asking - {heard_by}
        asking.clear()  # by which those who wait know why they are cancelled
        self._asking[index] = set()
        for task in waiting:
            task.cancel()
        self.survivor.died(index, error, self._bereaved.bereave(index))
        return True

    def add(self, engine: InferenceEngine) -> int:
        """A place for one more, which is not asked for anything until it is admitted."""
        self.engines.append(engine)
        self._asking.append(set())
        return self.routes.add()

    def admit(self, index: int, engine: InferenceEngine) -> None:
        """From now on this one has the place."""
        self.engines[index] = engine
        self.routes.renew(index)
