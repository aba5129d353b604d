"""The time limit of requests: it counts only the time in which their engine makes no progress.

An engine makes progress when it answers a request, or when its number of generated tokens grows.
The number is requested from an engine that has requests, and has answered none for an interval. For
a request without an engine the progress of any engine counts.

Invariant: a request ends within the limit after the latest token of its engine. A report with more
tokens than the report before proves progress only at the time of the report before: the engine may
have stopped right after it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from math import inf

from skyasync.inference.inflight import InflightRequest, InflightTable
from skyasync.inference.pool import EnginePool

CHECKS = 16  # intervals per limit: silence is overestimated by one of them


class TokenReports:
    """The reports of one counter of generated tokens."""

    def __init__(self) -> None:
        self._tokens = inf  # the first report proves nothing
        self._requested_s = 0.0

    def add(self, tokens: float, requested_s: float) -> float:
        """Add a report; returns when the counter still grew, -inf if unknown.

        Args:
            tokens: generated since the engine's start.
            requested_s: event loop time when the report was requested.
        """
        if tokens > self._tokens:
            progress_s = self._requested_s
        else:
            progress_s = -inf
        self._tokens = tokens
        self._requested_s = requested_s
        return progress_s


class ProgressLimit:
    """Ends the wait for requests whose engine makes no progress for ``limit_s``.

    One timer serves all requests; it runs from ``start`` until no request is in flight.

    Args:
        requests: in flight.
        pool: the engines.
    """

    def __init__(self, limit_s: float, requests: InflightTable, pool: EnginePool) -> None:
        self._limit_s = limit_s
        self._requests = requests
        self._pool = pool
        self._progress_s: defaultdict[int, float] = defaultdict(lambda: -inf)  # by engine
        self._reports: defaultdict[int, TokenReports] = defaultdict(TokenReports)
        self._calls: dict[int, asyncio.Task[None]] = {}  # requests for reports, by engine
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the timer for the first request; a second call does nothing."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._limit_s / CHECKS, self._check)

    def stop(self) -> None:
        """Stop the timer: there is no request any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def close(self) -> None:
        self.stop()
        calls = list(self._calls.values())
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def answered(self, engine: int) -> None:
        """This engine has answered a request."""
        self._progress_s[engine] = asyncio.get_running_loop().time()

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        interval_s = self._limit_s / CHECKS
        next_check_s = now + interval_s
        for inflight in list(self._requests.values()):
            if inflight.done:
                continue
            if inflight.charge is None and not self._pool.router.open.any():
                continue  # while all engines sleep, no time counts
            deadline = self._silent_since(inflight) + self._limit_s
            if deadline > now:
                next_check_s = min(next_check_s, deadline)
            else:
                inflight.group.expire(TimeoutError(self._message(inflight)))
        for engine in self._pool.healthy:
            silent = now - self._progress_s[engine] >= interval_s
            if silent and self._pool.router.in_flight[engine] and engine not in self._calls:
                self._calls[engine] = loop.create_task(self._request_report(engine))
        self._timer = loop.call_at(next_check_s, self._check)

    def _silent_since(self, inflight: InflightRequest) -> float:
        """The time of the engine's latest progress, or of the request's start if that is later."""
        if inflight.charge is not None:
            progress_s = self._progress_s[inflight.charge.engine]
        else:
            progress_s = max(self._progress_s.values(), default=-inf)
        return max(inflight.since_s, progress_s)

    def _message(self, inflight: InflightRequest) -> str:
        if inflight.charge is None:
            engines = "all engines"
        else:
            engines = f"engine {inflight.charge.engine}"
        return (
            f"request {inflight.request.request_id} was not answered: {engines} generated nothing for "
            f"{self._limit_s:g} s (generator.request_timeout_s)"
        )

    async def _request_report(self, engine: int) -> None:
        requested_s = asyncio.get_running_loop().time()
        try:
            # The requests of an engine that fails raise its error.
            with contextlib.suppress(Exception):
                call = self._pool.engines[engine].stats()
                answer = await self._pool.ask(engine, call)
                if answer is not None:
                    (stats,) = answer
                    progress_s = self._reports[engine].add(stats.generated_tokens, requested_s)
                    self._progress_s[engine] = max(self._progress_s[engine], progress_s)
        finally:
            del self._calls[engine]
