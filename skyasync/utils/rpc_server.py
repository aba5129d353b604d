"""A process that carries out many calls at once (see ``rpc``): each on an event loop if it awaits,
else in a thread.

The loop that sends and receives messages runs no code of the user: calls that await share an event
loop in a thread of its own.

| who waits              | for what | woken by                                            |
|------------------------|----------|-----------------------------------------------------|
| ``RpcServer.exchange`` | answers  | a call's end, a later exchange, or ``HEARTBEAT_S``  |
"""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from skyasync.utils.rpc import (
    CLOSE_S,
    GRACE_S,
    HEARTBEAT_S,
    Answer,
    Call,
    Service,
    portable,
    within,
)

if TYPE_CHECKING:
    from skyasync.utils.machine import ProcessIdentity

LINGER_S = 0.005  # answers are collected for this long
HOLD_S = 0.25  # at most, for all answers to a message's "init" calls

T = TypeVar("T")
R = TypeVar("R")


class RpcServer:
    """``load`` and ``exchange`` are called from one event loop.

    Args:
        make: its service; called first of all.
        limit_s: of a call; 0 is none.
        max_threads: at once.
    """

    def __init__(self, make: Callable[[], Service], limit_s: float, max_threads: int = 512) -> None:
        self._service = make()
        self._limit_s = limit_s
        self._threads: DaemonThreads[Call, Answer] = DaemonThreads(
            self._run_in_thread, self._answer, most=max_threads, limit_s=limit_s or float("inf")
        )
        self._outgoing = AnswerBatches()
        self._hanging: set[int] = set()  # calls that await and did not end when they were cancelled
        self._loop: asyncio.AbstractEventLoop | None = None  # of the calls that await

    async def load(self, *args: object) -> Exception | None:
        return await self._loaded(lambda: self._service.load(*args))

    async def exchange(self, calls: Sequence[Call]) -> tuple[list[Answer], int]:
        """Start these calls; returns answers to them or to earlier ones, and how many calls hang.

        Waits until there are answers, a later exchange takes over, or ``HEARTBEAT_S`` have passed.
        """
        if calls:
            self._outgoing.expect(calls)
            awaiting = {call.number for call in calls if self._service.is_async(call)}
            loop = asyncio.get_running_loop()
            if awaiting and self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self._loop.run_forever, name="calls that await", daemon=True
                ).start()
            for (
                call
            ) in calls:  # without a task per call on this loop, which would cost as much again
                if self._loop is None or call.number not in awaiting:
                    continue
                limit_s = self._limit_s or (CLOSE_S if call.method == "close" else None)
                if limit_s is None:
                    timer = None
                else:
                    timer = loop.call_later(limit_s + GRACE_S, self._end, call)
                running = asyncio.run_coroutine_threadsafe(
                    within(limit_s, self._service, call), self._loop
                )
                running.add_done_callback(
                    partial(loop.call_soon_threadsafe, self._end, call, timer)
                )
            self._threads.submit([call for call in calls if call.number not in awaiting])
        answers = await self._outgoing.collect(HEARTBEAT_S)
        return answers, self._threads.hung + len(self._hanging)

    def close(self) -> None:
        self._threads.close()
        if self._loop is None:
            return

        async def stop() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=GRACE_S)
            asyncio.get_running_loop().stop()

        asyncio.run_coroutine_threadsafe(stop(), self._loop)

    @staticmethod
    async def _loaded(load: Callable[[], None]) -> Exception | None:
        """The error that it raises, if any. It may take long, so it runs in a thread."""
        try:
            await asyncio.to_thread(load)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # what would end the event loop too
            return portable(error)
        return None

    def _answer(self, call: Call, answer: Answer | None) -> None:
        if answer is None:
            self._service.give_up(call.key)
            answer = Answer(call.number, None, self._service.overdue(call))
        self._outgoing.put(answer)

    def _end(
        self,
        call: Call,
        timer: asyncio.TimerHandle | None = None,
        ended: Future[Answer] | None = None,
    ) -> None:
        """A call that awaits has ended; or (without ``ended``) it hangs: it was cancelled, or
        blocks its event loop."""
        if timer is not None:
            timer.cancel()
        if ended is None:
            self._hanging.add(call.number)
            self._answer(call, None)
        elif call.number in self._hanging:  # it has been answered for
            self._hanging.remove(call.number)
        else:
            self._outgoing.put(ended.result())

    def _run_in_thread(self, call: Call) -> Answer:
        """The answer to a call that does not await, in a thread without an event loop."""
        coroutine = self._service.run(call)
        try:
            coroutine.send(None)
        except StopIteration as ended:
            answer: Answer = ended.value
            return answer
        except (
            asyncio.CancelledError
        ) as error:  # raised by what does not await; it would end the thread
            return Answer(
                call.number, None, RuntimeError(f"the environment of {call.name} raised {error!r}")
            )
        coroutine.close()
        problem = f"the environment of {call.name} awaits, but its class has no async def among init, step and close"
        return Answer(call.number, None, TypeError(problem))


class AnswerBatches:
    """Answers on their way back, in small batches; each is collected exactly once. ``put`` may be
    called in any thread.

    The answers to a message's ``init`` calls wait until all of them are there (at most ``HOLD_S``):
    the engine then gets the first requests of these episodes together, so that what it computes
    does not depend on threads' timing.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None  # on which answers are collected
        self._lock = threading.Lock()
        self._answers: list[Answer] = []
        self._open: set[int] = set()  # numbers of the calls that are not answered
        self._opening: set[int] = set()  # of these, "init" calls that are answered together
        self._opening_until = 0.0
        self._armed = False
        self._ready: asyncio.Event | None = None

    def expect(self, calls: Sequence[Call]) -> None:
        """These calls will be answered."""
        self._loop = asyncio.get_running_loop()
        with self._lock:
            self._open.update(call.number for call in calls)
            if not self._opening:
                self._opening = {call.number for call in calls if call.method == "init"}
                self._opening_until = time.monotonic() + HOLD_S

    def put(self, answer: Answer) -> None:
        with self._lock:
            self._answers.append(answer)
            self._open.discard(answer.number)
            self._opening.discard(answer.number)
            last = not self._open
            arm = not self._armed
            self._armed = True
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed
            if last:
                self._loop.call_soon_threadsafe(self._deliver)
            elif arm:
                self._loop.call_soon_threadsafe(self._loop.call_later, LINGER_S, self._deliver)

    async def collect(self, limit_s: float) -> list[Answer]:
        """A later call takes the place of an earlier one, which then returns nothing."""
        if self._ready is not None:
            self._ready.set()
        ready = self._ready = asyncio.Event()
        if self._answers and not self._armed:
            ready.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await ready.wait()
        if self._ready is not ready:
            return []
        self._ready = None
        with self._lock:
            answers = self._answers
            self._answers = []
        return answers

    def _deliver(self) -> None:
        with self._lock:
            if self._opening and time.monotonic() < self._opening_until:
                asyncio.get_running_loop().call_later(LINGER_S, self._deliver)
                return
            self._opening = set()
            self._armed = False
            ready = self._ready if self._answers else None
        if ready is not None:
            ready.set()


class RpcActor(RpcServer):
    """A server in a Ray actor, which speaks in plain data: tuples take a third of the time to
    travel."""

    async def identity(self) -> ProcessIdentity:
        from skyasync.utils.machine import ProcessIdentity

        return ProcessIdentity.mine()

    async def load_pickled(self, args: bytes) -> Exception | None:
        """The module of a user's class is imported where that may take its time."""
        return await self._loaded(lambda: self._service.load(*pickle.loads(args)))

    async def exchange_tuples(
        self, calls: Sequence[tuple[Any, ...]]
    ) -> tuple[list[tuple[Any, ...]], int]:
        answers, hung = await self.exchange([Call(*call) for call in calls])
        return [tuple(answer) for answer in answers], hung


@dataclass(eq=False, slots=True)
class _RunningJob(Generic[T]):
    """``since``: when its time limit began (``time.monotonic``); infinite while the limit does not
    apply."""

    job: T
    since: float


_thread = threading.local()  # ``running``: the job of a thread of ``DaemonThreads``


@contextmanager
def separate_limit() -> Iterator[None]:
    """A wait that has a limit of its own: the limit of the job that this thread runs begins again
    after it.

    Has no effect in threads that ``DaemonThreads`` did not start.
    """
    running: _RunningJob[Any] | None = getattr(_thread, "running", None)
    if running is None:
        yield
        return
    running.since = inf
    try:
        yield
    finally:
        running.since = time.monotonic()


class DaemonThreads(Generic[T, R]):
    """Runs ``work(job)``, which may block or hang, in threads, and passes its result to
    ``answer(job, result)``.

    Jobs are started in the order given. Each is answered exactly once: with its result, or with
    None when it has run for ``limit_s`` (see ``separate_limit``). A thread that hangs cannot be
    ended; another one takes its place. (``ThreadPoolExecutor`` waits for its threads at exit, so
    that one that hangs would keep its process alive.)

    Args:
        work: must not raise.
        answer: called in any thread; with None for a job that hangs (what its ``work`` returns
            later is dropped).
        most: threads at once, those that hang not counted.
    """

    def __init__(
        self,
        work: Callable[[T], R],
        answer: Callable[[T, R | None], None],
        *,
        most: int,
        limit_s: float,
    ) -> None:
        self._work = work
        self._answer = answer
        self._most = most
        self._limit_s = limit_s
        self._jobs: SimpleQueue[tuple[T] | None] = SimpleQueue()  # None ends a thread
        self._running: set[_RunningJob[T]] = set()  # the thread that removes a job answers it
        self._lock = threading.Lock()
        self._unfinished = self._threads = 0  # those that hang not counted
        self._closed = threading.Event()
        self.hung = 0  # threads stuck in a job that has been answered for them
        if isfinite(limit_s):
            _start(self._watch)

    def submit(self, jobs: Iterable[T]) -> None:
        with self._lock:
            for job in jobs:
                self._jobs.put((job,))
                self._unfinished += 1
                if self._threads < min(self._unfinished, self._most):
                    self._threads += 1
                    _start(self._serve)

    def close(self) -> None:
        """Threads end after the jobs that they have."""
        self._closed.set()
        for _ in range(self._threads):
            self._jobs.put(None)

    def _serve(self) -> None:
        while (taken := self._jobs.get()) is not None:
            (job,) = taken
            running = _RunningJob(job, time.monotonic())
            self._running.add(running)
            _thread.running = running
            result = self._work(job)
            if not self._remove(running):
                with self._lock:
                    self.hung -= 1
                return  # its place has been taken
            with self._lock:
                self._unfinished -= 1
            self._answer(job, result)

    def _remove(self, running: _RunningJob[T]) -> bool:
        """Whether the job was still unanswered."""
        with self._lock:
            if running not in self._running:
                return False
            self._running.remove(running)
            return True

    def _watch(self) -> None:
        """Find jobs that hang. A limit that begins later ends later, so it sleeps until the first
        one ends."""
        sleep_s = self._limit_s
        while not self._closed.wait(sleep_s):
            latest = time.monotonic() - self._limit_s
            for running in self._running.copy():
                if running.since <= latest and self._remove(running):
                    with self._lock:
                        self.hung += 1
                        self._unfinished -= 1
                        _start(self._serve)  # in its place
                    self._answer(running.job, None)
            first = min((running.since for running in self._running.copy()), default=inf)
            sleep_s = min(first - latest, self._limit_s)


def _start(target: Callable[[], None]) -> None:
    threading.Thread(target=target, name="calls", daemon=True).start()
