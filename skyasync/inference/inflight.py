"""Requests in flight, and answers that are made of several pieces: a request that was cut continues
as a new one.

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
        self._answered: list[InflightRequest] = []
        self._error: TimeoutError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def answer(self, piece: InflightRequest) -> None:
        """Wake the caller: this piece has its result."""
        self._answered.append(piece)
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
        if not self._answered:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        answered = self._answered
        self._answered = []
        return answered

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
    received: list[GenerationOutput] | None = field(
        default_factory=list
    )  # None: some of it may be missing
    result: GenerationOutput | BaseException | None = None
    _end: asyncio.Future[None] | None = None

    @property
    def done(self) -> bool:
        """There is a result, or the caller no longer waits for one."""
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
        received = self.received
        if not received:
            return GenerationOutput(self.request.request_id, finish_reason="abort")
        whole = GenerationOutput(
            self.request.request_id,
            np.concatenate([each.token_ids for each in received]),
            np.concatenate([each.logprobs for each in received]),
            np.concatenate([each.versions for each in received]),
            "abort",
            joined_experts(each.experts for each in received),
        )
        self.received = [whole]  # so that frequent calls join it once
        return whole


class InflightTable(dict[str, InflightRequest]):
    """The requests that wait for an answer, by the ids that the engines know.

    Attributes:
        before: by the caller's id, all earlier pieces of what continues.
        leaving: by engine, ids that were abandoned, and that it may still know.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[str, GenerationOutput] = {}
        self.leaving: defaultdict[int, set[str]] = defaultdict(set)
        self._at: dict[int, dict[str, InflightRequest]] = {}

    def send(self, inflight: InflightRequest, charge: Charge) -> None:
        """From now on the request is at this engine."""
        inflight.charge = charge
        self._at.setdefault(charge.engine, {})[inflight.request.request_id] = inflight

    def __delitem__(self, name: str) -> None:
        charge = self.pop(name).charge
        if charge is not None:
            del self._at[charge.engine][name]

    def at(self, engine: int) -> dict[str, InflightRequest]:
        """A copy, made for every heartbeat: its cost is that of this engine's requests."""
        return dict(self._at.get(engine, ()))

    def receive(
        self,
        before: Mapping[str, InflightRequest],
        progress: Iterable[GenerationOutput],
        leaving: Collection[str] = (),
    ) -> None:
        """Record an engine's progress.

        Args:
            before: the requests that it had when the progress was requested; ``leaving``: the ids
                that were leaving.
        """
        for each in progress:
            request = self.get(each.request_id)
            if request is None:  # answered meanwhile
                continue
            known = before.get(each.request_id)
            new = known is None and each.request_id not in leaving  # it may have started meanwhile
            if (
                known is not request and not new
            ):  # the progress may be that of another request of the same name
                request.received = None
            elif request.received is not None:
                request.received.append(each)

    def so_far(self, request_ids: Collection[str] | None = None) -> dict[str, GenerationOutput]:
        """What is known of these requests (None: of all), by their callers' ids."""
        parts = {
            r.caller_id: r.so_far
            for r in self.values()
            if request_ids is None or r.caller_id in request_ids
        }
        return parts | {
            name: join(before, parts[name]) for name, before in self.before.items() if name in parts
        }


def continuation(request: GenerationRequest, answer: GenerationOutput) -> GenerationRequest:
    """The request for what ``answer`` lacks. With a seed its tokens are those that it would have
    had without a cut; without one a new id gives it a random stream of its own."""
    done = len(answer.token_ids)
    sampling = request.sampling
    return replace(
        request,
        continues=True,
        drawn=done,
        request_id=f"{request.request_id}+{done}",
        prompt_token_ids=np.concatenate([request.prompt_token_ids, answer.token_ids]),
        sampling=replace(
            sampling,
            max_tokens=sampling.max_tokens - done,
            min_tokens=max(sampling.min_tokens - done, 0),
        ),
    )


def join(answer: GenerationOutput, more: GenerationOutput) -> GenerationOutput:
    """Both pieces as one, with the id and the end of the second.

    Experts that both report are those of the first: its tokens were computed with them.
    """
    known = 0 if answer.experts is None else len(answer.experts)
    return GenerationOutput(
        more.request_id,
        np.concatenate([answer.token_ids, more.token_ids]),
        np.concatenate([answer.logprobs, more.logprobs]),
        np.concatenate([answer.versions, more.versions]),
        more.finish_reason,
        joined_experts([answer.experts, None if more.experts is None else more.experts[known:]]),
    )
