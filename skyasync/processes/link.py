"""Calls to one process, and their answers.

Invariant: every call posted ends: with the process's answer, or with the error that lost the process. Calls posted in
one turn of the event loop travel in one message; while calls are unanswered, exactly one exchange waits for answers.

| who waits                      | for what    | woken by                                                |
|--------------------------------|-------------|---------------------------------------------------------|
| ``load``                       | the process | its answer, or ``START_S``                              |
| the future that ``post`` gives | its answer  | ``_settle``, or ``_lose``                               |
| ``_exchange`` (a task each)    | the process | its answers, its heartbeat, its death, or ``silence_s`` |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import count
from typing import Any

from skyasync.errors import UserError
from skyasync.processes.calls import START_S, Answer, Call, Worker, name_of


class ProcessLostError(RuntimeError):
    """The process that worked on it is gone; which of its calls is to blame is unknown."""


class WorkerStartError(ProcessLostError, UserError):
    """The process has ended while it loaded something: what it loads may be to blame, or whoever ended it."""


class Link:
    """One process as its pool sees it.

    Args:
        what: runs there, for messages ("the environment").
        silence_s: a process that leaves an exchange without reply for so long is lost.
        on_news: called after every exchange, and when the process is lost.
    """

    ready = True  # calls may be posted while it starts

    def __init__(self, worker: Worker, what: str, silence_s: float, on_news: Callable[[Link], None]) -> None:
        self.worker = worker
        self.hung = 0
        self.lost: Exception | None = None
        self.keys: set[str] = set()
        self._what, self._silence_s, self._on_news = what, silence_s, on_news
        self._numbers = count()
        self._outbox: list[Call] = []
        self._unanswered: dict[int, tuple[str, asyncio.Future[Any]]] = {}  # by number, with the key
        self._exchanges = 0
        self._loaded: dict[str, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def idle(self) -> bool:
        return not self.keys and not self._unanswered

    async def load(self, name: str, *args: object) -> None:
        """Have the process load something, once.

        Raises:
            UserError: if it is not ready within ``START_S``; a ``WorkerStartError`` if it ends.
            Exception: what loading raised.
        """
        if name not in self._loaded:
            self._loaded[name] = self._start(self._load(*args))
        await asyncio.shield(self._loaded[name])

    def post(self, method: str, key: str, *args: object) -> asyncio.Future[Any]:
        """The future of the answer; a ``ProcessLostError`` if the process is lost before."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if self.lost is not None:
            future.set_exception(self._loss(key))
            return future
        call = Call(next(self._numbers), method, key, args)
        self._unanswered[call.number] = (key, future)
        if not self._outbox:
            loop.call_soon(self._dispatch)
        self._outbox.append(call)
        return future

    def kill(self) -> None:
        """End the process; what is unanswered fails."""
        self._lose(RuntimeError("it was ended"))

    async def _load(self, *args: object) -> None:
        try:
            async with asyncio.timeout(START_S) as timer:
                problem = await self.worker.load(*args)
        except Exception as error:
            self._lose(error)
            who = f"the process that runs {self._what}"
            if isinstance(error, TimeoutError) and timer.expired():
                raise UserError(f"{who} was not ready within {START_S:g} s") from error
            raise WorkerStartError(f"{who} ended while it was loading: {error}") from error
        if problem is not None:
            raise problem

    def _dispatch(self) -> None:
        calls, self._outbox = self._outbox, []
        if self.lost is None:
            self._start(self._exchange(calls))

    async def _exchange(self, calls: list[Call]) -> None:
        self._exchanges += 1
        try:
            async with asyncio.timeout(self._silence_s) as timer:
                answers, self.hung = await self.worker.exchange(calls)
        except Exception as error:
            silent = isinstance(error, TimeoutError) and timer.expired()
            return self._lose(TimeoutError(f"it gave no sign of life for {self._silence_s:g} s") if silent else error)
        finally:
            self._exchanges -= 1
        if self.lost is not None:
            return
        for answer in answers:
            self._settle(answer)
        if self._unanswered and not self._exchanges and not self._outbox:
            self._start(self._exchange([]))
        self._on_news(self)

    def _settle(self, answer: Answer) -> None:
        _, future = self._unanswered.pop(answer.number)
        with suppress(asyncio.InvalidStateError):  # its caller may have been cancelled
            if answer.error is None:
                future.set_result(answer.result)
            else:
                future.set_exception(answer.error)

    def _lose(self, error: Exception) -> None:
        if self.lost is not None:
            return
        self.lost = error
        self.worker.kill()
        unanswered, self._unanswered = self._unanswered, {}
        for key, future in unanswered.values():
            if not future.done():
                future.set_exception(self._loss(key))
        self._on_news(self)

    def _loss(self, key: str) -> ProcessLostError:
        found = ProcessLostError(f"the process that runs {self._what} of {name_of(key)} is lost: {self.lost}")
        found.__cause__ = self.lost
        return found

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # who waited may be cancelled
        return task
