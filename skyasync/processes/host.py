"""What lives in a process that carries out many calls: they come in messages, answers leave as they finish.

Invariant: every call is answered exactly once within about ``limit_s`` of its beginning, whatever it does (short of
holding Python's interpreter lock, which the other end notices). Calls that await share an event loop in a thread of its
own, all others run in ``StepThreads``; the loop on which messages come and go runs no code of the user's.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property
from typing import Any

from skyasync.processes.calls import GRACE_S, Answer, Call, Service, portable
from skyasync.processes.mailbox import Mailbox
from skyasync.processes.threads import StepThreads

HEARTBEAT_S = 5.0  # an exchange without answers ends after this, which shows that the process is alive
CLOSE_S = 30.0  # for a call that ends another one, where calls have no limit


class Host:
    """``load`` and ``exchange`` are called from one event loop.

    Args:
        make: its service; called first of all.
        limit_s: of a call; 0 is none.
        max_threads: at once.
    """

    def __init__(self, make: Callable[[], Service], limit_s: float, max_threads: int = 512) -> None:
        self._service, self._limit_s = make(), limit_s
        self._threads: StepThreads[Call, Answer] = StepThreads(
            self._drive, self._answer, most=max_threads, limit_s=limit_s or float("inf")
        )
        self._hanging: set[int] = set()  # calls that await and did not end when they were cancelled

    async def load(self, *args: object) -> Exception | None:
        return await self._loaded(lambda: self._service.load(*args))

    async def exchange(self, calls: Sequence[Call]) -> tuple[list[Answer], int]:
        """Begin these calls; returns answers to them or to earlier ones, and how many calls hang.

        Waits until there are answers, a later exchange takes over, or ``HEARTBEAT_S`` have passed.
        """
        if calls:
            self._mailbox.expect(calls)
            awaiting = {call.number for call in calls if self._service.is_async(call)}
            for call in calls:
                if call.number in awaiting:
                    self._begin(call)
            self._threads.submit([call for call in calls if call.number not in awaiting])
        answers = await self._mailbox.collect(HEARTBEAT_S)
        return answers, self._threads.hung + len(self._hanging)

    def close(self) -> None:
        self._threads.close()
        if "_loop" in self.__dict__:
            asyncio.run_coroutine_threadsafe(_stop(), self._loop)

    @staticmethod
    async def _loaded(load: Callable[[], None]) -> Exception | None:
        """The error that it raises, if any. It runs in a thread: it may take long, and holds up nobody."""
        try:
            await asyncio.to_thread(load)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # what would end the event loop too
            return portable(error)
        return None

    @cached_property
    def _mailbox(self) -> Mailbox:
        return Mailbox()

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """Where calls await."""
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="calls that await", daemon=True).start()
        return loop

    def _drive(self, call: Call) -> Answer:
        return drive(call, self._service.run(call))

    def _answer(self, call: Call, answer: Answer | None) -> None:
        if answer is None:
            self._service.give_up(call.key)
            answer = Answer(call.number, None, self._service.overdue(call))
        self._mailbox.put(answer)

    def _begin(self, call: Call) -> None:
        """Carry a call out on the other loop. (No task per call on this one: that would cost as much again.)"""
        loop, timer = asyncio.get_running_loop(), None
        limit_s = self._limit_s or (CLOSE_S if call.method == "close" else None)
        if limit_s is not None:
            timer = loop.call_later(limit_s + GRACE_S, self._hang, call)
        running = asyncio.run_coroutine_threadsafe(within(limit_s, self._service, call), self._loop)
        running.add_done_callback(lambda ended: loop.call_soon_threadsafe(self._end, call, ended, timer))

    def _end(self, call: Call, ended: Future[Answer], timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
        if call.number in self._hanging:  # it has been answered for
            self._hanging.remove(call.number)
        else:
            self._mailbox.put(ended.result())

    def _hang(self, call: Call) -> None:
        """It goes on though it was cancelled, or blocks its event loop."""
        self._hanging.add(call.number)
        self._answer(call, None)


async def within(limit_s: float | None, service: Service, call: Call) -> Answer:
    """The answer to a call that awaits; what takes longer is cancelled and closed."""
    try:
        async with asyncio.timeout(limit_s):
            return await service.run(call)
    except TimeoutError:
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await service.run(call._replace(method="close", args=()))
        return Answer(call.number, None, service.overdue(call))
    except asyncio.CancelledError:
        return Answer(call.number, None, RuntimeError(f"{call.name} cancelled itself"))


def drive(call: Call, coroutine: Coroutine[Any, Any, Answer]) -> Answer:
    """The answer of ``Service.run`` where there is no event loop, for calls that do not await."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        answer: Answer = ended.value
        return answer
    except asyncio.CancelledError as error:  # raised by what does not await; it would end the thread
        return Answer(call.number, None, RuntimeError(f"the environment of {call.name} raised {error!r}"))
    coroutine.close()
    problem = f"the environment of {call.name} awaits, but its class has no async def among init, step and close"
    return Answer(call.number, None, TypeError(problem))


async def _stop() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=GRACE_S)
    asyncio.get_running_loop().stop()
