"""Remote procedure calls to processes that run many at once: environments and agent programs.

Invariant: every call is answered exactly once within about ``limit_s`` of its start, with its
result or with an error that names its cause. A process that is lost or stuck is replaced; its calls
fail with ``ProcessLostError``.

Calls that are posted in one turn of the event loop travel in one message, and answers return in
small batches as calls finish. The process's side is ``rpc_server``.

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

START_S = 120.0  # for a new process, and its imports before the first call
GRACE_S = 1.0  # for a coroutine to end after it has been cancelled
CLOSE_S = 30.0  # for a call that ends another one, if calls have no limit
# An exchange without answers ends after this time, which shows that the process is alive.
HEARTBEAT_S = 5.0
# Answers that are delivered in one turn of the event loop: other tasks must not wait long.
TURN_ANSWERS = 64
# Calls that may hang in a process before it is replaced: a few cost only their threads.
MAX_HUNG = 4

_logged_errors: set[str] = set()  # types of transient errors


class ProcessLostError(RuntimeError):
    """The call's process is gone; the call to blame is unknown."""


class WorkerStartError(ProcessLostError, UserError):
    """The process ended while it was loading: the loaded code or another cause is to blame."""


class Call(NamedTuple):
    """A call of a ``method`` of the episode ``key``; ``number`` is the caller's."""

    number: int
    method: str
    key: str
    args: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The episode's name, for messages."""
        return self.key.rpartition("#")[0] or self.key


class Answer(NamedTuple):
    """The answer to the call with this number: a result, or an error."""

    number: int
    result: Any
    error: Exception | None = None


_key_numbers = count()


def key_of(name: str) -> str:
    """A new key for an episode.

    An episode may start again while calls of an earlier one, of the same name, are in flight.
    """
    return f"{name}#{next(_key_numbers)}"


class Service(Protocol):
    """Runs the calls in a process.

    Calls of one key never overlap, except for "close", which ends the episode.
    """

    @property
    def load(self) -> Callable[..., None]:
        """Prepare for a type of call; called once for each type, in a thread, without a limit."""

    def is_async(self, call: Call) -> bool:
        """Whether the call awaits: it then runs on an event loop, else in a thread."""

    def run(self, call: Call) -> Coroutine[Any, Any, Answer]:
        """Run one call; raises nothing but ``CancelledError``."""

    def overdue(self, call: Call) -> Exception:
        """The caller's error for a call that has run too long."""

    def give_up(self, key: str) -> None:
        """Forget an episode whose call hangs; the caller has its answer."""


@dataclass(frozen=True)
class RetryPolicy:
    """Tries again after a transient error, up to ``tries`` times with growing pauses.

    Each try has the time limit of the first. Pauses are spent on the caller's event loop.

    Args:
        tries: after the first; 0 is none.
        pause_s: before the second try, twice that before the third, and so on.
        names: of other transient errors than ``TransientError``, with their module or without.
    """

    tries: int = 0
    pause_s: float = 1.0
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, cfg: EnvironmentConfig) -> RetryPolicy:
        """The policy of a run."""
        return cls(cfg.max_retries, names=tuple(cfg.transient_errors))

    def is_transient(self, error: BaseException) -> bool:
        """Whether an error, or a base class of it, is transient."""
        if isinstance(error, TransientError):
            return True
        for base in type(error).__mro__:
            if (
                base.__name__ in self.names
                or f"{base.__module__}.{base.__qualname__}" in self.names
            ):
                return True
        return False

    def as_transient(self, error: Exception) -> Exception:
        """The error, as a ``TransientError`` if it is transient by its name.

        Its class may not survive the way back to the caller.
        """
        if not self.is_transient(error) or isinstance(error, TransientError):
            return error
        return _copied_as(error, TransientError)

    async def wait(self, number: int, call_name: str, error: BaseException) -> bool:
        """Pause before try ``number`` (the second is 1); false if there is no such try."""
        if number > self.tries:
            return False
        error_type = headline(error).partition(":")[0]
        if error_type not in _logged_errors:
            _logged_errors.add(error_type)
            log.warning(
                "%s has failed for now and is asked again, up to %d times (environment.max_retries); others with such "
                "an error are counted in env/retries: %s",
                call_name,
                self.tries,
                headline(error),
            )
        # A random part of the time: callers that failed together do not come back together.
        await asyncio.sleep(self.pause_s * 2 ** (number - 1) * random.uniform(0.5, 1.0))
        return True


async def within(limit_s: float | None, service: Service, call: Call) -> Answer:
    """The answer to a call that awaits; a call that takes longer is cancelled and closed."""
    try:
        async with asyncio.timeout(limit_s):
            return await service.run(call)
    except TimeoutError:
        # The episode's resources are freed; its caller gets the error of the call.
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await service.run(call._replace(method="close", args=()))
        return Answer(call.number, None, service.overdue(call))
    except asyncio.CancelledError:
        return Answer(call.number, None, RuntimeError(f"{call.name} cancelled itself"))


def portable(error: BaseException, loads: Callable[[bytes], object] = pickle.loads) -> Exception:
    """An error that can be sent to another process: the same one, or one with its message.

    Args:
        loads: unpickles in the other process.
    """
    # Any error may come from a user's class: it cannot be pickled then.
    try:
        if isinstance(loads(pickle.dumps(error)), Exception):
            return error  # type: ignore[return-value]
    except Exception:
        pass
    for error_class in (TransientError, UserError):
        if isinstance(error, error_class):
            return _copied_as(error, error_class)
    return _copied_as(error, RuntimeError)


def _copied_as(error: BaseException, error_class: type[Exception]) -> Exception:
    """An error of this class with the type, message and notes of another."""
    copy = error_class(f"{type(error).__qualname__}: {error}")
    for note in vars(error).get("__notes__", ()):
        copy.add_note(note)
    return copy


# ---------------------------------------------------------------- transports to a process


@dataclass(eq=False)
class LocalTransport:
    """A service on its caller's event loop, for runs in one process.

    It uses no threads, and no clock but the event loop's. Quick calls run at once, calls that await
    as tasks.
    """

    service: Service
    limit_s: float = 0.0  # of a call that awaits; 0 is none
    _tasks: set[asyncio.Task[Answer]] = field(default_factory=set)

    async def load(self, *args: object) -> Exception | None:
        """Have the service load something.

        Returns:
            The error of loading. An error of the transport, such as a lost process, is raised.
        """
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
                running = within(self.limit_s or None, self.service, call)
                self._tasks.add(asyncio.create_task(running))
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
        """End all calls."""
        for task in self._tasks:
            task.cancel()


class RayTransport:
    """A Ray actor, which ends with the process that made it.

    Args:
        make, limit_s, max_threads: of ``RpcServer``.
        options: of Ray, for the actor.
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
        # Ray serializes tuples faster than named tuples.
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
        program: the process's work, for messages ("the environment").
        silence_s: a process that leaves an exchange without reply for so long is lost.
        notify: called after every exchange, and when the process is lost.
    """

    def __init__(
        self,
        transport: RpcTransport,
        program: str,
        silence_s: float,
        notify: Callable[[RpcClient], None],
    ) -> None:
        self.worker = transport
        self.hung = 0
        self.lost: Exception | None = None
        self.keys: set[str] = set()
        self._program = program
        self._silence_s = silence_s
        self._notify = notify
        self._call_numbers = count()
        self._outbox: list[Call] = []
        self._collectors = 0  # open blocks of ``collecting``
        self.unanswered: dict[int, tuple[Call, asyncio.Future[Any]]] = {}  # by number
        self._exchanges = 0  # in progress
        self._loads: dict[str, asyncio.Future[None]] = {}  # by name
        # The event loop has weak references to tasks only.
        self._tasks: set[asyncio.Task[Any]] = set()

    async def load(self, name: str, *args: object) -> None:
        """Have the process load something, once.

        Raises:
            UserError: if it is not ready within ``START_S``; a ``WorkerStartError`` if it ends.
            Exception: the error of loading.
        """
        if name not in self._loads:
            self._loads[name] = self._start_task(self._load(args))
        # Another caller may wait for the same load: a cancellation ends this wait alone.
        await asyncio.shield(self._loads[name])

    def post(self, method: str, key: str, *args: object) -> asyncio.Future[Any]:
        """Post a call.

        Returns:
            The future of the answer, or of a ``ProcessLostError``.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        call = Call(next(self._call_numbers), method, key, args)
        if self.lost is not None:
            future.set_exception(self._loss(call))
            return future
        self.unanswered[call.number] = (call, future)
        # Later, so that all calls of this turn of the event loop are in one message.
        if not self._outbox and not self._collectors:
            loop.call_soon(self._send)
        self._outbox.append(call)
        return future

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Send the calls that are posted in the block at its end, in one message."""
        self._collectors += 1
        try:
            yield
        finally:
            self._collectors -= 1
            if self._outbox and not self._collectors:
                self._send()

    def kill(self, error: Exception | None = None) -> None:
        """End the process, if it is not lost yet; unanswered calls fail because of the error."""
        if self.lost is not None:
            return
        self.lost = error or RuntimeError("it was ended")
        self.worker.kill()
        unanswered = self.unanswered
        self.unanswered = {}
        for call, future in unanswered.values():
            if not future.done():  # its caller may have been cancelled
                future.set_exception(self._loss(call))
        self._notify(self)

    async def _load(self, args: tuple[object, ...]) -> None:
        try:
            async with asyncio.timeout(START_S) as timer:
                problem = await self.worker.load(*args)
        except Exception as error:
            self.kill(error)
            process = f"the process that runs {self._program}"
            if isinstance(error, TimeoutError) and timer.expired():
                raise UserError(f"{process} was not ready within {START_S:g} s") from error
            raise WorkerStartError(f"{process} ended while it was loading: {error}") from error
        if problem is not None:
            raise problem

    def _send(self) -> None:
        calls = self._outbox
        self._outbox = []
        if self.lost is None:
            self._start_task(self._exchange(calls))

    async def _exchange(self, calls: list[Call]) -> None:
        """Send calls, and deliver the answers that come back, to these calls or to earlier ones."""
        self._exchanges += 1
        try:
            async with asyncio.timeout(self._silence_s) as timer:
                answers, self.hung = await self.worker.exchange(calls)
        except Exception as error:
            if isinstance(error, TimeoutError) and timer.expired():
                self.kill(TimeoutError(f"it sent no heartbeat for {self._silence_s:g} s"))
            else:
                self.kill(error)
            return
        finally:
            self._exchanges -= 1
        if self.lost is not None:
            return
        for number, answer in enumerate(answers, 1):
            _, future = self.unanswered.pop(answer.number, (None, None))
            if future is None:  # the process was ended during a pause of this loop
                continue
            with suppress(asyncio.InvalidStateError):  # its caller may have been cancelled
                if answer.error is None:
                    future.set_result(answer.result)
                else:
                    future.set_exception(answer.error)
            if number % TURN_ANSWERS == 0:  # let the callers, and others, have their turn
                await asyncio.sleep(0)
        # One exchange is open as long as answers are expected.
        if self.unanswered and not self._exchanges and not self._outbox:
            self._start_task(self._exchange([]))
        self._notify(self)

    def _loss(self, call: Call) -> ProcessLostError:
        error = ProcessLostError(
            f"the process that runs {self._program} of {call.name} is lost: {self.lost}"
        )
        error.__cause__ = self.lost
        return error

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Marks the error as seen: the caller that would see it may be cancelled.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return task


class RpcPool:
    """A number of processes. A lost process is replaced at once.

    A process in which too many calls hang gets no new work: another one takes its place, and it is
    ended after its last work.

    Args:
        start: starts a process; called again for each one that must be replaced.
        program: the processes' work, for messages.
    """

    def __init__(
        self, start: Callable[[], RpcTransport], count: int, program: str, silence_s: float
    ) -> None:
        self._start = lambda: RpcClient(start(), program, silence_s, self.look_at)
        self._count = count
        self.processes: list[RpcClient] = []
        self.replaced = 0

    def fill(self) -> None:
        """Start all processes before they are needed."""
        while len(self.processes) < self._count:
            self.processes.append(self._start())

    def take(self, key: str) -> RpcClient:
        """The process with the least work; it has the key until ``give_back``."""
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
        """End the work of a key in its process."""
        process.keys.discard(key)
        self.look_at(process)

    def look_at(self, process: RpcClient) -> None:
        """Replace a process that is lost or stuck; end a replaced one that has no work left."""
        if process in self.processes:
            if process.lost is not None or process.hung >= MAX_HUNG:
                self.processes[self.processes.index(process)] = self._start()
                self.replaced += 1
        elif process.lost is None and not process.keys and not process.unanswered:
            process.kill()

    def close(self) -> None:
        """Kill all processes."""
        # The list is emptied first: ``look_at`` would replace a killed process.
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
