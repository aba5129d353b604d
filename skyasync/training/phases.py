"""The phases of a step, measured and limited.

Invariant: every phase is a span on the timeline and a metric, under the same name. A phase that waits for other parts
has a time limit. Time is the event loop's, so this holds on virtual time too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from skyasync.observe.timeline import Timeline
from skyasync.together import within

T = TypeVar("T")
Metrics = dict[str, float]


class Phases:
    """What happens now, how long it takes, and how long it may.

    Attributes:
        name: of what the run is doing, for the terminal.
        metrics: of the step in hand.
        step: the step in hand, from 1; 0 before the first.

    Args:
        limit_s: ``trainer.step_timeout_s``.
    """

    def __init__(self, limit_s: float) -> None:
        self.name = "starting"
        self.metrics: Metrics = {}
        self.plan_runs = False  # inside of the trainer's ``running``
        self.attended = False  # inside of ``attended``
        self.step = 0
        self.limit_s = limit_s
        self.timeline = Timeline(None)
        self._began = 0.0
        self._under_way: set[object] = set()
        self._last_s = 0.0  # when a step was under way

    def begin_step(self, step: int) -> None:
        """From here on phases and metrics are those of this step."""
        self.metrics, self.step, self.name, self._began = {}, step, "training", self.now()

    @property
    def step_s(self) -> float:
        """Seconds since the step in hand began."""
        return self.now() - self._began

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Around what is a step's own work."""
        this = object()
        self._under_way.add(this)
        try:
            yield
        finally:
            self._under_way.discard(this)
            self._last_s = self.now()

    def quiet_s(self) -> float:
        """Seconds since a step did something else than wait for another."""
        return 0.0 if self._under_way else self.now() - self._last_s

    async def waiting(self, what: str, awaitable: Awaitable[T]) -> T:
        """Await something another part does, and account for the time as idle (``time/wait_<what>_s``)."""
        with self._span(f"wait_{what}"):
            return await awaitable

    @contextmanager
    def timed(
        self, name: str, into: Metrics | None = None, track: str = "trainer", step: int | None = None
    ) -> Iterator[None]:
        """Measure a phase of a step, by default the one in hand: a span on the timeline and ``time/<name>_s``."""
        with self.under_way(), self._span(name, into, track, step):
            yield

    @contextmanager
    def _span(
        self, name: str, into: Metrics | None = None, track: str = "trainer", step: int | None = None
    ) -> Iterator[None]:
        start, metrics = self.now(), self.metrics if into is None else into
        try:
            with self.timeline.span(name, track, step=self.step if step is None else step):
                yield
        finally:
            metrics[f"time/{name}_s"] = metrics.get(f"time/{name}_s", 0.0) + self.now() - start

    @asynccontextmanager
    async def limited(self, what: str) -> AsyncIterator[None]:
        """What takes longer than ``trainer.step_timeout_s`` is ended.

        Raises:
            TimeoutError: naming the phase, the step and the key.
        """
        async with within(self.limit_s, f"the {what} of step {self.step}"):
            yield

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()
