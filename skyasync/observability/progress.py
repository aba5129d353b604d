"""The state of a run while it goes on, from the controller's process to the terminal's.

Training runs in another process than the terminal::

    controller                                   driver
    ProgressRecorder.log / .phase ──▶ report(seen) ──poll──▶ ProgressView.update ──▶ terminal

Invariant: every step is reported once, in order, however rarely the driver polls; a report is plain
data, and what the recorder holds does not grow with the run.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import nan
from typing import Any

from skyasync.observability.lines import FORMATS, Metrics
from skyasync.observability.summary import limit, summarise
from skyasync.observability.trackers import Tracker, plain_metrics

SAMPLE_CHARS = 2000  # of a prompt and of a response: no terminal shows more
#: Steps over which the duration of one is averaged: enough to be calm, few enough to follow changes.
ETA_STEPS = 20

#: Metrics of a step's line.
SHOWN = {name for name, _ in FORMATS} | {"idle/trainer", "idle/engines", "time/step_s"}
#: Metrics that the live view shows in addition.
FIGURES = re.compile(
    r"staleness/max|response/truncated|throughput/samples_per_s|throughput/engine_\d+_tokens_per_s|memory/[a-z_]+|time/.+"
)


@dataclass
class LatestSample:
    """The beginning of a trajectory."""

    step: int
    prompt: str
    response: str
    reward: float

    @classmethod
    def of(cls, step: int, record: Mapping[str, Any]) -> LatestSample:
        """The beginning of a record of ``samples.jsonl``."""
        reward = nan  # a sample that was not graded
        if record["reward"] is not None:
            reward = float(record["reward"])
        return cls(
            step,
            str(record["prompt"])[:SAMPLE_CHARS],
            str(record["response"])[:SAMPLE_CHARS],
            reward,
        )


@dataclass
class ProgressReport:
    """The state of a run at one moment; crosses process borders.

    Args:
        step: the last finished step; 0 before the first.
        metrics: the newest value of each shown metric.
        rows: ``(step, metrics)`` of the steps that the poller has not seen.
        eta_s: seconds to the end; None while unknown.
        limit: what limits the speed in the recent steps.
        warnings: how many there have been; ``warning`` is the last.
    """

    step: int
    total: int
    phase: str = ""
    metrics: dict[str, float | None] = field(default_factory=dict)
    rows: list[tuple[int, dict[str, float | None]]] = field(default_factory=list)
    elapsed_s: float = 0.0
    eta_s: float | None = None
    limit: str = ""
    sample: LatestSample | None = None
    warnings: int = 0
    warning: str = ""


class ProgressRecorder(Tracker):
    """The controller's side: a tracker that remembers what a view needs.

    Args:
        total: steps of the whole run; may be set when it is known.
    """

    def __init__(self, total: int = 0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self._step = 0
        self._clock = clock
        self.sample: LatestSample | None = None
        self._started = clock()
        self._phase = ""
        self._newest: dict[str, float | None] = {}
        self._rows: dict[int, dict[str, float | None]] = {}
        self._finished: deque[tuple[int, float]] = deque(maxlen=ETA_STEPS + 1)
        self._recent: deque[dict[str, float | None]] = deque(maxlen=ETA_STEPS)
        self._limit = ""
        self._warnings = 0
        self._warning = ""

    def resume(self, step: int) -> None:
        """The steps up to this one were finished before."""
        self._step = max(self._step, step)

    def phase(self, text: str) -> None:
        """Set what the run is doing: "starting engines", "training", ..."""
        self._phase = text

    def log(self, metrics: Metrics, step: int) -> None:
        viewed = {}
        for name, value in metrics.items():
            if name in SHOWN or FIGURES.fullmatch(name):
                viewed[name] = value
        plain = plain_metrics(viewed)
        self._newest.update(plain)
        row = self._rows.setdefault(step, {})
        for name, value in plain.items():
            if name in SHOWN:
                row[name] = value
        self._step = max(self._step, step)
        # Several calls may log one step: the first one ends it.
        if not self._finished or step > self._finished[-1][0]:
            self._finished.append((step, self._clock()))
        if plain.get("time/step_s") is not None:
            self._recent.append({**plain, "step": float(step)})
            self._limit = limit(summarise(list(self._recent)))

    def warn(self, text: str) -> None:
        """A warning: something is wrong, and the run continues."""
        self._warnings += 1
        self._warning = text

    def report(self, seen: int = -1) -> ProgressReport:
        """The present state, with the rows of steps after ``seen``; earlier rows are dropped."""
        self._rows = {step: row for step, row in self._rows.items() if step > seen}
        now = self._clock()
        return ProgressReport(
            self._step,
            self.total,
            phase=self._phase,
            # Copies: the recorder may add to its own before the report is sent.
            metrics=dict(self._newest),
            rows=[(step, dict(self._rows[step])) for step in sorted(self._rows)],
            elapsed_s=now - self._started,
            eta_s=self._eta_s(now),
            limit=self._limit,
            sample=self.sample,
            warnings=self._warnings,
            warning=self._warning,
        )

    def _eta_s(self, now: float) -> float | None:
        """Seconds to the end at the speed of the recent steps; None before two have ended."""
        if len(self._finished) < 2:
            return None
        old_step, old_s = self._finished[0]
        new_step, new_s = self._finished[-1]
        left_s = (self.total - new_step) * (new_s - old_s) / (new_step - old_step)
        return max(0.0, left_s - (now - new_s))


class _Warnings(logging.Handler):
    """Passes warnings on to a recorder."""

    def __init__(self, recorder: ProgressRecorder) -> None:
        super().__init__(logging.INFO)
        self._recorder = recorder

    def emit(self, record: logging.LogRecord) -> None:
        """Count a warning; print the record if no other handler does."""
        try:
            if record.levelno >= logging.WARNING:
                self._recorder.warn(record.getMessage())
            # The search of ``Logger.callHandlers``, without this handler.
            logger: logging.Logger | None = logging.getLogger(record.name)
            while logger is not None and all(handler is self for handler in logger.handlers):
                logger = logger.parent if logger.propagate else None
            if logging.lastResort is not None and logger is None:
                logging.lastResort.handle(record)
        except Exception:  # logging must never raise into the code that logs
            self.handleError(record)


@contextmanager
def warnings_to(recorder: ProgressRecorder) -> Iterator[None]:
    """Inside the block the library's messages are printed, and the recorder counts its warnings."""
    logger = logging.getLogger("skyasync")
    handler = _Warnings(recorder)
    former = logger.level
    if former == logging.NOTSET:  # else the user has set a level
        logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(former)
