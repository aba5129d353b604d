"""The phases of a step, measured and limited.

Invariant: every phase is a span on the timeline and a metric, under the same name, and none that other parts decide
the end of goes on for ever. Time is that of the event loop, so this holds on virtual time too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from skyasync.observe.timeline import Timeline

T = TypeVar("T")
Metrics = dict[str, float]


class Phases:
    """What ``RayPPOTrainer`` inherits for its steps to be made of."""

    cfg: Any
    timeline: Timeline
    _metrics: Metrics
    _step: int

    async def waiting(self, what: str, awaitable: Awaitable[T]) -> T:
        """Await something another part does, and account for the time as idle (``time/wait_<what>_s``)."""
        with self.timed(f"wait_{what}", self._metrics):
            return await awaitable

    @contextmanager
    def timed(self, name: str, into: Metrics, track: str = "trainer", step: int | None = None) -> Iterator[None]:
        """Measure a phase of a step, by default the current one: a span on the timeline and ``time/<name>_s``."""
        start = self._now()
        try:
            with self.timeline.span(name, track, step=self._step if step is None else step):
                yield
        finally:
            into[f"time/{name}_s"] = into.get(f"time/{name}_s", 0.0) + self._now() - start

    @asynccontextmanager
    async def _limited(self, what: str) -> AsyncIterator[None]:
        limit_s = self.cfg.trainer.step_timeout_s
        try:
            async with asyncio.timeout(limit_s) as timer:
                yield
        except TimeoutError as error:
            if not timer.expired():
                raise
            raise TimeoutError(
                f"the {what} of step {self._step} did not end within {limit_s:g} s (trainer.step_timeout_s)"
            ) from error

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
