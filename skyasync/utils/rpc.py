"""Calls to processes that carry out many at once: environments and agent programs.

Invariant: every call is answered exactly once within about ``limit_s`` of its start, with its
result or with an error that names its cause. A process that is lost or stuck is replaced; its calls
fail with ``ProcessLostError``.

Calls that are posted in one turn of the event loop travel in one message, and answers return in
small batches as calls finish. What the process does with them is in ``rpc_server``.

| who waits                      | for what    | woken by                                                    |
|--------------------------------|-------------|-------------------------------------------------------------|
| ``RpcClient.load``             | the process | its answer, or ``START_S``                                  |
| the future that ``post`` gives | its answer  | an exchange, or the loss of the process                     |
| an exchange (a task each)      | the process | its answers, its heartbeat, its failure, or ``silence_s``   |
| ``RetryPolicy.wait``           | its pause   | the clock                                                   |
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from skyasync.errors import TransientError, UserError, headline

if TYPE_CHECKING:
    from skyasync.config.schema import EnvironmentConfig
    from skyasync.utils.machine import ProcessIdentity

log = logging.getLogger(__name__)

START_S = 120.0  # for a new process, and for what it imports before its first call
GRACE_S = 1.0  # for a coroutine to end after it has been cancelled
CLOSE_S = 30.0  # for a call that ends another one, if calls have no limit
HEARTBEAT_S = (
    5.0  # an exchange without answers ends after this, which shows that the process is alive
)
TURN_ANSWERS = 64  # passed on in one turn of the event loop
MOST_HUNG = 4  # calls that may hang in a process before it is replaced

_warned: set[str] = set()  # types of transient errors that this process has logged


class ProcessLostError(RuntimeError):
    """The process that worked on it is gone; which of its calls is to blame is unknown."""


class WorkerStartError(ProcessLostError, UserError):
    """The process ended while it was loading: the loaded code may be to blame, or whatever ended
    the process."""


class Call(NamedTuple):
    """A ``method`` of what ``key`` names (an episode); ``number`` is the caller's."""

    number: int
    method: str
    key: str
    args: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The episode's name, for messages."""
        return self.key.rpartition("#")[0] or self.key


class Answer(NamedTuple):
    """To the call with this number: a result, or the error in its place."""

    number: int
    result: Any
    error: Exception | None = None


_keys = count()


def key_of(name: str) -> str:
    """A new one: an episode may start again while calls of the previous one, of the same name, are
    on their way."""
    return f"{name}#{next(_keys)}"


class Service(Protocol):
    """What a server carries out. Calls of one key never overlap; "close" may, which ends what it
    names."""

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


@dataclass(frozen=True)
class RetryPolicy:
    """A transient error is tried again after growing pauses, at most so often, and then raised like
    any other.

    Each try has the time limit of the first. Pauses are spent on the caller's event loop.

    Args:
        tries: after the first; 0 is none.
        pause_s: before the second try, twice that before the third, and so on.
        names: of further transient errors besides ``TransientError``, with their module or without.
    """

    tries: int = 0
    pause_s: float = 1.0
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, cfg: EnvironmentConfig) -> RetryPolicy:
        """The policy of a run."""
        return cls(cfg.max_retries, names=tuple(cfg.transient_errors))

    def is_transient(self, error: BaseException) -> bool:
        """Whether an error, or what it derives from, is transient."""
        bases = type(error).__mro__
        known = {
            name
            for base in bases
            for name in (base.__name__, f"{base.__module__}.{base.__qualname__}")
        }
        return isinstance(error, TransientError) or not known.isdisjoint(self.names)

    def as_transient(self, error: Exception) -> Exception:
        """The error; as a ``TransientError`` if it is one by its name, which may not survive the
        way back."""
        if not self.is_transient(error) or isinstance(error, TransientError):
            return error
        transient = TransientError(f"{type(error).__qualname__}: {error}")
        for note in vars(error).get("__notes__", ()):
            transient.add_note(note)
        return transient

    async def wait(self, number: int, what: str, error: BaseException) -> bool:
        """Pause before try ``number`` (the second is 1), for a random part of the time; false if
        there is none."""
        if number > self.tries:
            return False
        kind = headline(error).partition(":")[0]
        if kind not in _warned:
            _warned.add(kind)
            message = (
                "%s has failed for now and is asked again, up to %d times (environment.max_retries); others with such "
                "an error are counted in env/retries: %s"
            )
            log.warning(message, what, self.tries, headline(error))
        await asyncio.sleep(self.pause_s * 2 ** (number - 1) * random.uniform(0.5, 1.0))
        return True


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
    """The error itself if it can be sent to another process, which has ``loads``; else one that
    says the same."""
    try:
        if isinstance(loads(pickle.dumps(error)), Exception):
            return error  # type: ignore[return-value]
    except Exception:
        pass
    kind = next(
        (kind for kind in (TransientError, UserError) if isinstance(error, kind)), RuntimeError
    )
    stand_in = kind(f"{type(error).__qualname__}: {error}")
    for note in vars(error).get("__notes__", ()):
        stand_in.add_note(note)
    return stand_in


# ---------------------------------------------------------------- ways to a process


@dataclass(eq=False)
class LocalTransport:
    """A service on its caller's event loop, for runs in one process: no threads, and no clock but
    the event loop's.

    Quick calls are carried out at once, those that await as tasks.
    """

    service: Service
    limit_s: float = 0.0  # of a call that awaits; 0 is none
    _tasks: set[asyncio.Task[Answer]] = field(default_factory=set)

    async def load(self, *args: object) -> Exception | None:
        """Have the service load something; the error that this raised there. Raises if the process
        is gone."""
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
                self._tasks.add(
                    asyncio.create_task(within(self.limit_s or None, self.service, call))
                )
            else:
                answers.append(await self.service.run(call))
        if not answers and self._tasks:
            await asyncio.wait(
                self._tasks, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED
            )
        ended = {task for task in self._tasks if task.done()}
        self._tasks -= ended
        return answers + [task.result() for task in ended], 0

    def end(self) -> None:
        """Ask the process to end; later calls are not answered."""
        self.kill()

    def kill(self) -> None:
        for task in self._tasks:
            task.cancel()


class RayTransport:
    """A Ray actor, which ends with the process that made it.

    Args:
        make: as ``limit_s`` and ``max_threads``, of ``RpcServer``.
        options: Ray's, for the actor.
    """

    def __init__(
        self,
        make: Callable[[], Service],
        limit_s: float,
        max_threads: int = 512,
        options: dict[str, Any] | None = None,
    ) -> None:
        import ray

        from skyasync.utils.rpc_server import RpcActor

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
        """End the process, even if it does not answer."""
        import ray

        ray.kill(self._actor)
        if self._process is not None:
            self._process.end()


RpcTransport = LocalTransport | RayTransport


# ---------------------------------------------------------------- at the caller


class RpcClient:
    """The caller's side of one process.

    Args:
        what: runs there, for messages ("the environment").
        silence_s: a process that leaves an exchange without reply for so long is lost.
        notify: called after every exchange, and when the process is lost.
    """

    def __init__(
        self,
        transport: RpcTransport,
        what: str,
        silence_s: float,
        notify: Callable[[RpcClient], None],
    ) -> None:
        self.worker = transport
        self.hung = 0
        self.lost: Exception | None = None
        self.keys: set[str] = set()
        self._what = what
        self._silence_s = silence_s
        self._notify = notify
        self._numbers = count()
        self._outbox: list[Call] = []
        self._collectors = 0
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
        if not self._outbox and not self._collectors:
            loop.call_soon(self._send)
        self._outbox.append(call)
        return future

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Calls that are posted inside leave at its end, in one message."""
        self._collectors += 1
        try:
            yield
        finally:
            self._collectors -= 1
            if self._outbox and not self._collectors:
                self._send()

    def kill(self, error: Exception | None = None) -> None:
        """End the process, if it is not lost yet; what is unanswered fails because of the error."""
        if self.lost is not None:
            return
        self.lost = error or RuntimeError("it was ended")
        self.worker.kill()
        unanswered = self.unanswered
        self.unanswered = {}
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
        calls = self._outbox
        self._outbox = []
        if self.lost is None:
            self._start(self._exchange(calls))

    async def _exchange(self, calls: list[Call]) -> None:
        self._exchanges += 1
        try:
            async with asyncio.timeout(self._silence_s) as timer:
                answers, self.hung = await self.worker.exchange(calls)
        except Exception as error:
            silent = isinstance(error, TimeoutError) and timer.expired()
            return self.kill(
                TimeoutError(f"it sent no heartbeat for {self._silence_s:g} s") if silent else error
            )
        finally:
            self._exchanges -= 1
        if self.lost is not None:
            return
        for place, answer in enumerate(answers, 1):
            _, future = self.unanswered.pop(answer.number, (None, None))
            if future is None:  # the process was ended during a pause of this loop
                continue
            with suppress(asyncio.InvalidStateError):  # its caller may have been cancelled
                if answer.error is None:
                    future.set_result(answer.result)
                else:
                    future.set_exception(answer.error)
            if place % TURN_ANSWERS == 0:  # let the callers, and others, have their turn
                await asyncio.sleep(0)
        if self.unanswered and not self._exchanges and not self._outbox:
            self._start(self._exchange([]))
        self._notify(self)

    def _loss(self, call: Call) -> ProcessLostError:
        error = ProcessLostError(
            f"the process that runs {self._what} of {call.name} is lost: {self.lost}"
        )
        error.__cause__ = self.lost
        return error

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(
            lambda ended: ended.cancelled() or ended.exception()
        )  # its caller may be cancelled
        return task


class RpcPool:
    """A number of processes. One that is lost is replaced at once.

    One in which too many calls hang gets no new work: another takes its place, and it is ended
    after its last work.

    Args:
        start: starts a process; called again for each one that must be replaced.
        what: runs there, for messages.
    """

    def __init__(
        self, start: Callable[[], RpcTransport], count: int, what: str, silence_s: float
    ) -> None:
        self._start = lambda: RpcClient(start(), what, silence_s, self.look_at)
        self._count = count
        self.processes: list[RpcClient] = []
        self.replaced = 0

    def fill(self) -> None:
        """Start all processes before they are needed."""
        self.processes += [self._start() for _ in range(self._count - len(self.processes))]

    def take(self, key: str) -> RpcClient:
        """The process with the least work, which has this as well until it is given back."""
        self.fill()
        process = min(self.processes, key=lambda process: len(process.keys))
        process.keys.add(key)
        return process

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """``RpcClient.collecting`` of each process."""
        with ExitStack() as stack:
            for process in self.processes:
                stack.enter_context(process.collecting())
            yield

    def give_back(self, process: RpcClient, key: str) -> None:
        process.keys.discard(key)
        self.look_at(process)

    def look_at(self, process: RpcClient) -> None:
        """Replace a process that is lost or stuck; end one that was replaced and has no work
        left."""
        if process in self.processes:
            if process.lost is not None or process.hung >= MOST_HUNG:
                self.processes[self.processes.index(process)] = self._start()
                self.replaced += 1
        elif process.lost is None and not process.keys and not process.unanswered:
            process.kill()

    def close(self) -> None:
        """Kill all processes."""
        # ``look_at`` is to replace none
        processes = self.processes
        self.processes = []
        for process in processes:
            process.kill()

    def end(self) -> None:
        """Ask all processes to end, with their work in flight."""
        processes = self.processes
        self.processes = []
        for process in processes:
            process.worker.end()
