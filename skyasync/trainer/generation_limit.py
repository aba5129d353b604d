"""The time limit of generation and evaluation: only time without new tokens counts.

While there is a limit, the engines' counters of generated tokens are requested in intervals. All
limits share the reports.

Invariant: a limit ends within ``limit_s`` after the engines' latest token (``TokenReports``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from skyasync.inference.progress_limit import CHECKS, TokenReports
from skyasync.observability.usage import EngineStatsSource


class GenerationLimit:
    """Limits of the generations and evaluations that run at the same time.

    Args:
        limit_s: ``trainer.step_timeout_s``.
        engines: whose ``stats`` count the generated tokens.
    """

    def __init__(self, limit_s: float, engines: EngineStatsSource) -> None:
        self._limit_s = limit_s
        self._interval_s = limit_s / CHECKS
        self._engines = engines
        self._timers: set[asyncio.Timeout] = set()
        self._reports = TokenReports()
        self._next_report: asyncio.TimerHandle
        self._report_task: asyncio.Task[None] | None = None  # the latest request

    @asynccontextmanager
    async def limited(self, phase: str) -> AsyncIterator[None]:
        """End the block if the engines generate nothing for ``limit_s``.

        Args:
            phase: for the error.

        Raises:
            TimeoutError: naming the phase and the key.
        """
        try:
            async with asyncio.timeout(self._limit_s) as timer:
                self._add(timer)
                try:
                    yield
                finally:
                    self._remove(timer)
        except TimeoutError as error:
            if not timer.expired():  # raised inside the block
                raise
            raise TimeoutError(
                f"{phase} did not end, and the engines generated nothing within {self._limit_s:g} s "
                f"(trainer.step_timeout_s)"
            ) from error

    def _add(self, timer: asyncio.Timeout) -> None:
        if not self._timers:
            self._reports = TokenReports()
            self._schedule_report()
        self._timers.add(timer)

    def _remove(self, timer: asyncio.Timeout) -> None:
        self._timers.discard(timer)
        if not self._timers:
            self._next_report.cancel()
            if self._report_task is not None:
                self._report_task.cancel()

    def _schedule_report(self) -> None:
        self._next_report = asyncio.get_running_loop().call_later(
            self._interval_s, self._request_report
        )

    def _request_report(self) -> None:
        loop = asyncio.get_running_loop()
        latest_deadline = max(timer.when() or 0.0 for timer in self._timers)
        if latest_deadline > loop.time() + self._interval_s / 2:
            self._report_task = loop.create_task(self._extend())
        else:  # all limits end now
            self._schedule_report()

    async def _extend(self) -> None:
        """Extend all limits if the engines have more tokens than in the previous report."""
        requested_s = asyncio.get_running_loop().time()
        with suppress(Exception):  # requests to an engine that has failed raise its error
            stats = await self._engines.stats()
            tokens = sum(engine.generated_tokens for engine in stats)
            deadline = self._reports.add(tokens, requested_s) + self._limit_s
            for timer in self._timers:
                if not timer.expired():
                    timer.reschedule(max(deadline, timer.when() or 0.0))
        self._schedule_report()
