"""Calls to one worker, and their answers.

Invariant: every call posted ends: with the worker's answer, or with the error that lost the worker. Calls posted in one
turn of the event loop travel in one message; while calls are unanswered, exactly one exchange with the worker waits.

| who waits                      | for what   | woken by                                                |
|--------------------------------|------------|---------------------------------------------------------|
| the future that ``post`` gives | its answer | ``_settle``, or ``_lose``                               |
| ``_exchange`` (a task each)    | the worker | its answers, its heartbeat, its death, or ``silence_s`` |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Protocol

from skyasync.envs.episodes import Answer, Call
from skyasync.envs.registry import EnvFactory

START_S = 60.0  # that a new process may need before it can answer


class Worker(Protocol):
    """What ``EnvWorker`` offers, wherever it lives."""

    async def define(self, name: str, factory: EnvFactory) -> None: ...

    async def exchange(self, calls: Sequence[Call]) -> tuple[list[Answer], int]: ...

    def kill(self) -> None: ...


class WorkerLink:
    """One worker as the pool sees it.

    Args:
        silence_s: a worker that leaves an exchange without reply for so long is lost.
        on_news: called after every exchange, and when the worker is lost.
    """

    def __init__(self, worker: Worker, silence_s: float, on_news: Callable[[WorkerLink], None]) -> None:
        self.worker = worker
        self.hung = 0  # calls that hang there
        self.lost: Exception | None = None
        self.episodes: set[str] = set()
        self._silence_s, self._on_news = silence_s, on_news
        self._numbers = count()
        self._outbox: list[Call] = []
        self._unanswered: dict[int, tuple[str, asyncio.Future[Any]]] = {}  # by number, with the episode
        self._exchanges = 0
        self._defined: dict[str, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def idle(self) -> bool:
        return not self.episodes and not self._unanswered

    async def define(self, name: str, factory: EnvFactory) -> None:
        """Make the worker know an environment, once."""
        if name not in self._defined:
            self._defined[name] = self._start(self._define(name, factory))
        await asyncio.shield(self._defined[name])

    def post(self, method: str, episode: str, *args: Any) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if self.lost is not None:
            future.set_exception(_of(episode, self.lost))
            return future
        call = Call(next(self._numbers), method, episode, args)
        self._unanswered[call.number] = (episode, future)
        if not self._outbox:
            loop.call_soon(self._dispatch)
        self._outbox.append(call)
        return future

    def kill(self) -> None:
        """End the worker; what is unanswered fails."""
        self._lose(RuntimeError("the process of environments was ended"))

    async def _define(self, name: str, factory: EnvFactory) -> None:
        async with asyncio.timeout(START_S + self._silence_s):
            await self.worker.define(name, factory)

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
            return self._lose(
                _silent(self._silence_s) if isinstance(error, TimeoutError) and timer.expired() else error
            )
        finally:
            self._exchanges -= 1
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
        for episode, future in unanswered.values():
            if not future.done():
                future.set_exception(_of(episode, error))
        self._on_news(self)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _silent(seconds: float) -> TimeoutError:
    return TimeoutError(f"it gave no sign of life for {seconds:g} s")


def _of(episode: str, error: Exception) -> Exception:
    """The loss of a worker, as the caller of an episode in it is told."""
    found = RuntimeError(f"the process that runs the environment of {episode} is lost: {error}")
    found.__cause__ = error
    return found
