"""The router of requests to engines: which engine gets the next one, and when.

Pure: no asyncio, no I/O, no clock. Invariant: nothing is sent to a failed engine, and nothing while
all are full. A session stays where it began while that engine takes requests; nothing else is sent
to a full engine. ``choose`` charges an engine for a request, and ``ended`` frees the charge.

The next request goes to the engine that would finish it first: the one with the fewest outstanding
tokens for its throughput, among those whose cache has room for it, if any has. A request's tokens
are its prompt and a response of mean length. Throughput is measured, so that an engine twice as
fast gets twice the tokens; engines of about the same throughput count as equal, and the choice then
does not depend on the clock. An engine that has the prompt in its cache saves a quarter of the
prompt.

An engine is full when its cache would not hold the request in addition to what it holds. A running
request holds on average its prompt and half of its response; what engines report of their caches
corrects the sum. An engine with nothing in flight is never full: a request that is larger than all
caches is for the engine to reject. With adaptive concurrency an engine is also full at its limit of
requests in flight, and when it has its share of what is left: a request waits for a fast engine if
the slow one would be the last to finish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from skyasync.inference.interface import EngineStats, GenerationOutput, GenerationRequest

Rates = NDArray[np.float64]

# The least recently used is forgotten. Between two turns a conversation has no request in flight.
REMEMBERED_SESSIONS = 65_536
REMEMBERED_PROMPTS = 8_192
# Work that a cached token of a prompt saves, in tokens of a response: prompts are computed in
# batches, which is cheaper than one token per step.
CACHED = 0.25
MIN_ANSWERS = 32  # before that an engine's throughput is unknown
DECAY = 1 - 1 / 512  # weight of all earlier answers at each new one: about 500 of them count
NOISE = 1.25  # throughputs whose ratio is below count as equal
MAX_RATIO = 16.0  # to the slowest; a higher one means that the slowest hangs


class Throughput:
    """An engine's tokens per second at its usual load, measured while it is loaded.

    Let n requests be in flight for dt seconds each, R = sum n dt (request-seconds) and Q = sum n^2
    dt. Then tokens / R is the rate of one request, and Q / R the load that a request meets. Their
    product is the throughput at that load. A straggler that is computed alone does not make the
    engine slow.
    """

    def __init__(self) -> None:
        self._answers = 0
        self._tokens = self._request_s = self._squared_s = 0.0
        self._since: float | None = None

    def load(self, in_flight: int, now: float) -> None:
        """So many requests were in flight from the last call until now."""
        if self._since is not None:
            elapsed_s = max(now - self._since, 0.0)
        else:
            elapsed_s = 0.0
        self._since = now
        self._request_s += in_flight * elapsed_s
        self._squared_s += in_flight * in_flight * elapsed_s

    def answered(self, tokens: int) -> None:
        self._answers += 1
        self._tokens = DECAY * (self._tokens + tokens)
        self._request_s *= DECAY
        self._squared_s *= DECAY

    @property
    def tokens_per_s(self) -> float | None:
        """None before ``MIN_ANSWERS`` answers."""
        if self._answers < MIN_ANSWERS or self._request_s <= 0 or self._tokens <= 0:
            return None
        return self._tokens * self._squared_s / self._request_s**2


def relative(rates: Rates) -> Rates:
    """Throughputs as multiples of the slowest; all 1 if one is unknown or they are about the same.

    Args:
        rates: ``[engines]`` in tokens/s, 0 if unknown.
    """
    slowest = rates.min()
    if not slowest or rates.max() < NOISE * slowest:
        return np.ones_like(rates)
    return np.minimum(rates / slowest, MAX_RATIO)


class Charge(NamedTuple):
    """A request at an engine: its outstanding tokens, and its tokens in the cache on average."""

    engine: int
    tokens: float
    cache_tokens: float = 0.0


@dataclass
class _Offers:
    """The engines that can take a request of a prompt, and when each would have finished it.

    Args:
        finish: ``[engines]``, outstanding tokens by relative throughput; infinite if the cache
            lacks room for them.
        rates: ``[engines]``, relative throughputs.
    """

    engines: list[int]
    finish: Rates
    rates: Rates

    def best(self) -> int:
        return self.engines[int(self.finish.argmin())]


class Router:
    """A choice costs a few operations on arrays of one number per engine: 20 us with 1,024 engines.

    Attributes:
        in_flight, outstanding: by engine, the requests and tokens that are charged.
        capacity: tokens that an engine's cache holds; infinite if unknown.
        adaptive: the requests in flight are limited by what engines report of their queues.
        limit: of the requests in flight at an engine; infinite without one.
        cache_tokens: of its cache, by the charges; ``unforeseen``: what it has reported in
            addition.
        left: it will not come back. open: it takes requests; not while it sleeps.
        prompts: hash of a prompt -> engines that have it in their cache, least recently used first;
            new weights clear it.
    """

    def __init__(self, engines: int) -> None:
        self.adaptive = False
        self.in_flight = np.zeros(engines, np.int64)
        self.capacity = np.full(engines, np.inf)
        self.limit = np.full(engines, np.inf)
        self._limits = [ConcurrencyLimit() for _ in range(engines)]
        self.outstanding, self.cache_tokens, self.unforeseen = np.zeros((3, engines))
        self.healthy = np.ones(engines, bool)
        self.open = np.ones(engines, bool)
        self.left = np.zeros(engines, bool)
        self._throughput = [Throughput() for _ in range(engines)]
        self._rates = np.zeros(engines)
        self.sessions: dict[str, int] = {}  # session -> engine, least recently used first
        self.prompts: dict[int, set[int]] = {}
        self._answers = self._tokens = 0

    def add(self) -> int:
        """One more engine, which is not healthy before ``renew``; its number is returned."""
        # Each array of the router has an entry per engine: a router of one engine has the new ones.
        for name, initial in vars(Router(1)).items():
            if isinstance(initial, np.ndarray):
                array = getattr(self, name)
                setattr(self, name, np.append(array, initial))
        self._throughput.append(Throughput())
        self._limits.append(ConcurrencyLimit())
        self.healthy[-1] = False
        return len(self.healthy) - 1

    def choose(
        self,
        request: GenerationRequest,
        now: float = 0.0,
        queued: int = 1,
    ) -> Charge | None:
        """The engine for a request, or its session's; None if none is healthy or all are full.

        The request is charged there.

        Args:
            queued: requests that have no engine yet, with this one.
        """
        charges = self.choose_group([request], now, queued)
        if charges:
            return charges[0]
        return None

    def choose_group(
        self,
        requests: Sequence[GenerationRequest],
        now: float = 0.0,
        queued: int = 1,
    ) -> list[Charge]:
        """``choose`` for each of the requests, in order; fewer charges once all engines are full.

        The engines' offers are computed once, and again when one of them is full.

        Args:
            requests: of the same prompt and length.
        """
        sample = requests[0]
        prompt = len(sample.prompt_token_ids)
        response = float(sample.sampling.max_tokens)
        if self._answers:
            response = min(response, self._tokens / self._answers)
        tokens = prompt + response
        cache_tokens = float(prompt)
        if self._answers:  # else no length is known, and half of the largest would be too much
            cache_tokens = prompt + (tokens - prompt) / 2
        key = hash(sample.prompt_token_ids.tobytes())
        charges: list[Charge] = []
        offers: _Offers | None = None
        for request in requests:
            if offers is None:
                offers = self._offers(prompt, tokens, cache_tokens, key, queued - len(charges))
            if not offers.engines:
                break
            index = self._of_session(request.session_id, offers.best())
            is_cached = self._note_prompt(key, index)
            # Samples at one engine share the blocks of their prompt.
            charge = Charge(index, tokens, cache_tokens - (prompt if is_cached else 0))
            self._add(charge, now)
            charges.append(charge)
            if (
                not is_cached
                or index not in offers.engines  # a session's engine may be full
                or self._nearly_full(index, tokens, cache_tokens)
            ):
                offers = None
            else:
                position = offers.engines.index(index)
                offers.finish[position] += tokens / offers.rates[position]
        return charges

    def _offers(
        self,
        prompt: int,
        tokens: float,
        cache_tokens: float,
        key: int,
        queued: int,
    ) -> _Offers:
        """The engines that can take a request; all arrays are ``[engines]``."""
        used_tokens = np.maximum(self.cache_tokens + self.unforeseen, 0.0)
        full = (self.in_flight > 0) & (used_tokens + cache_tokens > self.capacity)
        full |= self.in_flight >= self.limit
        takes = self.healthy & self.open
        if np.isfinite(self.limit[takes]).any():
            # A slow engine takes no more than its share of the tokens that are left.
            rates = relative(self._rates[takes])
            outstanding = self.outstanding[takes]
            share = (outstanding.sum() + queued * tokens) / rates.sum()
            full[takes] |= outstanding > share * rates
        ready = np.flatnonzero(takes & ~full)
        if not len(ready):
            return _Offers([], np.zeros(0), np.zeros(0))
        outstanding = self.outstanding + tokens
        # Before the discount: a cached prompt takes as much of the cache as another one.
        roomy = outstanding[ready] <= self.capacity[ready]
        outstanding[list(self.prompts.get(key, ()))] -= CACHED * prompt
        rates = relative(self._rates[ready])
        finish = outstanding[ready] / rates
        if roomy.any():
            finish[~roomy] = np.inf
        return _Offers(ready.tolist(), finish, rates)

    def _nearly_full(self, index: int, tokens: float, cache_tokens: float) -> bool:
        """Whether an engine's next request of this size could change what the engines offer."""
        if isfinite(self.limit[index]):
            return True
        used_tokens = self.cache_tokens[index] + max(self.unforeseen[index], 0.0)
        needed_tokens = max(used_tokens + cache_tokens, self.outstanding[index] + tokens)
        return bool(needed_tokens > self.capacity[index])

    def _of_session(self, session: str | None, best: int) -> int:
        """The engine where the session began; the best one if it is new or that one is closed."""
        if session is None:
            return best
        index = self.sessions.pop(session, best)
        if not (self.healthy[index] and self.open[index]):
            index = best
        self.sessions[session] = index
        if len(self.sessions) > REMEMBERED_SESSIONS:
            self.sessions.pop(next(iter(self.sessions)))
        return index

    def _note_prompt(self, key: int, index: int) -> bool:
        """Note that the engine has the prompt in its cache; returns whether it had it before."""
        engines = self.prompts.pop(key, set())
        was_cached = index in engines
        engines.add(index)
        self.prompts[key] = engines
        if len(self.prompts) > REMEMBERED_PROMPTS:
            self.prompts.pop(next(iter(self.prompts)))
        return was_cached

    def _add(self, charge: Charge, now: float) -> None:
        index = charge.engine
        self._observe(index, now)
        self.in_flight[index] += 1
        self.outstanding[index] += charge.tokens
        self.cache_tokens[index] += charge.cache_tokens

    def _observe(self, index: int, now: float) -> None:
        throughput = self._throughput[index]
        throughput.load(int(self.in_flight[index]), now)
        self._rates[index] = throughput.tokens_per_s or 0.0

    def reported(self, index: int, stats: EngineStats) -> None:
        """An engine reports its queue and the use of its cache."""
        in_flight = int(self.in_flight[index])
        if self.adaptive:
            self.limit[index] = self._limits[index].observe(stats, in_flight)
        if stats.cache_used is not None and in_flight:
            # Requests that wait in the engine will take as much of the cache as the others.
            waiting_tokens = stats.waiting * self.cache_tokens[index] / in_flight
            self.unforeseen[index] = stats.cache_used + waiting_tokens - self.cache_tokens[index]

    def ended(
        self,
        charge: Charge,
        answer: GenerationOutput | None = None,
        now: float = 0.0,
    ) -> None:
        """A request has left its engine: its charge is free again."""
        index = charge.engine
        throughput = self._throughput[index]
        throughput.load(int(self.in_flight[index]), now)
        self.in_flight[index] -= 1
        if self.in_flight[index]:
            self.outstanding[index] -= charge.tokens
            self.cache_tokens[index] -= charge.cache_tokens
        else:  # exactly 0, whatever the order of additions
            self.outstanding[index] = self.cache_tokens[index] = self.unforeseen[index] = 0.0
        if answer is not None:
            tokens = len(answer.token_ids)
            throughput.answered(tokens)
            if answer.finish_reason != "abort":  # a piece of an answer would make the mean smaller
                self._answers += 1
                self._tokens += tokens
        self._rates[index] = throughput.tokens_per_s or 0.0

    def renew(self, index: int) -> None:
        """A new engine gets this number: its throughput is unknown, and it gets requests."""
        self.healthy[index] = True
        self.open[index] = True
        self.unforeseen[index] = 0.0
        self._throughput[index] = Throughput()
        self._rates[index] = 0.0
        self._limits[index] = ConcurrencyLimit()
        self.limit[index] = np.inf
        for owners in self.prompts.values():
            owners.discard(index)


SETTLED = 3  # reports in a row with a queue, in the last of which not more is running than before
RUNNING_PER_WAITING = 8  # running requests per request that may wait in the engine
GROWTH = 2.0  # factor of a limit at which the engine had no queue
FULL = 0.95  # used fraction of a cache that counts as full


@dataclass
class ConcurrencyLimit:
    """The limit of requests at one engine, by its queue (``generator.adaptive_concurrency``).

    A limit is above what the engine was seen to compute, so no engine has less to do than without a
    limit. What is held back waits in the client, and goes to the first engine with room: a request
    that waits in an engine cannot go to another that has become free. A preempted request waits
    again, so a cache that is too small shows as a queue too; how full it may become is the router's
    decision (``Router.capacity``).

    A limit is set when the engine had a queue in ``SETTLED`` reports and its running requests have
    stopped to grow: requests that have just arrived wait as well. If the queue is gone although the
    limit was reached, the limit grows.

    Source: prime-rl (pull request 3285) limits rollouts by the engines' load, with additive
    increase and multiplicative decrease. Here the running requests measure the capacity, so the
    limit goes there at once.

    Attributes:
        limit: of requests in flight; infinite before the engine has had a queue for a while.
        running: in the latest reports with a queue.
    """

    limit: float = inf
    running: list[int] = field(default_factory=list)

    def observe(self, stats: EngineStats, in_flight: int) -> float:
        """The limit after an engine's report.

        Args:
            in_flight: requests that it has been sent and has not answered.
        """
        if stats.waiting:
            self.running = [*self.running, stats.running][-SETTLED:]
            *earlier_counts, latest = self.running
            peak = max(self.running)
            if len(self.running) == SETTLED and latest <= max(earlier_counts) and peak:
                self.limit = peak + max(peak // RUNNING_PER_WAITING, 1)
            return self.limit
        self.running = []
        used = stats.cache_used
        cache_is_full = used is not None and used >= FULL * stats.cache_tokens > 0
        if in_flight >= self.limit and not cache_is_full:
            # More requests than the limit may have been sent before it was set.
            self.limit = max(self.limit * GROWTH, float(in_flight))
        return self.limit
