"""Which engine gets the next request, and when.

Pure: no asyncio, no I/O, no clock. Invariant: nothing is sent to a failed engine, and nothing while all are full. A
session stays where it began while that engine is healthy; nothing else is sent to a full engine. ``choose`` charges an
engine for a request, and ``ended`` frees the charge.

The next request goes to the engine that would finish it first: the one with the fewest outstanding tokens for its
throughput, among those whose cache has room for it, if any has. A request's tokens are its prompt and a response of
mean length. Throughput is measured, so that an engine twice as fast gets twice the tokens; engines of about the same
throughput count as equal, and the choice then does not depend on the clock. An engine that has the prompt in its cache
saves a quarter of the prompt.

An engine is full when its cache would not hold the request in addition to what it holds. A running request holds on
average its prompt and half of its response; what engines report of their caches corrects the sum. An engine with
nothing in flight is never full: a request that is larger than all caches is for the engine to reject.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from skyasync.inference.interface import EngineStats, GenerationOutput, GenerationRequest

REMEMBERED_SESSIONS = 65_536  # least recently used first out; between two turns a conversation has no request in flight
REMEMBERED_PROMPTS = 8_192
CACHED = 0.25  # what a cached token of a prompt saves: prompts are computed in batches, unlike tokens of a response
MIN_ANSWERS = 32  # before that an engine's throughput is unknown
DECAY = 1 - 1 / 512  # per answer, of all earlier ones
NOISE = 1.25  # throughputs whose ratio is below count as equal
MAX_RATIO = 16.0  # to the slowest; a higher one means that the slowest hangs


class Throughput:
    """An engine's tokens per second at its usual load, measured while it is loaded.

    Let n requests be in flight for dt seconds each, R = sum n dt (request-seconds) and Q = sum n^2 dt. Then tokens / R
    is the rate of one request, and Q / R the load that a request meets. Their product is the throughput at that load.
    A straggler that is computed alone does not make the engine slow.
    """

    def __init__(self) -> None:
        self._answers = 0
        self._tokens = self._request_s = self._squared_s = 0.0
        self._since: float | None = None

    def load(self, in_flight: int, now: float) -> None:
        """So many requests were in flight from the last call until now."""
        passed = max(now - self._since, 0.0) if self._since is not None else 0.0
        self._since = now
        self._request_s += in_flight * passed
        self._squared_s += in_flight * in_flight * passed

    def answered(self, tokens: int) -> None:
        self._answers += 1
        self._tokens = DECAY * (self._tokens + tokens)
        self._request_s *= DECAY
        self._squared_s *= DECAY

    @property
    def tokens_per_s(self) -> float | None:
        """None while too little is known."""
        if self._answers < MIN_ANSWERS or self._request_s <= 0 or self._tokens <= 0:
            return None
        return self._tokens * self._squared_s / self._request_s**2


def relative(throughputs: Sequence[Throughput]) -> list[float]:
    """The slowest is 1; all are 1 while one is unknown, or if they are about the same."""
    known = [rate for each in throughputs if (rate := each.tokens_per_s)]
    if len(known) < len(throughputs) or max(known) < NOISE * min(known):
        return [1.0] * len(throughputs)
    return [min(rate / min(known), MAX_RATIO) for rate in known]


@dataclass(frozen=True)
class Charge:
    """A request at an engine: its outstanding tokens, and what it takes of the cache on average."""

    engine: int
    tokens: float
    cache_tokens: float = 0.0


@dataclass
class EngineLoad:
    """One engine as the router sees it.

    Attributes:
        outstanding: tokens that are charged.
        capacity: tokens that its cache holds; 0 if unknown.
        cache_tokens: of its cache, by the charges; ``unforeseen``: what it has reported in addition.
        left: it will not come back.
    """

    in_flight: int = 0
    outstanding: float = 0.0
    capacity: int = 0
    cache_tokens: float = 0.0
    unforeseen: float = 0.0
    healthy: bool = True
    left: bool = False
    throughput: Throughput = field(default_factory=Throughput)


class Router:
    """Attributes: loads: of the engines, by their numbers. prompts: hash of a prompt -> engines that have it in their
    cache, least recently used first; new weights clear it."""

    def __init__(self, engines: int) -> None:
        self.loads = [EngineLoad() for _ in range(engines)]
        self.sessions: dict[str, int] = {}  # session -> engine, least recently used first
        self.prompts: dict[int, set[int]] = {}
        self._answers = self._tokens = 0

    def choose(self, request: GenerationRequest, now: float = 0.0) -> Charge | None:
        """The engine for a request, or its session's; charged there. None if none is healthy, or all are full."""
        prompt, longest = len(request.prompt_token_ids), float(request.sampling.max_tokens)
        tokens = prompt + (min(longest, self._tokens / self._answers) if self._answers else longest)
        cache_tokens = prompt + (tokens - prompt) / 2 if self._answers else float(prompt)
        ready = []
        for index, load in enumerate(self.loads):
            used = max(load.cache_tokens + load.unforeseen, 0.0)
            full = load.in_flight and load.capacity and used + cache_tokens > load.capacity
            if load.healthy and not full:
                ready.append(index)
        if not ready:
            return None
        key = hash(request.prompt_token_ids.tobytes())
        cached_at = self.prompts.pop(key, set())
        rates = dict(zip(ready, relative([self.loads[index].throughput for index in ready]), strict=True))
        after = {index: self.loads[index].outstanding + tokens for index in ready}
        roomy = [index for index in ready if after[index] <= (self.loads[index].capacity or float("inf"))]
        saved = CACHED * prompt
        index = min(roomy or ready, key=lambda i: (after[i] - (saved if i in cached_at else 0.0)) / rates[i])
        if request.session_id is not None:
            before = self.sessions.pop(request.session_id, index)
            index = before if self.loads[before].healthy else index
            self.sessions[request.session_id] = index
            if len(self.sessions) > REMEMBERED_SESSIONS:
                self.sessions.pop(next(iter(self.sessions)))
        cache_tokens -= prompt if index in cached_at else 0
        self.prompts[key] = cached_at | {index}
        if len(self.prompts) > REMEMBERED_PROMPTS:
            self.prompts.pop(next(iter(self.prompts)))
        load = self.loads[index]
        load.throughput.load(load.in_flight, now)
        load.in_flight += 1
        load.outstanding += tokens
        load.cache_tokens += cache_tokens
        return Charge(index, tokens, cache_tokens)

    def reported(self, index: int, stats: EngineStats) -> None:
        """An engine's own account of its cache; requests that wait in it will take as much as others do."""
        load = self.loads[index]
        if stats.cache_used is not None and load.in_flight:
            waiting = stats.waiting * load.cache_tokens / load.in_flight
            load.unforeseen = stats.cache_used + waiting - load.cache_tokens

    def ended(self, charge: Charge, answer: GenerationOutput | None = None, now: float = 0.0) -> None:
        """A request has left its engine: its charge is free again."""
        load = self.loads[charge.engine]
        load.throughput.load(load.in_flight, now)
        load.in_flight -= 1
        if load.in_flight:
            load.outstanding -= charge.tokens
            load.cache_tokens -= charge.cache_tokens
        else:  # exactly 0, whatever the order of additions
            load.outstanding = load.cache_tokens = load.unforeseen = 0.0
        if answer is not None:
            load.throughput.answered(len(answer.token_ids))
            if answer.finish_reason != "abort":
                self._answers += 1
                self._tokens += len(answer.token_ids)

    def renew(self, index: int) -> None:
        """Another engine takes the place: its throughput is unknown, and it gets requests."""
        load = self.loads[index]
        load.healthy, load.throughput, load.unforeseen = True, Throughput(), 0.0
        for owners in self.prompts.values():
            owners.discard(index)
