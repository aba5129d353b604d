"""One client in front of several engines: it routes, batches calls, and owns every wait.

Invariant: each request is answered exactly once or raises; one whose engine makes no progress for
too long raises ``TimeoutError`` with its id (``progress_limit``). Requests made in one turn of the
event loop, or while the client is ``collecting``, travel to their engine in one message. The
samples of a prompt are one group: one caller and one wait, but each is routed, cut and continued by
itself.

A request that ``cut`` has ended early, or whose engine has failed, continues here: prompt and
tokens so far are sent as a new request, which the engines start with the weights they have then.
Its caller gets one answer, with the pieces joined (``inflight``). It starts over if its sampling
looks at the response so far (``COUNTS_RESPONSE``), because an engine takes the tokens that it is
sent for the prompt's.

An engine fails when a call of it raises ``EngineFailedError``, or when its heartbeat is late
(``EnginePool.fail``). If failures are handled (``EnginePool.on_failure``), it is not called any
more, and its requests continue at the others from the tokens known of them (``poll``); without
others they wait for its replacement. Otherwise, and for every other error, the requests that the
engine had raise the error.

While every engine is full (``router``) requests wait here, in order. The queue moves when a request
ends, an engine is admitted or wakes, or one reports room (``poll``). The requests of an engine that
falls asleep continue at the others; while all sleep, they wait here, and no time counts.

| who waits                | for what                       | woken by                                               |
|--------------------------|--------------------------------|--------------------------------------------------------|
| ``generate_group``       | a result of its group          | ``_send`` (answer, error), a failure, or its limit     |
| a queued request         | an engine; its group waits     | ``_advance``, ``give_up``, or its limit                |
| ``_send`` (a task each)  | the engine's stream of answers | the engine; its failure fails the requests             |
| a call of all engines    | every healthy engine's answer  | the engines; a failure                                 |
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from math import ceil, inf, isfinite
from typing import Any, NamedTuple

from skyasync.arrays import TURN_TOKENS
from skyasync.config.schema.sampling import COUNTS_RESPONSE
from skyasync.inference.inflight import (
    InflightGroup,
    InflightRequest,
    InflightTable,
    continuation,
    join,
)
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
from skyasync.inference.progress_limit import ProgressLimit
from skyasync.inference.stop_strings import cut_at_stop_string
from skyasync.weight_sync.update import WakePart, WeightUpdate

SHUT_DOWN = "the inference client was shut down"
MAX_GROUP = 64  # requests that are routed at once; most groups are smaller
# A caller's work with one answer, however short, costs as much as reading so many tokens.
ANSWER_TOKENS = 256
# Requests that were on their way to an engine miss its abort; after this time it is repeated.
ARRIVAL_S = 0.5


class Outgoing(NamedTuple):
    """The message to an engine in one turn of the event loop."""

    requests: list[InflightRequest]
    abandoned: list[str]  # requests whose callers no longer wait: the engine need not compute them


def _alike(sample: GenerationRequest, request: GenerationRequest) -> bool:
    """Whether two requests are samples of a prompt, which engines would finish at the same time."""
    same_prompt = sample.prompt_token_ids is request.prompt_token_ids
    return same_prompt and sample.sampling.max_tokens == request.sampling.max_tokens


class InferenceClient:
    """Router to the engine that would finish first (``router``); a session stays where it began.

    Args:
        engines: at least one; they hold the same weights.
        request_timeout_s: how long a request may wait while its engine makes no progress, pauses
            included.
        tokenizer: gives the model's; needed where requests with stop strings are cut.
        start_at_once: engines that load at the same time, in order; 0 is all. Engines that share a
            device measure its free memory when they load, and must do so one after the other.
        adaptive: limit what an engine has at once by its queue (``ConcurrencyLimit``), as far as
            ``poll`` asks for it.

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
        self._outbox: dict[int, Outgoing] = {}  # engine -> its message of this turn
        self._unsent: set[int] = set()  # engines whose messages no task sends yet
        self._collecting_blocks = 0  # nested ``collecting`` blocks
        # A dict is an ordered set: a request in the middle leaves it in constant time.
        self._queue: dict[InflightRequest, None] = {}
        self._poll_locks = [asyncio.Lock() for _ in engines]
        self._inflight = InflightTable()
        self._limit = ProgressLimit(request_timeout_s, self._inflight, self.pool)
        self._cut: set[str] = set()  # engines' ids of requests that end early, and then continue
        self.updating = False
        self._paused = False
        self._cutting = False  # from a cut to the end of its pause

    @property
    def proves_weights(self) -> bool:
        """Whether every engine compares what it holds with digests of what was sent."""
        return all(engine.proves_weights for engine in self.engines)

    async def start(self) -> None:
        for position in range(0, len(self.engines), self._start_at_once):
            wave = self.engines[position : position + self._start_at_once]
            await asyncio.gather(*(engine.start() for engine in wave))
        try:
            # The engines' own limits end with their start: from here on nothing else would notice
            # one that hangs.
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
            TimeoutError: naming the request, after ``request_timeout_s`` without progress of its
                engine.
            ValueError: if a request with this id is in flight already.
            RequestFailedError: if this request cannot be answered; the engines continue.
            Exception: whatever the engine raised, with its traceback.
        """
        return await self._only(self.generate_group([request]))

    async def go_on(
        self,
        request: GenerationRequest,
        partial: GenerationOutput,
    ) -> GenerationOutput:
        """Answer a request of which a part is known; its errors are those of ``generate``.

        Args:
            partial: returned as it is if it is complete (it has a ``finish_reason``).
        """
        partial = replace(partial, request_id=request.request_id)
        if partial.finish_reason or len(partial.token_ids) >= request.sampling.max_tokens:
            return replace(partial, finish_reason=partial.finish_reason or "length")
        partial.finish_reason = "abort"
        return await self._only(self.generate_group([request], partial))

    @staticmethod
    async def _only(answers: AsyncGenerator[list[GenerationOutput], None]) -> GenerationOutput:
        # Closed here, an abort is sent at once, and not when the generator is collected as garbage.
        async with contextlib.aclosing(answers):
            (answer,) = await anext(answers)
            return answer

    async def generate_group(
        self,
        requests: Sequence[GenerationRequest],
        partial: GenerationOutput | None = None,
    ) -> AsyncGenerator[list[GenerationOutput], None]:
        """Answer each request once, in lists, as they finish. Errors are those of ``generate``.

        Leaving the iteration early (``contextlib.aclosing``) aborts what is unanswered.

        Args:
            requests: samples of one prompt, usually; they are routed one by one.
            partial: what is known of the answer to the only request.
        """
        group = InflightGroup(requests)
        try:
            for request in requests:
                if partial is None:
                    self._submit(request, request.request_id, group)
                else:
                    self._continue(request, partial, group)
            self._advance()
            while group.requests:
                finished = []
                for piece in await group.answered():
                    answer = self._take(piece)
                    if answer is not None:
                        finished.append(answer)
                self._advance()
                if finished:
                    yield finished
        finally:
            for piece in list(group.in_flight):
                self._remove(piece)
            for name in group.requests:
                self._inflight.earlier_answers.pop(name, None)
            self._advance()  # removed requests have made room at their engines

    def _submit(self, request: GenerationRequest, caller_id: str, group: InflightGroup) -> None:
        """Queue a request, or the rest of one."""
        name = request.request_id
        if name in self._inflight:
            raise ValueError(f"request {name} is in flight already: its id must be its own")
        if self.pool.end is not None:
            raise self.pool.end
        piece = InflightRequest(request, caller_id, group)
        piece.since_s = asyncio.get_running_loop().time()
        group.in_flight[piece] = self._queue[piece] = None
        self._inflight[name] = piece
        self._limit.start()
        if self._cutting:  # it may arrive before the engine ends all requests, or after
            self._cut.add(name)

    def _take(self, piece: InflightRequest) -> GenerationOutput | None:
        """The answer that the piece completes; None if it was cut, and the rest is requested."""
        self._remove(piece)
        answer = piece.result
        group = piece.group
        name = piece.caller_id
        if isinstance(answer, BaseException):
            raise answer
        assert answer is not None
        request = group.requests[name]
        earlier_answers = self._inflight.earlier_answers.pop(name, None)
        if earlier_answers is not None:
            seen_tokens = len(earlier_answers.token_ids)
            answer = join(earlier_answers, answer)
            answer = cut_at_stop_string(request, answer, seen_tokens, self._tokenizer)
        if answer.finish_reason == "abort" and answer.request_id in self._cut:
            self._cut.discard(answer.request_id)
            self._continue(request, answer, group)
            return None
        self._cut.discard(answer.request_id)
        del group.requests[name]
        if answer.request_id == name:
            return answer
        return replace(answer, request_id=name)

    def _continue(
        self,
        request: GenerationRequest,
        answer: GenerationOutput,
        group: InflightGroup,
    ) -> None:
        """Request the rest of an answer, or all of it again."""
        if any(getattr(request.sampling, name) for name in COUNTS_RESPONSE):
            answer = GenerationOutput(request.request_id)
        self._inflight.earlier_answers[request.request_id] = answer
        self._submit(continuation(request, answer), request.request_id, group)

    def _remove(self, piece: InflightRequest) -> None:
        """The caller has the result of a piece, or no longer waits for it."""
        name = piece.request.request_id
        charge = piece.charge
        del piece.group.in_flight[piece], self._inflight[name]
        self._queue.pop(piece, None)
        if charge is not None:
            if piece.result is None:
                self._outgoing(charge.engine).abandoned.append(name)
                self._inflight.leaving[charge.engine].add(name)
            answer = piece.result if isinstance(piece.result, GenerationOutput) else None
            self.pool.router.ended(charge, answer, asyncio.get_running_loop().time())
        piece.abandon()
        if not self._inflight:
            self._limit.stop()

    def _advance(self) -> None:
        """Give the first requests of the queue to engines; stop at one that no engine can take."""
        while self._queue:
            now = asyncio.get_running_loop().time()
            queued = len(self._queue)
            samples = self._samples_in_front()
            if not samples:  # no caller waited for any of them: look at the next ones
                continue
            requests = [piece.request for piece in samples]
            charges = self.pool.router.choose_group(requests, now, queued)
            # There are fewer charges than samples when the engines are full.
            for piece, charge in zip(samples, charges, strict=False):
                del self._queue[piece]
                piece.since_s = now
                self._inflight.send(piece, charge)
                self._outgoing(charge.engine).requests.append(piece)
            if len(charges) < len(samples):
                return

    def _samples_in_front(self) -> list[InflightRequest]:
        """The first requests of the queue, as far as they are samples of one prompt.

        Requests without a waiting caller leave the queue.
        """
        samples: list[InflightRequest] = []
        for piece in list(islice(self._queue, MAX_GROUP)):
            if piece.done:
                del self._queue[piece]
                continue
            if samples and not _alike(samples[0].request, piece.request):
                break
            samples.append(piece)
        return samples

    def _outgoing(self, index: int) -> Outgoing:
        """The message to the engine in the next turn of the event loop; this turn adds to it."""
        if index not in self._outbox:
            self._outbox[index] = Outgoing([], [])
            self._unsent.add(index)
            if not self._collecting_blocks:
                self._start_sending()
        return self._outbox[index]

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Requests that are made in the block leave at its end, in one message per engine.

        Other tasks may run in the block. An engine that gets the requests in several messages would
        begin with some of them: which ones it computes together would depend on the time.
        """
        self._collecting_blocks += 1
        try:
            yield
        finally:
            self._collecting_blocks -= 1
            if not self._collecting_blocks:
                self._start_sending()

    def _start_sending(self) -> None:
        unsent = self._unsent
        self._unsent = set()
        for index in sorted(unsent & self._outbox.keys()):  # an engine may have failed meanwhile
            task = asyncio.get_running_loop().create_task(self._send(index))
            calls = self.pool.calls[index]
            calls.add(task)
            task.add_done_callback(calls.discard)

    async def _send(self, index: int) -> None:
        """Send an engine's message, and pass its answers to the callers until all have one."""
        requests, abandoned = self._outbox.pop(index)
        engine = self.engines[index]
        unanswered = {piece.request.request_id: piece for piece in requests if not piece.done}
        try:
            if abandoned:
                # The error of a failed engine goes to the callers that still wait.
                with contextlib.suppress(Exception):
                    await engine.abort(abandoned)
                self._inflight.leaving[index].difference_update(abandoned)
            if not unanswered:
                return
            request_list = [piece.request for piece in unanswered.values()]
            async for outputs in engine.generate(request_list):
                self._limit.answered(index)
                tokens = 0
                for output in outputs:
                    piece = unanswered.pop(output.request_id)
                    if output.finish_reason == "error":
                        piece.finish(RequestFailedError(output.error))
                    else:
                        piece.finish(output)
                    tokens += len(output.token_ids) + ANSWER_TOKENS
                    if tokens >= TURN_TOKENS:  # let the callers, and others, have their turn
                        tokens = 0
                        await asyncio.sleep(0)
            if unanswered:
                names = ", ".join(sorted(unanswered)[:5])
                raise RuntimeError(f"engine {index} ended without answering {names}")
        except BaseException as error:
            call = asyncio.current_task()
            if isinstance(error, EngineFailedError) and self.pool.fail(index, error, call):
                return  # the requests continue at other engines (``_recover``)
            is_shutdown = isinstance(error, asyncio.CancelledError)
            for piece in unanswered.values():
                piece.finish(RuntimeError(SHUT_DOWN) if is_shutdown else error)
            if not isinstance(error, Exception):
                raise

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests (all of them: None) for good, also if they had been cut."""
        callers = set(request_ids or ())
        ended_ids = []
        for name, inflight in self._inflight.items():
            if request_ids is None or inflight.caller_id in callers:
                ended_ids.append(name)
        self._cut.difference_update(ended_ids)
        for name in ended_ids:
            inflight = self._inflight[name]
            if inflight.charge is None:  # no engine knows it
                inflight.finish(inflight.so_far)
        if request_ids is not None:
            request_ids = ended_ids
        await self.pool.all(lambda engine: engine.abort(request_ids))

    async def progress(
        self,
        request_ids: Collection[str] | None = None,
    ) -> dict[str, GenerationOutput]:
        """The tokens that the healthy engines have of these unanswered requests, by request id.

        Args:
            request_ids: as the callers gave them; None: of all.
        """
        await asyncio.gather(*map(self.poll, self.pool.healthy))
        return self._inflight.so_far(request_ids)

    async def poll(self, index: int, *, tokens: bool = True) -> None:
        """Ask an engine for a heartbeat.

        Args:
            tokens: ask for its progress, from which its requests would continue after a failure.
        """
        answer: tuple[Any] | None
        if tokens:
            async with self._poll_locks[index]:  # progress is new tokens: its order matters
                requests = self._inflight.at(index)
                leaving_ids = set(self._inflight.leaving[index])
                try:
                    answer = await self.pool.ask(index, self.engines[index].progress())
                except BaseException:
                    for inflight in (*requests.values(), *self._inflight.at(index).values()):
                        inflight.received = None  # progress may have been lost on its way
                    raise
                self._inflight.receive(requests, answer[0] if answer else (), leaving_ids)
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
        scores = await self.pool.all(lambda engine: engine.score(sequences))
        return list(scores.values())

    async def pause(self, mode: PauseMode = "keep") -> None:
        self._paused = True
        await self.pool.all(lambda engine: engine.pause(mode))

    async def cut(self) -> None:
        """Pause, and end all requests; ``generate`` continues them after ``resume``.

        No token is lost.
        """
        self._cut.update(self._inflight)
        self._cutting = True
        await self.pause("abort")

    async def resume(self) -> None:
        self._paused = self._cutting = False
        await self.pool.all(lambda engine: engine.resume())

    async def update_weights(
        self,
        update: WeightUpdate,
        engines: Collection[int] | None = None,
    ) -> list[str]:
        """``InferenceEngine.update_weights`` of these engines (None: all) that are awake."""
        # Prompts in the engines' caches were computed by the former weights.
        self.pool.router.prompts.clear()
        self.updating = True
        try:
            if "members" in update.info:  # sender and receivers meet in a group
                await self.pool.all_or_none(
                    update.info["members"],
                    lambda engine: engine.update_weights(update),
                    "update_weights",
                )
                return []
            indexes = _selected(self.pool.awake, engines)
            answers = await self.pool.all(lambda engine: engine.update_weights(update), indexes)
        finally:
            self.updating = False
        unproven: set[str] = set()
        for names in answers.values():
            unproven.update(names or ())
        return sorted(unproven)

    async def sleep(self, engines: Collection[int] | None = None) -> None:
        """These engines (None: all) free their memory; their requests continue at the others."""
        pool = self.pool
        indexes = _selected(pool.awake, engines)
        # Closed before the requests leave: else the router would send them back.
        pool.router.open[indexes] = False
        await asyncio.gather(*map(self._withdraw, indexes))
        pool.asleep.update(indexes)
        await pool.all(lambda engine: engine.sleep(), _selected(pool.healthy, indexes))

    async def wake(self, part: WakePart, engines: Collection[int] | None = None) -> None:
        """These engines (None: all) take requests again when their caches are awake."""
        indexes = _selected(self.pool.healthy, engines)
        await self.pool.all(lambda engine: engine.wake(part), indexes)
        if part == "weights":
            self.pool.asleep.difference_update(indexes)
            return
        self.pool.router.open[indexes] = True
        now = asyncio.get_running_loop().time()
        for inflight in self._queue:  # the time while engines sleep counts for no limit
            inflight.since_s = now
        self._advance()
        await self._share(indexes)

    async def _withdraw(self, index: int) -> None:
        """An engine ends its requests; they continue where the router sends them."""
        while leaving_requests := self._unfinished_at(index):
            names = [inflight.request.request_id for inflight in leaving_requests]
            self._cut.update(names)
            abort = self.engines[index].abort(names)
            if await self.pool.ask(index, abort) is None:
                return  # it has failed
            await asyncio.wait([inflight.end() for inflight in leaving_requests], timeout=ARRIVAL_S)
        calls = set(self.pool.calls[index])
        if calls:  # of requests that their callers have abandoned
            await asyncio.wait(calls)

    def _unfinished_at(self, index: int) -> list[InflightRequest]:
        """The requests at an engine that have no result."""
        return [inflight for inflight in self._inflight.at(index).values() if not inflight.done]

    async def _share(self, woken: Collection[int]) -> None:
        """Engines that woke get the newest requests that the others have not begun.

        Afterwards all engines have about equal numbers of requests.
        """
        router = self.pool.router
        engines = int((router.healthy & router.open).sum())
        mean = ceil(int(router.in_flight.sum()) / max(engines, 1))
        calls = []
        for index in self.pool.awake:
            if index in woken:
                continue
            waiting = []
            for inflight in self._inflight.at(index).values():
                if inflight.received == []:  # it has no token yet: moving it loses no work
                    waiting.append(inflight.request)
            waiting.reverse()
            excess = max(int(router.in_flight[index]) - mean, 0)
            names = []
            for request in waiting[:excess]:
                router.sessions.pop(request.session_id or "", None)  # which would stay where it is
                names.append(request.request_id)
            if names:
                self._cut.update(names)
                abort = self.engines[index].abort(names)
                calls.append(self.pool.ask(index, abort))
        await asyncio.gather(*calls)

    async def waiting(self) -> int:
        """Requests that no engine computes yet."""
        waiting = len(self._queue)
        for stats in await self.stats():
            waiting += stats.waiting
        return waiting

    async def stats(self) -> list[EngineStats]:
        """Per engine, by its number; zeros for one that has failed."""
        stats = await self.pool.all(lambda engine: engine.stats(), self.pool.healthy)
        result = []
        for index, left in enumerate(self.pool.router.left):
            result.append(stats.get(index, EngineStats(gone=bool(left))))
        return result

    async def shutdown(self) -> None:
        # A ``_send`` that is cancelled before it starts would not answer its callers.
        await asyncio.sleep(0)
        calls = list(chain.from_iterable(self.pool.calls))
        for task in calls:
            task.cancel()
        shutdowns = [engine.shutdown() for engine in self.engines]
        await asyncio.gather(*calls, *shutdowns, return_exceptions=True)
        self._fail_all(RuntimeError(SHUT_DOWN))  # requests that had no engine
        await self._limit.close()

    # ---------------------------------------------------------------- failures, and engines that
    # come and go

    def _recover(self, index: int) -> LostWork:
        """An engine has failed or left: its requests continue at the others."""
        self._outbox.pop(index, None)
        lost_requests = self._unfinished_at(index)
        tokens = 0
        for inflight in lost_requests:
            answer = inflight.so_far
            tokens += len(answer.token_ids)
            self._cut.add(answer.request_id)
            inflight.finish(answer)
        return LostWork(len(lost_requests), tokens)

    async def admit(self, index: int, engine: InferenceEngine) -> None:
        """This engine, which holds the weights of the others, takes the place of the failed one."""
        self.pool.asleep.discard(index)
        paused = False
        while paused != self._paused:  # the others may be paused or resumed during the call
            paused = self._paused
            await (engine.pause("keep") if paused else engine.resume())
        self.engines[index] = engine
        self.pool.router.renew(index)
        self._advance()

    async def join(self, engine: InferenceEngine) -> int:
        """``admit`` under a new number, which is returned."""
        stats = await engine.stats()
        router = self.pool.router
        index = router.add()
        router.capacity[index] = stats.cache_tokens or inf
        self.engines.append(engine)
        self.pool.calls.append(set())
        self._poll_locks.append(asyncio.Lock())
        await self.admit(index, engine)
        return index

    async def remove(self, index: int, patience_s: float) -> int:
        """This engine gets no request any more; its requests continue at the others.

        Returns the number of these requests.
        """
        router = self.pool.router
        router.healthy[index] = False
        router.left[index] = True
        leaving_requests = self._inflight.at(index)
        # If the engine fails or hangs, its requests continue from the tokens that are known.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(patience_s):
                await self._withdraw(index)
        self._recover(index)
        return len(leaving_requests)

    def give_up(self, error: BaseException) -> None:
        """No engine will answer any more: every request and call raises this."""
        self.pool.end = error
        self._fail_all(error)

    def _fail_all(self, error: BaseException) -> None:
        for inflight in self._inflight.values():
            inflight.finish(error)


def _selected(indexes: Sequence[int], engines: Collection[int] | None) -> list[int]:
    """The indexes of these engines; None: all indexes."""
    return [index for index in indexes if engines is None or index in engines]
