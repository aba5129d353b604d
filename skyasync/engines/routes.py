"""Which engine gets the next request, and when.

Pure: no asyncio, no I/O, no clock. Invariant: nothing is sent to an engine that is dead, nor anything while all are
full; a session stays where it began for as long as that engine lives, and nothing else is sent to a full one; what is
charged for a request is given back when it ends.

The next request goes where it would be done first: to the engine with the fewest outstanding tokens for its speed,
among those whose cache has room for it, where any has. A request's tokens are its prompt and the response as long as
responses have been so far. Speeds are measured (``speeds``), so that an engine twice as fast gets twice the tokens;
while they are alike they count as equal, and the choice does not depend on the clock. An engine that has the prompt in
its cache is a quarter of the prompt ahead: loads differ by so much more at most.

An engine is full when its cache would not hold the request besides what it holds. Of a request that runs that is, in
the mean, its prompt and half of its response; what engines say of their caches corrects the sum (``seen``). An engine
with nothing in flight is never full: a request that is larger than all caches is for it to judge.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from skyasync.engines.protocol import EngineStats, GenerationOutput, GenerationRequest
from skyasync.engines.speeds import Speed, relative

REMEMBERED_SESSIONS = 65_536  # those used last; a conversation between two turns has no request in flight
REMEMBERED_PROMPTS = 8_192  # those used last
CACHED = 0.25  # what a prompt's token that is cached saves: it is computed beside others, unlike one of a response


@dataclass(frozen=True)
class Charge:
    """A request at an engine: what is outstanding of it there, and what it takes of the cache in the mean."""

    engine: int
    tokens: float
    held: float = 0.0


class Routes:
    """Attributes: outstanding: by engine, the tokens charged and not given back. in_flight: the requests. capacity:
    the tokens that the cache of each holds; 0 is not known. dead: engines that get none. gone: those of them that have
    left for good."""

    def __init__(self, engines: int) -> None:
        self.in_flight = [0] * engines
        self.outstanding = [0.0] * engines
        self.capacity = [0] * engines
        self.held = [0.0] * engines  # of the cache, by the charges
        self._unforeseen = [0.0] * engines  # what engines have said that they hold besides
        self._prompts: dict[int, set[int]] = {}  # by a hash: who has it; the one used last at the end
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
        """The engine for a request, or its session's; charged there. None if none lives, or all are full."""
        prompt, most = len(request.prompt_token_ids), request.sampling.max_tokens
        tokens = self.expected(prompt, most)
        held = prompt + (tokens - prompt) / 2 if self._answers else float(prompt)
        ready = [index for index in self.living if not self.full(index, held)]
        if not ready:
            return None
        text = hash(request.prompt_token_ids.tobytes())
        has_it = self._prompts.pop(text, set())
        index = self._first_done(ready, tokens, CACHED * prompt, has_it)
        if request.session_id is not None:
            before = self.sessions.pop(request.session_id, index)
            index = index if before in self.dead else before
            self.sessions[request.session_id] = index
            if len(self.sessions) > REMEMBERED_SESSIONS:
                self.sessions.pop(next(iter(self.sessions)))
        held -= prompt if index in has_it else 0
        self._prompts[text] = has_it | {index}
        if len(self._prompts) > REMEMBERED_PROMPTS:
            self._prompts.pop(next(iter(self._prompts)))
        self._speeds[index].load(self.in_flight[index], now)
        self.in_flight[index] += 1
        self.outstanding[index] += tokens
        self.held[index] += held
        return Charge(index, tokens, held)

    def full(self, index: int, held: float) -> bool:
        """Whether an engine has something to do, and no room for what a request holds."""
        used = max(self.held[index] + self._unforeseen[index], 0.0)
        return bool(self.in_flight[index] and self.capacity[index] and used + held > self.capacity[index])

    def seen(self, index: int, stats: EngineStats) -> None:
        """What an engine says of itself; those that wait in it will take as much as others do."""
        if stats.cache_used is not None and self.in_flight[index]:
            waiting = stats.waiting * self.held[index] / self.in_flight[index]
            self._unforeseen[index] = stats.cache_used + waiting - self.held[index]

    def forget_prompts(self) -> None:
        """New weights: what is cached is of the old ones, and no request finds it."""
        self._prompts.clear()

    def _first_done(self, ready: list[int], tokens: float, saved: float, has_it: Collection[int]) -> int:
        speeds = dict(zip(ready, relative([self._speeds[index] for index in ready]), strict=True))
        with_room = [i for i in ready if self.outstanding[i] + tokens <= (self.capacity[i] or float("inf"))]
        cost = {i: self.outstanding[i] + tokens - (saved if i in has_it else 0.0) for i in ready}
        return min(with_room or ready, key=lambda i: cost[i] / speeds[i])

    def ended(self, charge: Charge, answer: GenerationOutput | None = None, now: float = 0.0) -> None:
        """A request that was sent there is no longer in flight; what it was answered, if it was."""
        index = charge.engine
        self._speeds[index].load(self.in_flight[index], now)
        self.in_flight[index] -= 1
        # Floating point: an idle engine has nothing outstanding, whatever the order of additions.
        self.outstanding[index] = self.outstanding[index] - charge.tokens if self.in_flight[index] else 0.0
        self.held[index] = self.held[index] - charge.held if self.in_flight[index] else 0.0
        if not self.in_flight[index]:
            self._unforeseen[index] = 0.0
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
        self.held.append(0.0)
        self._unforeseen.append(0.0)
        self._speeds.append(Speed())
        return index

    def renew(self, index: int) -> None:
        """Another engine has the place: nothing is known of its speed, and it takes requests."""
        self.dead.discard(index)
        self._speeds[index] = Speed()
        self._unforeseen[index] = 0.0
        for holders in self._prompts.values():
            holders.discard(index)
