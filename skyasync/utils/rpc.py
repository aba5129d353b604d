"""Calls to processes that carry out many at once: environments and agent programs.

Invariant: every call is answered exactly once within about ``limit_s`` of its start, with its result or with an error
that names its cause. A process that is lost or stuck is replaced; its calls fail with ``ProcessLostError``.

Calls that are posted in one turn of the event loop travel in one message, and answers return in small batches as calls
finish. At the other end, calls that await share an event loop in a thread of its own, all others run in
``DaemonThreads``; the loop that sends and receives messages runs no code of the user.

| who waits                      | for what    | woken by                                                    |
|--------------------------------|-------------|-------------------------------------------------------------|
| ``RpcClient.load``             | the process | its answer, or ``START_S``                                  |
| the future that ``post`` gives | its answer  | an exchange, or the loss of the process                     |
| an exchange (a task each)      | the process | its answers, its heartbeat, its failure, or ``silence_s``   |
| ``RpcServer.exchange``         | answers     | a call's end, a later exchange, or ``HEARTBEAT_S``          |
"""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from skyasync.errors import TransientError, UserError
from skyasync.utils.daemon_threads import DaemonThreads

if TYPE_CHECKING:
    from skyasync.utils.process_identity import ProcessIdentity

START_S = 120.0  # for a new process, and for what it imports before its first call
GRACE_S = 1.0  # for a coroutine to end after it has been cancelled
CLOSE_S = 30.0  # for a call that ends another one, if calls have no limit
HEARTBEAT_S = 5.0  # an exchange without answers ends after this, which shows that the process is alive
LINGER_S = 0.005  # answers are collected for this long
HOLD_S = 0.25  # at most, for all answers to a message's "init" calls
MOST_HUNG = 4  # calls that may hang in a process before it is replaced


class ProcessLostError(RuntimeError):
    """The process that worked on it is gone; which of its calls is to blame is unknown."""


class WorkerStartError(ProcessLostError, UserError):
    """The process ended while it was loading: the loaded code may be to blame, or whatever ended the process."""


class Call(NamedTuple):
    """A ``method`` of what ``key`` names (an episode); ``number`` is the caller's."""

    number: int
    method: str
    key: str
    args: tuple[Any, ...]

    @property
    def name(self) -> str:
        """Of the episode, for messages."""
        return self.key.rpartition("#")[0] or self.key


class Answer(NamedTuple):
    """To the call with this number: a result, or the error in its place."""

    number: int
    result: Any
    error: Exception | None = None


_keys = count()


def key_of(name: str) -> str:
    """A new one: an episode may start again while calls of the previous one, of the same name, are on their way."""
    return f"{name}#{next(_keys)}"


class Service(Protocol):
    """What a server carries out. Calls of one key never overlap; "close" may, which ends what it names."""

    @property
    def load(self) -> Callable[..., None]:
        """Prepare for a kind of call; called once for each, in a thread, without a limit."""

    def is_async(self, call: Call) -> bool:
        """Whether the call awaits: it then runs on an event loop, else in a thread."""

    def run(self, call: Call) -> Coroutine[Any, Any, Answer]:
        """Carry out one call; raises nothing but ``CancelledError``."""

    def overdue(self, call: Call) -> Exception:
        """What the caller gets for a call that has run for longer than it may."""

    def give_up(self, key: str) -> None:
        """Forget what hangs; its caller has its answer."""


# ---------------------------------------------------------------- in the process


class RpcServer:
    """``load`` and ``exchange`` are called from one event loop.

    Args:
        make: its service; called first of all.
        limit_s: of a call; 0 is none.
        max_threads: at once.
    """

    def __init__(self, make: Callable[[], Service], limit_s: float, max_threads: int = 512) -> None:
        self._service, self._limit_s = make(), limit_s
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
                threading.Thread(target=self._loop.run_forever, name="calls that await", daemon=True).start()
            for call in calls:  # without a task per call on this loop, which would cost as much again
                if self._loop is None or call.number not in awaiting:
                    continue
                limit_s = self._limit_s or (CLOSE_S if call.method == "close" else None)
                timer = None if limit_s is None else loop.call_later(limit_s + GRACE_S, self._end, call)
                running = asyncio.run_coroutine_threadsafe(within(limit_s, self._service, call), self._loop)
                running.add_done_callback(partial(loop.call_soon_threadsafe, self._end, call, timer))
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

    def _end(self, call: Call, timer: asyncio.TimerHandle | None = None, ended: Future[Answer] | None = None) -> None:
        """A call that awaits has ended; or (without ``ended``) it hangs: it was cancelled, or blocks its event loop."""
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
        except asyncio.CancelledError as error:  # raised by what does not await; it would end the thread
            return Answer(call.number, None, RuntimeError(f"the environment of {call.name} raised {error!r}"))
        coroutine.close()
        problem = f"the environment of {call.name} awaits, but its class has no async def among init, step and close"
        return Answer(call.number, None, TypeError(problem))


class AnswerBatches:
    """Answers on their way back, in small batches; each is collected exactly once. ``put`` may be called in any thread.

    The answers to a message's ``init`` calls wait until all of them are there (at most ``HOLD_S``): the engine then
    gets the first requests of these episodes together, so that what it computes does not depend on threads' timing.
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
            last, arm = not self._open, not self._armed
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
            answers, self._answers = self._answers, []
        return answers

    def _deliver(self) -> None:
        with self._lock:
            if self._opening and time.monotonic() < self._opening_until:
                asyncio.get_running_loop().call_later(LINGER_S, self._deliver)
                return
            self._opening, self._armed = set(), False
            ready = self._ready if self._answers else None
        if ready is not None:
            ready.set()


async def within(limit_s: float | None, service: Service, call: Call) -> Answer:
    """The answer to a call that awaits; one that takes longer is cancelled and closed."""
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


def portable(error: BaseException, loads: Callable[[bytes], object] = pickle.loads) -> Exception:
    """The error itself if it can be sent to another process, which has ``loads``; else one that says the same."""
    try:
        if isinstance(loads(pickle.dumps(error)), Exception):
            return error  # type: ignore[return-value]
    except Exception:
        pass
    kind = next((kind for kind in (TransientError, UserError) if isinstance(error, kind)), RuntimeError)
    stand_in = kind(f"{type(error).__qualname__}: {error}")
    for note in getattr(error, "__notes__", ()):
        stand_in.add_note(note)
    return stand_in


# ---------------------------------------------------------------- ways to a process


@dataclass(eq=False)
class LocalTransport:
    """A service on its caller's event loop, for runs in one process: no threads, and no clock but the event loop's.

    Quick calls are carried out at once, those that await as tasks.
    """

    service: Service
    limit_s: float = 0.0  # of a call that awaits; 0 is none
    _tasks: set[asyncio.Task[Answer]] = field(default_factory=set)

    async def load(self, *args: object) -> Exception | None:
        """Have the service load something; the error that this raised there. Raises if the process is gone."""
        try:
            self.service.load(*args)
        except Exception as error:
            return error
        return None

    async def exchange(self, calls: Sequence[Call]) -> tuple[list[Answer], int]:
        """Start these calls; answers to them or to earlier ones, and how many calls hang there."""
        answers = []
        for call in calls:
            if self.service.is_async(call):
                self._tasks.add(asyncio.create_task(within(self.limit_s or None, self.service, call)))
            else:
                answers.append(await self.service.run(call))
        if not answers and self._tasks:
            await asyncio.wait(self._tasks, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
        ended = {task for task in self._tasks if task.done()}
        self._tasks -= ended
        return answers + [task.result() for task in ended], 0

    def end(self) -> None:
        """Ask the process to end; later calls are not answered."""
        self.kill()

    def kill(self) -> None:
        for task in self._tasks:
            task.cancel()


class RpcActor(RpcServer):
    """A server in a Ray actor, which speaks in plain data: tuples take a third of the time to travel."""

    async def identity(self) -> ProcessIdentity:
        from skyasync.utils.process_identity import ProcessIdentity

        return ProcessIdentity.mine()

    async def load_pickled(self, args: bytes) -> Exception | None:
        """The module of a user's class is imported where that may take its time."""
        return await self._loaded(lambda: self._service.load(*pickle.loads(args)))

    async def exchange_tuples(self, calls: Sequence[tuple[Any, ...]]) -> tuple[list[tuple[Any, ...]], int]:
        answers, hung = await self.exchange([Call(*call) for call in calls])
        return [tuple(answer) for answer in answers], hung


class RayTransport:
    """A Ray actor, which ends with the process that made it.

    Args:
        make: as ``limit_s`` and ``max_threads``, of ``RpcServer``.
        options: Ray's, for the actor.
    """

    def __init__(
        self, make: Callable[[], Service], limit_s: float, max_threads: int = 512, options: dict[str, Any] | None = None
    ) -> None:
        import ray

        actor: Any = ray.remote(RpcActor).options(num_cpus=0, **(options or {}))
        self._actor = actor.remote(make, limit_s, max_threads)
        self._process: ProcessIdentity | None = None

    async def load(self, *args: object) -> Exception | None:
        from ray import cloudpickle

        if self._process is None:
            self._process = await self._actor.identity.remote()
        error: Exception | None = await self._actor.load_pickled.remote(cloudpickle.dumps(args))
        return error

    async def exchange(self, calls: Sequence[Call]) -> tuple[list[Answer], int]:
        answers, hung = await self._actor.exchange_tuples.remote([tuple(call) for call in calls])
        return [Answer(*answer) for answer in answers], hung

    def end(self) -> None:
        self._actor.__ray_terminate__.remote()  # Ray would report a kill to the user

    def kill(self) -> None:
        """Also if it does not answer any more."""
        import ray

        ray.kill(self._actor)
        if self._process is not None:
            self._process.end()


RpcTransport = LocalTransport | RayTransport


# ---------------------------------------------------------------- at the caller


class RpcClient:
    """One process as its pool sees it.

    Args:
        what: runs there, for messages ("the environment").
        silence_s: a process that leaves an exchange without reply for so long is lost.
        notify: called after every exchange, and when the process is lost.
    """

    def __init__(
        self, transport: RpcTransport, what: str, silence_s: float, notify: Callable[[RpcClient], None]
    ) -> None:
        self.worker = transport
        self.hung = 0
        self.lost: Exception | None = None
        self.keys: set[str] = set()
        self._what, self._silence_s, self._notify = what, silence_s, notify
        self._numbers = count()
        self._outbox: list[Call] = []
        self.unanswered: dict[int, tuple[Call, asyncio.Future[Any]]] = {}  # by number
        self._exchanges = 0
        self._loaded: dict[str, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def load(self, name: str, *args: object) -> None:
        """Have the process load something, once.

        Raises:
            UserError: if it is not ready within ``START_S``; a ``WorkerStartError`` if it ends.
            Exception: what loading raised.
        """
        if name not in self._loaded:
            self._loaded[name] = self._start(self._load(args))
        await asyncio.shield(self._loaded[name])

    def post(self, method: str, key: str, *args: object) -> asyncio.Future[Any]:
        """The future of the answer; a ``ProcessLostError`` if the process is lost before."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        call = Call(next(self._numbers), method, key, args)
        if self.lost is not None:
            future.set_exception(self._loss(call))
            return future
        self.unanswered[call.number] = (call, future)
        if not self._outbox:
            loop.call_soon(self._send)
        self._outbox.append(call)
        return future

    def kill(self, error: Exception | None = None) -> None:
        """End the process, if it is not lost yet; what is unanswered fails because of the error."""
        if self.lost is not None:
            return
        self.lost = error or RuntimeError("it was ended")
        self.worker.kill()
        unanswered, self.unanswered = self.unanswered, {}
        for call, future in unanswered.values():
            if not future.done():
                future.set_exception(self._loss(call))
        self._notify(self)

    async def _load(self, args: tuple[object, ...]) -> None:
        try:
            async with asyncio.timeout(START_S) as timer:
                problem = await self.worker.load(*args)
        except Exception as error:
            self.kill(error)
            who = f"the process that runs {self._what}"
            if isinstance(error, TimeoutError) and timer.expired():
                raise UserError(f"{who} was not ready within {START_S:g} s") from error
            raise WorkerStartError(f"{who} ended while it was loading: {error}") from error
        if problem is not None:
            raise problem

    def _send(self) -> None:
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
            return self.kill(TimeoutError(f"it sent no heartbeat for {self._silence_s:g} s") if silent else error)
        finally:
            self._exchanges -= 1
        if self.lost is not None:
            return
        for answer in answers:
            _, future = self.unanswered.pop(answer.number)
            with suppress(asyncio.InvalidStateError):  # its caller may have been cancelled
                if answer.error is None:
                    future.set_result(answer.result)
                else:
                    future.set_exception(answer.error)
        if self.unanswered and not self._exchanges and not self._outbox:
            self._start(self._exchange([]))
        self._notify(self)

    def _loss(self, call: Call) -> ProcessLostError:
        error = ProcessLostError(f"the process that runs {self._what} of {call.name} is lost: {self.lost}")
        error.__cause__ = self.lost
        return error

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # its caller may be cancelled
        return task


class RpcPool:
    """A number of processes. One that is lost is replaced at once.

    One in which too many calls hang gets no new work: another takes its place, and it is ended after its last work.

    Args:
        start: starts a process; called again for each one that must be replaced.
        what: runs there, for messages.
    """

    def __init__(self, start: Callable[[], RpcTransport], count: int, what: str, silence_s: float) -> None:
        self._start = lambda: RpcClient(start(), what, silence_s, self.look_at)
        self._count = count
        self.processes: list[RpcClient] = []
        self.replaced = 0

    def fill(self) -> None:
        """Start all of them, so that they are there when they are needed."""
        self.processes += [self._start() for _ in range(self._count - len(self.processes))]

    def take(self, key: str) -> RpcClient:
        """The process with the least work, which has this as well until it is given back."""
        self.fill()
        process = min(self.processes, key=lambda process: len(process.keys))
        process.keys.add(key)
        return process

    def give_back(self, process: RpcClient, key: str) -> None:
        process.keys.discard(key)
        self.look_at(process)

    def look_at(self, process: RpcClient) -> None:
        """Replace a process that is lost or stuck; end one that was replaced and has no work left."""
        if process in self.processes:
            if process.lost is not None or process.hung >= MOST_HUNG:
                self.processes[self.processes.index(process)] = self._start()
                self.replaced += 1
        elif process.lost is None and not process.keys and not process.unanswered:
            process.kill()

    def close(self) -> None:
        """Kill all of them."""
        processes, self.processes = self.processes, []  # ``look_at`` is to replace none
        for process in processes:
            process.kill()

    def end(self) -> None:
        """Ask all of them to end, whatever they work on."""
        processes, self.processes = self.processes, []
        for process in processes:
            process.worker.end()
