"""How many requests an engine gets at once, by its queue (``generator.adaptive_concurrency``).

Pure: no asyncio, no I/O, no clock. Invariant: a limit is above what the engine was seen to compute, so no engine has
less to do than without a limit. What is held back waits in the client, and goes to the first engine with room.

A request that waits in an engine cannot go to another that has become free. With a limit that follows the engine's
capacity it waits where it can still be routed. A preempted request waits again, so a cache that is too small shows as a
queue too; how full it may become is the router's decision (``Router.capacity``).

Source: prime-rl (pull request 3285) limits rollouts by the engines' load, with additive increase and multiplicative
decrease. Here the running requests measure the capacity, so the limit goes there at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from skyasync.inference.interface import EngineStats

SETTLED = 3  # reports in a row with a queue, in the last of which not more is running than before
RUNNING_PER_WAITING = 8  # running requests per request that may wait in the engine
GROWTH = 2.0  # of a limit at which the engine had no queue
FULL = 0.95  # of the cache


@dataclass
class ConcurrencyLimit:
    """Requests in flight at one engine; a pure state machine.

    A limit is set when the engine had a queue in ``SETTLED`` reports and its running requests have stopped to grow:
    requests that have just arrived wait as well. If the queue is gone although the limit was reached, the limit grows.

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
            *before, now = self.running
            most = max(self.running)
            if len(self.running) == SETTLED and now <= max(before) and most:
                self.limit = most + max(most // RUNNING_PER_WAITING, 1)
            return self.limit
        self.running = []
        cache_is_full = stats.cache_used is not None and stats.cache_used >= FULL * stats.cache_tokens > 0
        if in_flight >= self.limit and not cache_is_full:
            self.limit *= GROWTH
        return self.limit
