"""Answers that are made of several pieces: a request that was ended early goes on as a new one.

Invariant: the pieces joined are what one engine would have given, had nothing come between: no token is lost or twice,
and a stop string ends the response wherever it lies. One that begins in one piece and ends in the next is seen by no
engine: it is found here, and what was made behind it is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from skyasync.arrays import joined_experts
from skyasync.engines.protocol import GenerationOutput, GenerationRequest
from skyasync.engines.routes import Charge
from skyasync.errors import UserError

if TYPE_CHECKING:
    from skyasync.engines.stop_strings import StopStrings


@dataclass(eq=False)
class Piece:
    """A request at an engine.

    Args:
        caller_id: the id of the request that it belongs to.

    Attributes:
        charge: where it is; None while it waits for an engine.
    """

    request: GenerationRequest
    caller_id: str
    future: asyncio.Future[GenerationOutput]
    charge: Charge | None = None
    _news: list[GenerationOutput] | None = field(default_factory=list)  # None: there is a hole in them

    @property
    def engine(self) -> int | None:
        return self.charge.engine if self.charge else None

    @property
    def abandoned(self) -> bool:
        """Whoever asked waits no more, and there is no answer."""
        return not self.future.done() or self.future.cancelled()

    @property
    def answer(self) -> GenerationOutput | None:
        """None where there is none, or an error."""
        return None if self.abandoned or self.future.exception() else self.future.result()

    def hear(self, news: GenerationOutput) -> None:
        """What the engine tells of it, each token once and in order."""
        if self._news is not None:
            self._news.append(news)

    def forget(self) -> None:
        """News may have been missed: nothing is known of it."""
        self._news = None

    @property
    def so_far(self) -> GenerationOutput:
        """The answer as if it had been ended with what is known of it."""
        news = self._news or []
        if not news:
            return GenerationOutput(self.request.request_id, finish_reason="abort")
        whole = GenerationOutput(
            self.request.request_id,
            np.concatenate([each.token_ids for each in news]),
            np.concatenate([each.logprobs for each in news]),
            np.concatenate([each.versions for each in news]),
            "abort",
            joined_experts(each.experts for each in news),
        )
        self._news = [whole]  # who asks often has it joined once
        return whole


class Unanswered(dict[str, Piece]):
    """The pieces that wait for an answer, by the ids that the engines know.

    Attributes:
        before: by the caller's id, all earlier pieces of what goes on.
        leaving: ids that nobody waits for any more, and that their engine may still know.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[str, GenerationOutput] = {}
        self.leaving: set[str] = set()

    def at(self, engine: int) -> dict[str, Piece]:
        return {name: piece for name, piece in self.items() if piece.engine == engine}

    def hear(self, asked: Mapping[str, Piece], news: Iterable[GenerationOutput], leaving: Collection[str] = ()) -> None:
        """An engine's news; ``asked`` and ``leaving``: what it had when it was asked for them."""
        for each in news:
            piece = self.get(each.request_id)
            if piece is None:  # answered meanwhile
                continue
            known = asked.get(each.request_id)
            if known is piece or (known is None and each.request_id not in leaving):  # it may have begun meanwhile
                piece.hear(each)
            else:  # they may be those of another one of the same name
                piece.forget()

    def so_far(self, wanted: Collection[str] | None = None) -> dict[str, GenerationOutput]:
        """What is known of every request, or of those wanted, by its caller's id."""
        found = {p.caller_id: p.so_far for p in self.values() if wanted is None or p.caller_id in wanted}
        return found | {name: join(before, found[name]) for name, before in self.before.items() if name in found}


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
            seed=None if sampling.seed is None else hash((sampling.seed, done)) % 2**62,
        ),
    )


def join(answer: GenerationOutput, more: GenerationOutput) -> GenerationOutput:
    """Both pieces as one, under the id and with the end of the second.

    Of experts the first says what it knows: it is what its tokens were computed with.
    """
    again = 0 if answer.experts is None else len(answer.experts)
    return GenerationOutput(
        more.request_id,
        np.concatenate([answer.token_ids, more.token_ids]),
        np.concatenate([answer.logprobs, more.logprobs]),
        np.concatenate([answer.versions, more.versions]),
        more.finish_reason,
        joined_experts([answer.experts, None if more.experts is None else more.experts[again:]]),
    )


class Ends:
    """Finds the stop strings that span pieces.

    Args:
        tokenizer: gives the model's.
    """

    def __init__(self, tokenizer: Callable[[], Any] | None) -> None:
        self.tokenizer = tokenizer

    def of(self, request: GenerationRequest, answer: GenerationOutput, seen: int) -> GenerationOutput:
        """The answer up to the first stop string that ends behind its ``seen`` tokens."""
        sampling = request.sampling
        if not sampling.stop:
            return answer
        tokens: Sequence[int] = answer.token_ids.tolist()
        stops = self._stops(request)
        for count in range(max(seen, sampling.min_tokens) + 1, len(tokens) + 1):
            if stops.completed_by_last(tokens[:count]):
                return answer.until(count, "stop")
        return answer

    def _stops(self, request: GenerationRequest) -> StopStrings:
        from skyasync.engines.stop_strings import StopStrings

        if self.tokenizer is None:
            raise UserError(
                f"request {request.request_id} has stop strings and was cut by a weight sync or an engine's death: the "
                f"inference client needs the model's tokenizer to find one that spans the cut, or set "
                f"trainer.partial_rollout=keep and generator.max_engine_restarts=0"
            )
        return StopStrings(self.tokenizer(), request.sampling.stop, request.sampling.skip_special_tokens)
