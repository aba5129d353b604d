"""One client in front of several engines: it routes, batches calls, and owns every wait.

Invariant: each request is answered exactly once or raises; one that no engine answers in time raises ``TimeoutError``
with its id. Requests made in one turn of the event loop travel to their engine in one message.

A request that ``cut`` has ended early, or whose engine has failed, continues here: prompt and tokens so far are sent as
a new request, which the engines start with the weights they have then. Its caller gets one answer, with the pieces
joined (``inflight``). It starts over if its sampling looks at the response so far (``COUNTS_RESPONSE``), because an
engine takes the tokens that it is sent for the prompt's.

An engine fails when a call of it raises ``EngineFailedError``, or when its heartbeat is late (``EnginePool.fail``).
If failures are handled (``EnginePool.on_failure``), it is not called any more, and its requests continue at the others
from the tokens known of them (``poll``); without others they wait for its replacement. Otherwise, and for every other
error, the requests that the engine had raise the error.

While every engine is full (``router``) requests wait here, in order. The queue moves when a request ends, an engine is
admitted or wakes, or one reports room (``poll``). The requests of an engine that falls asleep continue at the others;
while all sleep, they wait here, and no time counts.

| who waits                | for what                       | woken by                                               |
|--------------------------|--------------------------------|--------------------------------------------------------|
| ``generate``             | its request's future           | ``_send`` (answer, error), a failure, or the timeout   |
| a queued request         | the future, as above           | ``_advance``, ``give_up``, or its timeout              |
| ``_send`` (a task each)  | the engine's stream of answers | the engine; its failure fails the futures              |
| a call of all engines    | every healthy engine's answer  | the engines; a failure                                 |
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from math import inf, isfinite
from typing import Any, NamedTuple

from skyasync.arrays import TURN_TOKENS
from skyasync.config.schema.sampling import COUNTS_RESPONSE
from skyasync.inference.inflight import InflightRequest, InflightTable, continuation, join
from skyasync.inference.interface import (
    EngineFailedError,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
    InferenceEngine,
    PauseMode,
    RequestFailedError,
)
from skyasync.inference.pool import EnginePool, LostWork
from skyasync.inference.stop_strings import cut_at_stop_string
from skyasync.weight_sync.update import WakePart, WeightUpdate

SHUT_DOWN = "the inference client was shut down"
ARRIVAL_S = 0.5  # until requests that were on their way to an engine, and missed an abort, are aborted again


class Outgoing(NamedTuple):
    """What an engine is sent in one turn of the event loop."""

    requests: list[InflightRequest]
    abandoned: list[str]  # requests whose callers no longer wait: the engine need not compute them


class InferenceClient:
    """Router to the engine that would finish first (``router``); a session stays where it began.

    Args:
        engines: at least one; they hold the same weights.
        request_timeout_s: how long a request may go unanswered, pauses of the engines included.
        tokenizer: gives the model's; needed where requests with stop strings are cut.
        start_at_once: engines that load at the same time, in order; 0 is all. Engines that share a device measure its
            free memory when they load, and must do so one after the other.
        adaptive: limit what an engine has at once by its queue (``ConcurrencyLimit``), as far as ``poll`` asks for it.

    Attributes:
        pool: the engines, and which of them are healthy.
        updating: engines load weights.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        request_timeout_s: float = 600.0,
        tokenizer: Callable[[], Any] | None = None,
        start_at_once: int = 0,
        *,
        adaptive: bool = False,
    ) -> None:
        if not engines:
            raise ValueError("an inference client needs at least one engine")
        self.request_timeout_s = request_timeout_s
        self.pool = EnginePool(engines, self._recover)
        self.engines = self.pool.engines
        self.pool.router.adaptive = adaptive
        self._start_at_once = start_at_once or len(engines)
        self._tokenizer = tokenizer
        self._outbox: dict[int, Outgoing] = {}  # engine -> of this turn
        self._queue: dict[InflightRequest, None] = {}  # those that have no engine yet, in order
        self._polling = [asyncio.Lock() for _ in engines]
        self._inflight = InflightTable()
        self._cut: set[str] = set()  # the engines' ids of what has been ended early, and continues
        self.updating = self._paused = False
        self._cutting = False  # from a cut to the end of its pause

    @property
    def proves_weights(self) -> bool:
        """Whether every engine compares what it holds with digests of what was sent."""
        return all(engine.proves_weights for engine in self.engines)

    async def start(self) -> None:
        for first in range(0, len(self.engines), self._start_at_once):
            wave = self.engines[first : first + self._start_at_once]
            await asyncio.gather(*(engine.start() for engine in wave))
        try:
            async with asyncio.timeout(self.request_timeout_s):
                for index, stats in enumerate(await self.stats()):
                    self.pool.router.capacity[index] = stats.cache_tokens or inf
        except TimeoutError as error:
            raise TimeoutError(
                f"all engines have started, but one did not answer a request for its state within "
                f"{self.request_timeout_s:g} s (generator.request_timeout_s); their logs are in the run's folder"
            ) from error

    # ---------------------------------------------------------------- requests

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Answer one request, and have what is ended early continued.

        Raises:
            TimeoutError: naming the request, after ``request_timeout_s``.
            ValueError: if a request with this id is in flight already.
            RequestFailedError: if this request cannot be answered; the engines continue.
            Exception: whatever the engine raised, with its traceback.
        """
        return await self._finish(request, await self._ask(request, request.request_id))

    async def go_on(self, request: GenerationRequest, partial: GenerationOutput) -> GenerationOutput:
        """Answer a request of which there is a part; it may be whole (it has a ``finish_reason``). As ``generate``."""
        partial = replace(partial, request_id=request.request_id)
        if partial.finish_reason or len(partial.token_ids) >= request.sampling.max_tokens:
            return replace(partial, finish_reason=partial.finish_reason or "length")
        self._cut.add(request.request_id)
        return await self._finish(request, replace(partial, finish_reason="abort"))

    async def _finish(self, request: GenerationRequest, answer: GenerationOutput) -> GenerationOutput:
        """The whole answer: as long as it is cut, the rest is requested."""
        starts_over = any(getattr(request.sampling, name) for name in COUNTS_RESPONSE)
        try:
            while answer.finish_reason == "abort" and answer.request_id in self._cut:
                self._cut.discard(answer.request_id)
                answer = GenerationOutput(request.request_id) if starts_over else answer
                self._inflight.before[request.request_id] = answer
                joined = join(answer, await self._ask(continuation(request, answer), request.request_id))
                answer = cut_at_stop_string(request, joined, len(answer.token_ids), self._tokenizer)
        finally:
            self._inflight.before.pop(request.request_id, None)
        self._cut.discard(answer.request_id)
        return replace(answer, request_id=request.request_id)

    async def _ask(self, request: GenerationRequest, caller_id: str) -> GenerationOutput:
        """An engine's answer to a request or to its continuation."""
        name = request.request_id
        if name in self._inflight:
            raise ValueError(f"request {name} is in flight already: its id must be its own")
        if self.pool.end is not None:
            raise self.pool.end
        loop = asyncio.get_running_loop()
        inflight = InflightRequest(request, caller_id, loop.create_future())
        self._queue[inflight] = None
        self._advance()
        self._inflight[name] = inflight
        if self._cutting:  # it may arrive before the engine ends all requests, or after
            self._cut.add(name)
        try:
            async with asyncio.timeout(None) as inflight.timer:
                self._start_timer(inflight)
                return await inflight.future
        except TimeoutError as error:
            if not (inflight.timer and inflight.timer.expired()):
                raise
            raise TimeoutError(
                f"request {name} was not answered within {self.request_timeout_s:g} s (generator.request_timeout_s)"
            ) from error
        finally:
            del self._inflight[name]
            self._queue.pop(inflight, None)
            if inflight.charge is not None:
                answer = None
                if not inflight.future.done() or inflight.future.cancelled():  # the caller no longer waits
                    self._outgoing(inflight.charge.engine).abandoned.append(name)
                    self._inflight.leaving[inflight.charge.engine].add(name)
                elif not inflight.future.exception():
                    answer = inflight.future.result()
                self.pool.router.ended(inflight.charge, answer, loop.time())
            self._advance()

    def _start_timer(self, inflight: InflightRequest) -> None:
        if inflight.timer is not None:
            limit = asyncio.get_running_loop().time() + self.request_timeout_s
            inflight.timer.reschedule(limit if self.pool.router.open.any() else None)

    def _advance(self) -> None:
        """Give the first requests of the queue to engines; stop at one that no engine can take."""
        while self._queue:
            inflight = next(iter(self._queue))
            if not inflight.future.done():
                charge = self.pool.router.choose(inflight.request, asyncio.get_running_loop().time(), len(self._queue))
                if charge is None:
                    return
                self._inflight.send(inflight, charge)
                self._outgoing(charge.engine).requests.append(inflight)
            del self._queue[inflight]

    def _outgoing(self, index: int) -> Outgoing:
        """What the engine is sent in the next turn of the event loop, with everything of this turn."""
        if index not in self._outbox:
            self._outbox[index] = Outgoing([], [])
            task = asyncio.get_running_loop().create_task(self._send(index))
            calls = self.pool.calls[index]
            calls.add(task)
            task.add_done_callback(calls.discard)
        return self._outbox[index]

    async def _send(self, index: int) -> None:
        requests, abandoned = self._outbox.pop(index)
        engine = self.engines[index]
        waiting = {inflight.request.request_id: inflight for inflight in requests if not inflight.future.done()}
        try:
            if abandoned:
                with contextlib.suppress(Exception):  # the error of a failed engine goes to those who still wait
                    await engine.abort(abandoned)
                self._inflight.leaving[index].difference_update(abandoned)
            if not waiting:
                return
            async for outputs in engine.generate([inflight.request for inflight in waiting.values()]):
                tokens = 0
                for output in outputs:
                    future = waiting.pop(output.request_id).future
                    if not future.done():  # its caller may have been cancelled
                        if output.finish_reason == "error":
                            future.set_exception(RequestFailedError(output.error))
                        else:
                            future.set_result(output)
                    tokens += len(output.token_ids)
                    if tokens >= TURN_TOKENS:  # let the callers, and others, have their turn
                        tokens = 0
                        await asyncio.sleep(0)
            if waiting:
                raise RuntimeError(f"engine {index} ended without answering {', '.join(sorted(waiting)[:5])}")
        except BaseException as error:
            if isinstance(error, EngineFailedError) and self.pool.fail(index, error, asyncio.current_task()):
                return
            ended = isinstance(error, asyncio.CancelledError)
            for inflight in waiting.values():
                if not inflight.future.done():
                    inflight.future.set_exception(RuntimeError(SHUT_DOWN) if ended else error)
            if not isinstance(error, Exception):
                raise

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests (all of them: None) for good, also if they had been cut."""
        if request_ids is not None:
            callers = set(request_ids)
            request_ids = [name for name, inflight in self._inflight.items() if inflight.caller_id in callers]
        ended = list(self._inflight if request_ids is None else request_ids)
        self._cut.difference_update(ended)
        for inflight in [self._inflight[name] for name in ended]:
            if inflight.charge is None and not inflight.future.done():
                inflight.future.set_result(inflight.so_far)
        await self.pool.all(lambda engine: engine.abort(request_ids))

    async def progress(self, request_ids: Collection[str] | None = None) -> dict[str, GenerationOutput]:
        """What the healthy engines have of these unanswered requests (of all: None), by their ids."""
        await asyncio.gather(*(self.poll(index) for index in self.pool.healthy))
        return self._inflight.so_far(request_ids)

    async def poll(self, index: int, *, tokens: bool = True) -> None:
        """Ask an engine for a heartbeat. With ``tokens`` for its progress, which its requests would continue from."""
        answer: tuple[Any] | None
        if tokens:
            async with self._polling[index]:
                requests, leaving = self._inflight.at(index), set(self._inflight.leaving[index])
                try:
                    answer = await self.pool.ask(index, self.engines[index].progress())
                except BaseException:
                    for inflight in (*requests.values(), *self._inflight.at(index).values()):
                        inflight.received = None  # progress may have been lost on its way
                    raise
                self._inflight.receive(requests, answer[0] if answer else (), leaving)
        else:
            answer = await self.pool.ask(index, self.engines[index].heartbeat())
        router = self.pool.router
        if answer and (router.adaptive or isfinite(router.capacity[index])):
            stats = await self.pool.ask(index, self.engines[index].stats())
            if stats:
                router.reported(index, stats[0])
                self._advance()

    # ---------------------------------------------------------------- all engines

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Per healthy engine, the log-probability of each token after the first."""
        return list((await self.pool.all(lambda engine: engine.score(sequences))).values())

    async def pause(self, mode: PauseMode = "keep") -> None:
        self._paused = True
        await self.pool.all(lambda engine: engine.pause(mode))

    async def cut(self) -> None:
        """Pause, and end what is in flight; ``generate`` continues it after ``resume``. No token is lost."""
        self._cut.update(self._inflight)
        self._cutting = True
        await self.pause("abort")

    async def resume(self) -> None:
        self._paused = self._cutting = False
        await self.pool.all(lambda engine: engine.resume())

    async def update_weights(self, update: WeightUpdate, engines: Collection[int] | None = None) -> list[str]:
        """As ``InferenceEngine.update_weights``, of these engines (None: all) that are awake."""
        self.pool.router.prompts.clear()  # what engines have in their caches was computed by the old weights
        self.updating = True
        try:
            if "members" in update.info:  # sender and receivers meet in a group
                await self.pool.all_or_none(
                    update.info["members"], lambda engine: engine.update_weights(update), "update_weights"
                )
                return []
            chosen = [index for index in self.pool.awake if engines is None or index in engines]
            answers = await self.pool.all(lambda engine: engine.update_weights(update), chosen)
        finally:
            self.updating = False
        return sorted({name for unproven in answers.values() for name in unproven or ()})

    async def sleep(self, engines: Collection[int] | None = None) -> None:
        """These engines (None: all) free their memory. Their requests continue at the others, or wait here."""
        chosen = [index for index in self.pool.awake if engines is None or index in engines]
        self.pool.router.open[chosen] = False
        for inflight in self._queue:
            self._start_timer(inflight)
        await asyncio.gather(*(self._withdraw(index) for index in chosen))
        self.pool.asleep.update(chosen)
        await self.pool.all(lambda engine: engine.sleep(), [i for i in chosen if self.pool.router.healthy[i]])

    async def wake(self, part: WakePart, engines: Collection[int] | None = None) -> None:
        """These engines (None: all) take requests again when their caches are awake."""
        chosen = [index for index in self.pool.healthy if engines is None or index in engines]
        await self.pool.all(lambda engine: engine.wake(part), chosen)
        if part == "weights":
            self.pool.asleep.difference_update(chosen)
            return
        self.pool.router.open[chosen] = True
        for inflight in self._queue:
            self._start_timer(inflight)
        self._advance()
        await self._share(chosen)

    async def _withdraw(self, index: int) -> None:
        """An engine ends its requests; they continue where the router sends them."""
        while leaving := {n: each for n, each in self._inflight.at(index).items() if not each.future.done()}:
            self._cut.update(leaving)
            if await self.pool.ask(index, self.engines[index].abort(list(leaving))) is None:
                return  # it has failed
            await asyncio.wait({each.future for each in leaving.values()}, timeout=ARRIVAL_S)
        if calls := set(self.pool.calls[index]):  # of what callers have abandoned
            await asyncio.wait(calls)

    async def _share(self, woken: Collection[int]) -> None:
        """Engines that woke get requests that others have not begun, the newest first, up to equal numbers."""
        router = self.pool.router
        mean = -(-int(router.in_flight.sum()) // max(int((router.healthy & router.open).sum()), 1))
        calls = []
        for index in [index for index in self.pool.awake if index not in woken]:
            waiting = [each.request for each in self._inflight.at(index).values() if each.received == []]
            moved = waiting[::-1][: max(int(router.in_flight[index]) - mean, 0)]
            for request in moved:
                router.sessions.pop(request.session_id or "", None)  # which would stay where it is
            if names := [request.request_id for request in moved]:
                self._cut.update(names)
                calls.append(self.pool.ask(index, self.engines[index].abort(names)))
        await asyncio.gather(*calls)

    async def waiting(self) -> int:
        """Requests that no engine computes yet."""
        return len(self._queue) + sum(stats.waiting for stats in await self.stats())

    async def stats(self) -> list[EngineStats]:
        """Per engine, by its place; nothing but zeros for one that has failed."""
        stats = await self.pool.all(lambda engine: engine.stats(), self.pool.healthy)
        return [stats.get(i, EngineStats(gone=bool(left))) for i, left in enumerate(self.pool.router.left)]

    async def shutdown(self) -> None:
        await asyncio.sleep(0)  # a ``_send`` that is cancelled before it starts would not answer its callers
        calls = set[asyncio.Future[Any]]().union(*self.pool.calls)
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, *(engine.shutdown() for engine in self.engines), return_exceptions=True)
        self._fail_all(RuntimeError(SHUT_DOWN))  # what had no engine

    # ---------------------------------------------------------------- failures, and engines that come and go

    def _recover(self, index: int) -> LostWork:
        """An engine has failed or left: its requests continue at the others."""
        self._outbox.pop(index, None)
        lost = [inflight for inflight in self._inflight.at(index).values() if not inflight.future.done()]
        answers = [inflight.so_far for inflight in lost]
        for inflight, answer in zip(lost, answers, strict=True):
            self._cut.add(answer.request_id)
            inflight.future.set_result(answer)
        return LostWork(len(lost), sum(len(answer.token_ids) for answer in answers))

    async def admit(self, index: int, engine: InferenceEngine) -> None:
        """This engine, which holds the weights of the others, takes the place of the failed one."""
        self.pool.asleep.discard(index)
        paused = False
        while paused != self._paused:
            paused = self._paused
            await (engine.pause("keep") if paused else engine.resume())
        self.engines[index] = engine
        self.pool.router.renew(index)
        self._advance()

    async def join(self, engine: InferenceEngine) -> int:
        """As ``admit``, in a place of its own, whose number is returned."""
        capacity = (await engine.stats()).cache_tokens or inf
        index = self.pool.router.add()
        self.pool.router.capacity[index] = capacity
        self.engines.append(engine)
        self.pool.calls.append(set())
        self._polling.append(asyncio.Lock())
        await self.admit(index, engine)
        return index

    async def remove(self, index: int, patience_s: float) -> int:
        """This engine gets no request any more, and its own continue at the others. Returns the number of these."""
        self.pool.router.healthy[index], self.pool.router.left[index] = False, True
        leaving = self._inflight.at(index)
        with contextlib.suppress(Exception):  # if it fails or hangs, they continue from what is known of them
            async with asyncio.timeout(patience_s):
                await self._withdraw(index)
        self._recover(index)
        return len(leaving)

    def give_up(self, error: BaseException) -> None:
        """No engine will answer any more: every request and call raises this."""
        self.pool.end = error
        self._fail_all(error)

    def _fail_all(self, error: BaseException) -> None:
        for inflight in self._inflight.values():
            if not inflight.future.done():
                inflight.future.set_exception(error)
