"""Which engine gets the next request.

Pure: no asyncio, no I/O, no clock. Invariant: nothing is sent to an engine that is dead; a session stays where it began
for as long as that engine lives; what is charged for a request is given back when it ends.

The next request goes where it would be done first: to the engine with the fewest outstanding tokens for its speed,
among those whose cache has room for it, where any has. A request's tokens are its prompt and the response as long as
responses have been so far. Speeds are measured (``speeds``), so that an engine twice as fast gets twice the tokens;
while they are alike they count as equal, and the choice does not depend on the clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from skyasync.engines.protocol import GenerationOutput, GenerationRequest
from skyasync.engines.speeds import Speed, relative

REMEMBERED_SESSIONS = 65_536  # those used last; a conversation between two turns has no request in flight


@dataclass(frozen=True)
class Charge:
    """A request at an engine: what is outstanding of it there."""

    engine: int
    tokens: float


class Routes:
    """Attributes: outstanding: by engine, the tokens charged and not given back. in_flight: the requests. capacity:
    the tokens that the cache of each holds; 0 is not known. dead: engines that get none. gone: those of them that have
    left for good."""

    def __init__(self, engines: int) -> None:
        self.in_flight = [0] * engines
        self.outstanding = [0.0] * engines
        self.capacity = [0] * engines
        self.dead: set[int] = set()
        self.gone: set[int] = set()
        self.sessions: dict[str, int] = {}  # session -> engine, the one used last at the end
        self._speeds = [Speed() for _ in range(engines)]
        self._answers = self._tokens = 0

    @property
    def living(self) -> list[int]:
        return [index for index in range(len(self.in_flight)) if index not in self.dead]

    def expected(self, prompt: int, most: int) -> float:
        """Tokens of a request: of its prompt, and of its response as far as others say."""
        mean = self._tokens / self._answers if self._answers else most
        return prompt + min(float(most), mean)

    def choose(self, request: GenerationRequest, now: float = 0.0) -> Charge | None:
        """The engine for a request, or its session's; charged there. None if none lives."""
        living = self.living
        if not living:
            return None
        tokens = self.expected(len(request.prompt_token_ids), request.sampling.max_tokens)
        index = self._first_done(living, tokens)
        if request.session_id is not None:
            before = self.sessions.pop(request.session_id, index)
            index = index if before in self.dead else before
            self.sessions[request.session_id] = index
            if len(self.sessions) > REMEMBERED_SESSIONS:
                self.sessions.pop(next(iter(self.sessions)))
        self._speeds[index].load(self.in_flight[index], now)
        self.in_flight[index] += 1
        self.outstanding[index] += tokens
        return Charge(index, tokens)

    def _first_done(self, living: list[int], tokens: float) -> int:
        speeds = dict(zip(living, relative([self._speeds[index] for index in living]), strict=True))
        with_room = [i for i in living if self.outstanding[i] + tokens <= (self.capacity[i] or float("inf"))]
        return min(with_room or living, key=lambda i: (self.outstanding[i] + tokens) / speeds[i])

    def ended(self, charge: Charge, answer: GenerationOutput | None = None, now: float = 0.0) -> None:
        """A request that was sent there is no longer in flight; what it was answered, if it was."""
        index = charge.engine
        self._speeds[index].load(self.in_flight[index], now)
        self.in_flight[index] -= 1
        # Floating point: an idle engine has nothing outstanding, whatever the order of additions.
        self.outstanding[index] = self.outstanding[index] - charge.tokens if self.in_flight[index] else 0.0
        if answer is not None:
            self._speeds[index].gave(len(answer.token_ids))
            if answer.finish_reason != "abort":
                self._answers += 1
                self._tokens += len(answer.token_ids)

    def add(self) -> int:
        """A place for one more engine, which gets nothing until ``renew``."""
        index = len(self.in_flight)
        self.dead.add(index)
        self.in_flight.append(0)
        self.outstanding.append(0.0)
        self.capacity.append(0)
        self._speeds.append(Speed())
        return index

    def renew(self, index: int) -> None:
        """Another engine has the place: nothing is known of its speed, and it takes requests."""
        self.dead.discard(index)
        self._speeds[index] = Speed()
