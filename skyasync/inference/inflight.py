"""Requests in flight, and answers in several pieces: a request that was cut continues as a new one.

Invariant: the joined pieces are what one engine would have given without the cut: no token is lost
or repeated.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from skyasync.arrays import joined_experts
from skyasync.inference.interface import GenerationOutput, GenerationRequest
from skyasync.inference.router import Charge


class InflightGroup:
    """Requests that one caller has made together, and for whose answers it waits.

    Args:
        requests: as the caller has made them.

    Attributes:
        requests: by their ids, those without a whole answer.
        in_flight: the requests of the group at engines or in the queue: these, or the rest of a
            response that was cut.
    """

    def __init__(self, requests: Iterable[GenerationRequest]) -> None:
        self.requests = {request.request_id: request for request in requests}
        self.in_flight: dict[InflightRequest, None] = {}
        self._answered_requests: list[InflightRequest] = []
        self._error: TimeoutError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def answer(self, piece: InflightRequest) -> None:
        """Wake the caller: this piece has its result."""
        self._answered_requests.append(piece)
        self._wake()

    def expire(self, error: TimeoutError) -> None:
        """End the wait of the caller with this error; without effect if it does not wait now."""
        if self._wake():
            self._error = error

    def _wake(self) -> bool:
        """Whether the caller waits, and is woken."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return False
        waiter.set_result(None)
        return True

    async def answered(self) -> list[InflightRequest]:
        """The requests that got their result since the last call, at least one.

        Raises:
            TimeoutError: of ``expire``.
        """
        if not self._answered_requests:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        requests = self._answered_requests
        self._answered_requests = []
        return requests

    @property
    def cancelled(self) -> bool:
        """The caller no longer waits, even if it has not come to leave yet."""
        return self._waiter is not None and self._waiter.cancelled()


@dataclass(eq=False, slots=True)
class InflightRequest:
    """A request at an engine.

    Args:
        caller_id: the id of the request that it is a piece of.
        group: of the caller, which is woken by a result.

    Attributes:
        charge: where it is; None while it waits for an engine.
        since_s: event loop time since which it has been there, or in the queue.
        result: the answer, or the error in its place; the first one counts.
    """

    request: GenerationRequest
    caller_id: str
    group: InflightGroup
    charge: Charge | None = None
    since_s: float = 0.0
    # Progress of the engine since the request was sent; None: some of it may have been lost.
    received: list[GenerationOutput] | None = field(default_factory=list)
    result: GenerationOutput | BaseException | None = None
    _end: asyncio.Future[None] | None = None

    @property
    def done(self) -> bool:
        """Whether there is a result, or the caller no longer waits for one."""
        return self.result is not None or self.group.cancelled

    def finish(self, result: GenerationOutput | BaseException) -> None:
        """Pass the result to the caller, unless there is one already."""
        if not self.done:
            self._set(result)
            self.group.answer(self)

    def abandon(self) -> None:
        """The caller leaves."""
        if self.result is None:
            self._set(asyncio.CancelledError())

    def end(self) -> asyncio.Future[None]:
        """A future that is done as soon as there is a result."""
        if self._end is None:
            self._end = asyncio.get_running_loop().create_future()
            if self.done:
                self._end.set_result(None)
        return self._end

    def _set(self, result: GenerationOutput | BaseException) -> None:
        self.result = result
        if self._end is not None and not self._end.done():
            self._end.set_result(None)

    @property
    def so_far(self) -> GenerationOutput:
        """The answer as if it had been cut after what is known of it."""
        outputs = self.received
        if not outputs:  # unknown, or no token yet: the request starts over
            return GenerationOutput(self.request.request_id, finish_reason="abort")
        answer = GenerationOutput(
            self.request.request_id,
            np.concatenate([output.token_ids for output in outputs]),
            np.concatenate([output.logprobs for output in outputs]),
            np.concatenate([output.versions for output in outputs]),
            "abort",
            joined_experts(output.experts for output in outputs),
        )
        self.received = [answer]  # so that frequent calls join the pieces once
        return answer


class InflightTable(dict[str, InflightRequest]):
    """The requests that wait for an answer, by the ids that the engines know.

    Attributes:
        earlier_answers: by the caller's id, the answer before the piece that is in flight.
        leaving: by engine, ids of abandoned requests that the engine may still know.
    """

    def __init__(self) -> None:
        super().__init__()
        self.earlier_answers: dict[str, GenerationOutput] = {}
        self.leaving: defaultdict[int, set[str]] = defaultdict(set)
        self._at: dict[int, dict[str, InflightRequest]] = {}

    def send(self, inflight: InflightRequest, charge: Charge) -> None:
        """Record that the request is sent to an engine."""
        inflight.charge = charge
        self._at.setdefault(charge.engine, {})[inflight.request.request_id] = inflight

    def __delitem__(self, name: str) -> None:
        charge = self.pop(name).charge
        if charge is not None:
            del self._at[charge.engine][name]

    def at(self, engine: int) -> dict[str, InflightRequest]:
        """The engine's requests by their ids, as a copy.

        Heartbeats call this: the cost depends on this engine's requests alone.
        """
        return dict(self._at.get(engine, ()))

    def receive(
        self,
        sent_requests: Mapping[str, InflightRequest],
        progress: Iterable[GenerationOutput],
        leaving_ids: Collection[str] = (),
    ) -> None:
        """Record an engine's progress.

        Args:
            sent_requests: the engine's requests when the progress was requested.
            progress: the engine's answer.
            leaving: the ids that were leaving at that time.
        """
        for output in progress:
            request = self.get(output.request_id)
            if request is None:  # answered meanwhile
                continue
            sent_request = sent_requests.get(output.request_id)
            # A request that was sent after the call may have started before the engine answered.
            may_be_new = sent_request is None and output.request_id not in leaving_ids
            if sent_request is not request and not may_be_new:
                # The progress may be that of an abandoned request of the same id.
                request.received = None
            elif request.received is not None:
                request.received.append(output)

    def so_far(self, request_ids: Collection[str] | None = None) -> dict[str, GenerationOutput]:
        """The known tokens of these requests (None: of all), by their callers' ids."""
        answers: dict[str, GenerationOutput] = {}
        for inflight in self.values():
            name = inflight.caller_id
            if request_ids is not None and name not in request_ids:
                continue
            answers[name] = inflight.so_far
            if name in self.earlier_answers:
                answers[name] = join(self.earlier_answers[name], answers[name])
        return answers


def continuation(request: GenerationRequest, answer: GenerationOutput) -> GenerationRequest:
    """The request for the tokens that ``answer`` lacks.

    With a seed its tokens are those that it would have had without the cut. Without a seed the new
    id gives it a random stream of its own.
    """
    token_count = len(answer.token_ids)
    sampling = request.sampling
    return replace(
        request,
        continues=True,
        response_tokens=token_count,
        request_id=f"{request.request_id}+{token_count}",
        prompt_token_ids=np.concatenate([request.prompt_token_ids, answer.token_ids]),
        sampling=replace(
            sampling,
            max_tokens=sampling.max_tokens - token_count,
            min_tokens=max(sampling.min_tokens - token_count, 0),
        ),
    )


def join(answer: GenerationOutput, more: GenerationOutput) -> GenerationOutput:
    """Both pieces as one, with the id and the end of the second.

    Experts that both report are those of the first: its tokens were computed with them.
    """
    experts = answer.experts  # [tokens, layers, experts per token]
    if more.experts is not None:
        expert_count = 0 if experts is None else len(experts)
        experts = joined_experts([experts, more.experts[expert_count:]])
    return GenerationOutput(
        more.request_id,
        np.concatenate([answer.token_ids, more.token_ids]),
        np.concatenate([answer.logprobs, more.logprobs]),
        np.concatenate([answer.versions, more.versions]),
        more.finish_reason,
        experts,
    )
