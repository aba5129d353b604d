"""One client in front of several engines: it routes, batches calls, and owns every wait.

Invariant: each request is answered exactly once or raises; a request whose engine fails raises that
engine's error, and one that no engine answers in time raises ``TimeoutError`` naming it. Requests made in
one turn of the event loop travel to their engine in one message.

A request that ``cut`` has ended early is continued here: prompt and tokens so far are sent as a new request,
which the engines start under whatever weights they have after ``resume``. Its caller sees one answer, with the
pieces' tokens, log-probabilities and versions joined. A stop string that begins in one piece and ends in the next is
seen by no engine: the client finds it, and drops what was made behind it.

| who waits                | for what                      | woken by                                   |
|--------------------------|-------------------------------|--------------------------------------------|
| ``generate``             | its request's future          | ``_carry`` (answer, error), or its timeout |
| ``_carry`` (a task each) | the engine's stream of answers| the engine; its failure fails the futures  |
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from skyasync.arrays import TURN_TOKENS
from skyasync.engines.protocol import (
    EngineStats,
    GenerationOutput,
    GenerationRequest,
    InferenceEngine,
    PauseMode,
)
from skyasync.errors import UserError
from skyasync.weight_sync.update import WakePart, WeightUpdate

if TYPE_CHECKING:
    from skyasync.engines.stop_strings import StopStrings

REMEMBERED_SESSIONS = 65_536  # those used last; a conversation between two turns has no request in flight


class Mail(NamedTuple):
    """What an engine is told in one turn of the event loop."""

    letters: list[tuple[GenerationRequest, asyncio.Future[GenerationOutput]]]
    abandoned: list[str]  # requests whose answers nobody waits for any more: the engine need not compute them


class InferenceClient:
    """Routes to the engine with the fewest requests in flight; a session stays where it began.

    Args:
        engines: at least one; they hold the same weights.
        request_timeout_s: how long a request may go unanswered, pauses of the engines included.
        tokenizer: gives the model's; needed where requests with stop strings are cut.
        start_at_once: engines that load at the same time, in order; 0 is all. Those that share a device measure what
            memory is free on it when they load, and must do so one after the other.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        request_timeout_s: float = 600.0,
        tokenizer: Callable[[], Any] | None = None,
        start_at_once: int = 0,
    ) -> None:
        if not engines:
            raise ValueError("an inference client needs at least one engine")
        self.engines = list(engines)
        self.request_timeout_s = request_timeout_s
        self._tokenizer = tokenizer
        self._start_at_once = start_at_once or len(engines)
        self._stop_strings: dict[tuple[tuple[str, ...], bool], StopStrings] = {}
        self._in_flight = [0] * len(engines)
        self._sessions: dict[str, int] = {}  # session -> engine, the one used last at the end
        self._outbox: dict[int, Mail] = {}  # engine -> of this turn
        self._carriers: set[asyncio.Task[None]] = set()
        self._unanswered: dict[str, str] = {}  # id as the engines know it -> id as the caller knows it
        self._cut: set[str] = set()  # the engines' ids of what ``cut`` has ended

    async def start(self) -> None:
        for first in range(0, len(self.engines), self._start_at_once):
            wave = self.engines[first : first + self._start_at_once]
            await asyncio.gather(*(engine.start() for engine in wave))

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Answer one request.

        Raises:
            TimeoutError: naming the request, after ``request_timeout_s``.
            ValueError: if a request with this id is in flight already.
            Exception: whatever the engine raised, with its traceback.
        """
        answer = await self._piece(request, request.request_id)
        while answer.finish_reason == "abort" and answer.request_id in self._cut:
            self._cut.discard(answer.request_id)
            more = await self._piece(continuation(request, answer), request.request_id)
            answer = self._ended(request, join(answer, more), seen=len(answer.token_ids))
        self._cut.discard(answer.request_id)
        return replace(answer, request_id=request.request_id)

    def _ended(self, request: GenerationRequest, answer: GenerationOutput, seen: int) -> GenerationOutput:
        """The answer up to the first stop string that ends behind its ``seen`` tokens."""
        sampling = request.sampling
        if not sampling.stop:
            return answer
        tokens = answer.token_ids.tolist()
        for count in range(max(seen, sampling.min_tokens) + 1, len(tokens) + 1):
            if self._stops(request).completed_by_last(tokens[:count]):
                return GenerationOutput(
                    answer.request_id,
                    answer.token_ids[:count],
                    answer.logprobs[:count],
                    answer.versions[:count],
                    "stop",
                )
        return answer

    def _stops(self, request: GenerationRequest) -> StopStrings:
        from skyasync.engines.stop_strings import StopStrings

        if self._tokenizer is None:
            raise UserError(
                f"request {request.request_id} has stop strings and was cut by a weight sync: the inference client "
                f"needs the model's tokenizer to find one that spans the cut, or set trainer.partial_rollout=keep"
            )
        key = (request.sampling.stop, request.sampling.skip_special_tokens)
        if key not in self._stop_strings:
            self._stop_strings[key] = StopStrings(self._tokenizer(), key[0], skip_special_tokens=key[1])
        return self._stop_strings[key]

    async def _piece(self, request: GenerationRequest, caller_id: str) -> GenerationOutput:
        """What an engine answers to a request or to its continuation."""
        if request.request_id in self._unanswered:
            raise ValueError(f"request {request.request_id} is in flight already: its id must be its own")
        index = self._choose(request.session_id)
        future: asyncio.Future[GenerationOutput] = asyncio.get_running_loop().create_future()
        self._mail(index).letters.append((request, future))
        self._unanswered[request.request_id] = caller_id
        try:
            async with asyncio.timeout(self.request_timeout_s) as timer:
                return await future
        except TimeoutError as error:
            if not timer.expired():
                raise
            raise TimeoutError(
                f"request {request.request_id} was not answered within {self.request_timeout_s:g} s "
                f"(generator.request_timeout_s)"
            ) from error
        finally:
            if not future.done() or future.cancelled():
                self._mail(index).abandoned.append(request.request_id)
            del self._unanswered[request.request_id]
            self._in_flight[index] -= 1

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Per engine, the log-probability of each token after the first."""
        return await asyncio.gather(*(engine.score(sequences) for engine in self.engines))

    async def pause(self, mode: PauseMode = "keep") -> None:
        await asyncio.gather(*(engine.pause(mode) for engine in self.engines))

    async def cut(self) -> None:
        """Pause, and end what is in flight; ``generate`` continues it after ``resume``. No token is lost."""
        self._cut.update(self._unanswered)
        await self.pause("abort")

    async def resume(self) -> None:
        await asyncio.gather(*(engine.resume() for engine in self.engines))

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests (all of them: None) for good, also if they had been cut."""
        if request_ids is not None:
            wanted = set(request_ids)
            request_ids = [engine_id for engine_id, caller_id in self._unanswered.items() if caller_id in wanted]
        self._cut -= set(self._unanswered if request_ids is None else request_ids)
        await asyncio.gather(*(engine.abort(request_ids) for engine in self.engines))

    async def update_weights(self, update: WeightUpdate) -> None:
        await asyncio.gather(*(engine.update_weights(update) for engine in self.engines))

    async def sleep(self) -> None:
        await asyncio.gather(*(engine.sleep() for engine in self.engines))

    async def wake(self, part: WakePart) -> None:
        await asyncio.gather(*(engine.wake(part) for engine in self.engines))

    async def stats(self) -> list[EngineStats]:
        return await asyncio.gather(*(engine.stats() for engine in self.engines))

    async def shutdown(self) -> None:
        await asyncio.sleep(0)  # a carrier that is cancelled before it begins would answer nobody
        carriers = list(self._carriers)
        for task in carriers:
            task.cancel()
        await asyncio.gather(*carriers, *(engine.shutdown() for engine in self.engines), return_exceptions=True)

    def _choose(self, session_id: str | None) -> int:
        index = min(range(len(self.engines)), key=self._in_flight.__getitem__)
        if session_id is not None:
            index = self._sessions.pop(session_id, index)
            self._sessions[session_id] = index
            if len(self._sessions) > REMEMBERED_SESSIONS:
                self._sessions.pop(next(iter(self._sessions)))
        self._in_flight[index] += 1
        return index

    def _mail(self, index: int) -> Mail:
        """This turn's, to an engine. It is carried there in the next one."""
        if index not in self._outbox:
            self._outbox[index] = Mail([], [])
            carrier = asyncio.get_running_loop().create_task(self._carry(index))
            self._carriers.add(carrier)
            carrier.add_done_callback(self._carriers.discard)
        return self._outbox[index]

    async def _carry(self, index: int) -> None:
        mail = self._outbox.pop(index)
        letters = [(request, future) for request, future in mail.letters if not future.cancelled()]
        waiting = {request.request_id: future for request, future in letters}
        try:
            if mail.abandoned:
                with contextlib.suppress(Exception):  # an engine that has failed tells those who still wait
                    await self.engines[index].abort(mail.abandoned)
            if not letters:
                return
            async for outputs in self.engines[index].generate([request for request, _ in letters]):
                told = 0
                for output in outputs:
                    future = waiting.pop(output.request_id)
                    if not future.done():  # its caller may have been cancelled
                        future.set_result(output)
                    told += len(output.token_ids)
                    if told >= TURN_TOKENS:  # those who are answered have work to do, and others want their turn
                        told = 0
                        await asyncio.sleep(0)
            if waiting:
                raise RuntimeError(f"engine {index} ended without answering {', '.join(sorted(waiting)[:5])}")
        except BaseException as error:
            for future in waiting.values():
                if not future.done():
                    future.set_exception(_shareable(error))
            if not isinstance(error, Exception):
                raise


def continuation(request: GenerationRequest, answer: GenerationOutput) -> GenerationRequest:
    """The request for what ``answer`` lacks. A new id (and seed) gives it a random stream of its own."""
    done, sampling = len(answer.token_ids), request.sampling
    return replace(
        request,
        request_id=f"{request.request_id}+{done}",
        prompt_token_ids=np.concatenate([request.prompt_token_ids, answer.token_ids]),
        sampling=replace(
            sampling,
            max_tokens=sampling.max_tokens - done,
            min_tokens=max(sampling.min_tokens - done, 0),
            seed=None if sampling.seed is None else hash((sampling.seed, done)) % 2**63,
        ),
    )


def join(answer: GenerationOutput, more: GenerationOutput) -> GenerationOutput:
    """Both pieces as one, under the id and with the end of the second."""
    return GenerationOutput(
        more.request_id,
        np.concatenate([answer.token_ids, more.token_ids]),
        np.concatenate([answer.logprobs, more.logprobs]),
        np.concatenate([answer.versions, more.versions]),
        more.finish_reason,
    )


def _shareable(error: BaseException) -> BaseException:
    return RuntimeError("the inference client was shut down") if isinstance(error, asyncio.CancelledError) else error
