"""A process that runs many calls at once (see ``rpc``), on an event loop or in threads.

A call that awaits runs on an event loop, other calls in threads. The loop that sends and receives
messages runs no code of the user: calls that await share another event loop, in another thread.

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

# Answers are collected for so long: a message for each of them would cost more.
LINGER_S = 0.005
# For all answers to the "init" calls of a message: slow ones must not delay the others.
HOLD_S = 0.25

T = TypeVar("T")
R = TypeVar("R")


class RpcServer:
    """Runs the calls of a service. ``load`` and ``exchange`` are called from one event loop.

    Args:
        make: makes the service, here.
        limit_s: of a call; 0 is none.
        max_threads: calls in threads at once.
    """

    def __init__(self, make: Callable[[], Service], limit_s: float, max_threads: int = 512) -> None:
        self._service = make()
        self._limit_s = limit_s
        self._threads: DaemonThreads[Call, Answer] = DaemonThreads(
            self._run_in_thread, self._answer, max_threads=max_threads, limit_s=limit_s or inf
        )
        self._outgoing = AnswerBatches()
        # Numbers of calls that await, and did not end when they were cancelled.
        self._hung_numbers: set[int] = set()
        self._loop: asyncio.AbstractEventLoop | None = None  # of the calls that await

    async def load(self, *args: object) -> Exception | None:
        return await self._error_of_load(lambda: self._service.load(*args))

    async def exchange(self, calls: Sequence[Call]) -> tuple[list[Answer], int]:
        """Start these calls; returns answers to them or to earlier ones, and how many calls hang.

        Waits until there are answers, a later exchange takes over, or ``HEARTBEAT_S`` have passed.
        """
        if calls:
            self._outgoing.expect(calls)
            thread_calls = []
            for call in calls:
                if self._service.is_async(call):
                    self._start_on_loop(call)
                else:
                    thread_calls.append(call)
            self._threads.submit(thread_calls)
        answers = await self._outgoing.collect(HEARTBEAT_S)
        return answers, self._threads.hung + len(self._hung_numbers)

    def _start_on_loop(self, call: Call) -> None:
        """Start a call that awaits, on the event loop of these calls."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            thread = threading.Thread(
                target=self._loop.run_forever, name="calls that await", daemon=True
            )
            thread.start()
        limit_s: float | None = self._limit_s
        if not limit_s:
            limit_s = CLOSE_S if call.method == "close" else None
        # Callbacks instead of a task on the loop of the messages, which would cost as much again.
        loop = asyncio.get_running_loop()
        timer = None
        if limit_s is not None:
            timer = loop.call_later(limit_s + GRACE_S, self._end, call)
        coroutine = within(limit_s, self._service, call)
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        future.add_done_callback(partial(loop.call_soon_threadsafe, self._end, call, timer))

    def close(self) -> None:
        """End the threads when their calls have ended, and cancel the calls that await."""
        self._threads.close()
        if self._loop is None:
            return

        async def stop() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=GRACE_S)
            asyncio.get_running_loop().stop()

        asyncio.run_coroutine_threadsafe(stop(), self._loop)

    @staticmethod
    async def _error_of_load(load: Callable[[], None]) -> Exception | None:
        """The error that ``load`` raises, if any. It may take long, so it runs in a thread."""
        try:
            await asyncio.to_thread(load)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # such as SystemExit, which would end the event loop
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
        """Answer a call that awaits.

        Args:
            ended: the call; None: it hangs, because it ignores its cancellation or blocks its event
                loop.
        """
        if timer is not None:
            timer.cancel()
        if ended is None:
            self._hung_numbers.add(call.number)
            self._answer(call, None)
        elif call.number in self._hung_numbers:  # it has an answer
            self._hung_numbers.remove(call.number)
        else:
            self._outgoing.put(ended.result())

    def _run_in_thread(self, call: Call) -> Answer:
        """The answer to a call that does not await, in a thread without an event loop."""
        coroutine = self._service.run(call)
        # A coroutine that does not await ends at its first step.
        try:
            coroutine.send(None)
        except StopIteration as ended:
            answer: Answer = ended.value
            return answer
        except asyncio.CancelledError as error:  # of the user's code; it would end the thread
            problem = f"the environment of {call.name} raised {error!r}"
            return Answer(call.number, None, RuntimeError(problem))
        coroutine.close()
        problem = f"the environment of {call.name} awaits, but its class has no async def among init, step and close"
        return Answer(call.number, None, TypeError(problem))


class AnswerBatches:
    """Answers on their way back, in small batches; each is collected exactly once.

    The answers to a message's ``init`` calls wait until all of them are there (at most ``HOLD_S``).
    The engine then gets the first requests of these episodes together, so that its batches do not
    depend on threads' timing.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None  # on which answers are collected
        self._lock = threading.Lock()
        self._answers: list[Answer] = []
        self._open_numbers: set[int] = set()  # of calls that are not answered
        self._init_numbers: set[int] = set()  # of open "init" calls that are answered together
        self._init_deadline_s = 0.0
        self._delivery_is_scheduled = False
        self._ready: asyncio.Event | None = None

    def expect(self, calls: Sequence[Call]) -> None:
        """Note that these calls will be answered."""
        self._loop = asyncio.get_running_loop()
        with self._lock:
            self._open_numbers.update(call.number for call in calls)
            if not self._init_numbers:
                self._init_numbers = {call.number for call in calls if call.method == "init"}
                self._init_deadline_s = time.monotonic() + HOLD_S

    def put(self, answer: Answer) -> None:
        """Add an answer, from any thread."""
        with self._lock:
            self._answers.append(answer)
            self._open_numbers.discard(answer.number)
            self._init_numbers.discard(answer.number)
            complete = not self._open_numbers
            must_schedule = not self._delivery_is_scheduled
            self._delivery_is_scheduled = True
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed
            if complete:  # no other answer can join the batch
                self._loop.call_soon_threadsafe(self._deliver)
            elif must_schedule:
                self._loop.call_soon_threadsafe(self._loop.call_later, LINGER_S, self._deliver)

    async def collect(self, limit_s: float) -> list[Answer]:
        """Wait for answers, at most ``limit_s``.

        A later call takes the place of an earlier one, which then returns nothing.
        """
        if self._ready is not None:
            self._ready.set()
        ready = asyncio.Event()
        self._ready = ready
        if self._answers and not self._delivery_is_scheduled:
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
        """Wake ``collect``, or try again later if "init" calls are open."""
        with self._lock:
            if self._init_numbers and time.monotonic() < self._init_deadline_s:
                asyncio.get_running_loop().call_later(LINGER_S, self._deliver)
                return
            self._init_numbers = set()
            self._delivery_is_scheduled = False
            ready = self._ready if self._answers else None
        if ready is not None:
            ready.set()


class RpcActor(RpcServer):
    """A server in a Ray actor. Its messages are tuples, which travel in a third of the time."""

    async def identity(self) -> ProcessIdentity:
        from skyasync.utils.machine import ProcessIdentity

        return ProcessIdentity.mine()

    async def load_pickled(self, args: bytes) -> Exception | None:
        """Load as ``load``; the arguments are unpickled in the thread, which imports user code."""
        return await self._error_of_load(lambda: self._service.load(*pickle.loads(args)))

    async def exchange_tuples(
        self, calls: Sequence[tuple[Any, ...]]
    ) -> tuple[list[tuple[Any, ...]], int]:
        answers, hung = await self.exchange([Call(*call) for call in calls])
        return [tuple(answer) for answer in answers], hung


@dataclass(eq=False, slots=True)
class _RunningJob(Generic[T]):
    """A job in a thread.

    Attributes:
        began_s: when its time limit began (``time.monotonic``); infinite while no limit applies.
    """

    job: T
    began_s: float


_thread = threading.local()  # ``running``: the job of a thread of ``DaemonThreads``


@contextmanager
def separate_limit() -> Iterator[None]:
    """Suspend the time limit of this thread's job: the block has another limit.

    The job's limit begins again after the block. No effect in other threads than those of
    ``DaemonThreads``.
    """
    running: _RunningJob[Any] | None = getattr(_thread, "running", None)
    if running is None:
        yield
        return
    running.began_s = inf
    try:
        yield
    finally:
        running.began_s = time.monotonic()


class DaemonThreads(Generic[T, R]):
    """Runs ``work(job)`` in threads, and passes its result to ``answer(job, result)``.

    Jobs may block or hang. They are started in order. Each is answered exactly once: with its
    result, or with None when it has run for ``limit_s`` (see ``separate_limit``). A thread that
    hangs cannot be ended; another one takes its place. (``ThreadPoolExecutor`` waits for its
    threads at exit, so that a hung thread would keep its process alive.)

    Args:
        work: must not raise.
        answer: called in any thread; with None for a job that hangs, whose later result is dropped.
        max_threads: threads at once, without those that hang.
    """

    def __init__(
        self,
        work: Callable[[T], R],
        answer: Callable[[T, R | None], None],
        *,
        max_threads: int,
        limit_s: float,
    ) -> None:
        self._work = work
        self._answer = answer
        self._max_threads = max_threads
        self._limit_s = limit_s
        self._jobs: SimpleQueue[tuple[T] | None] = SimpleQueue()  # None ends a thread
        self._running_jobs: set[_RunningJob[T]] = set()  # the thread that removes a job answers it
        self._lock = threading.Lock()
        # Both without those that hang.
        self._unfinished_jobs = 0
        self._threads = 0
        self._closed = threading.Event()
        self.hung = 0  # threads stuck in a job that has an answer
        if isfinite(limit_s):
            _start(self._watch)

    def submit(self, jobs: Iterable[T]) -> None:
        """Queue jobs; threads are started as they are needed."""
        with self._lock:
            for job in jobs:
                self._jobs.put((job,))
                self._unfinished_jobs += 1
                if self._threads < min(self._unfinished_jobs, self._max_threads):
                    self._threads += 1
                    _start(self._serve)

    def close(self) -> None:
        """End the threads after their jobs."""
        self._closed.set()
        for _ in range(self._threads):
            self._jobs.put(None)

    def _serve(self) -> None:
        while (entry := self._jobs.get()) is not None:
            (job,) = entry
            running = _RunningJob(job, time.monotonic())
            self._running_jobs.add(running)
            _thread.running = running
            result = self._work(job)
            if not self._remove(running):
                # The job was answered, and another thread has taken the place of this one.
                with self._lock:
                    self.hung -= 1
                return
            with self._lock:
                self._unfinished_jobs -= 1
            self._answer(job, result)

    def _remove(self, running: _RunningJob[T]) -> bool:
        """Remove a job; false if it has an answer already."""
        with self._lock:
            if running not in self._running_jobs:
                return False
            self._running_jobs.remove(running)
            return True

    def _watch(self) -> None:
        """Answer jobs that hang, and replace their threads."""
        sleep_s = self._limit_s
        while not self._closed.wait(sleep_s):
            latest_start_s = time.monotonic() - self._limit_s
            for running in self._running_jobs.copy():
                if running.began_s <= latest_start_s and self._remove(running):
                    with self._lock:
                        self.hung += 1
                        self._unfinished_jobs -= 1
                        _start(self._serve)  # takes the place of the hung thread
                    self._answer(running.job, None)
            # A limit that begins later ends later: no job hangs before the oldest one does.
            starts_s = [running.began_s for running in self._running_jobs.copy()]
            sleep_s = min(min(starts_s, default=inf) - latest_start_s, self._limit_s)


def _start(target: Callable[[], None]) -> None:
    threading.Thread(target=target, name="calls", daemon=True).start()
