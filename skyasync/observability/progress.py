"""What is known of a run while it goes on.

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
# a step's duration is averaged over so many: long enough to be calm, short enough to follow a
# change
ETA_STEPS = 20

SHOWN = {*(name for name, _ in FORMATS), "idle/trainer", "idle/engines", "time/step_s"}
#: What the live view shows besides.
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
        """From a record of ``samples.jsonl``."""
        prompt, response = (str(record[name])[:SAMPLE_CHARS] for name in ("prompt", "response"))
        return cls(
            step, prompt, response, nan if record["reward"] is None else float(record["reward"])
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
        """What the run is doing: "starting engines", "training", ..."""
        self._phase = text

    def log(self, metrics: Metrics, step: int) -> None:
        plain = plain_metrics(
            {n: value for n, value in metrics.items() if n in SHOWN or FIGURES.fullmatch(n)}
        )
        self._newest.update(plain)
        shown = {name: value for name, value in plain.items() if name in SHOWN}
        self._rows.setdefault(step, {}).update(shown)
        self._step = max(self._step, step)
        if not self._finished or step > self._finished[-1][0]:
            self._finished.append((step, self._clock()))
        if plain.get("time/step_s") is not None:
            self._recent.append({**plain, "step": float(step)})
            self._limit = limit(summarise(list(self._recent)))

    def warn(self, text: str) -> None:
        """Something was found wrong, and the run continues."""
        self._warnings = self._warnings + 1
        self._warning = text

    def report(self, seen: int = -1) -> ProgressReport:
        """The present state, with the rows of steps after ``seen``; rows up to ``seen`` are
        forgotten."""
        self._rows = {step: row for step, row in self._rows.items() if step > seen}
        rows = [(step, dict(self._rows[step])) for step in sorted(self._rows)]
        now = self._clock()
        eta_s = None
        if len(self._finished) > 1:
            (first, started), (last, ended) = self._finished[0], self._finished[-1]
            eta_s = max(
                0.0, (self.total - last) * (ended - started) / (last - first) - (now - ended)
            )
        return ProgressReport(
            self._step,
            self.total,
            self._phase,
            dict(self._newest),
            rows,
            now - self._started,
            eta_s,
            self._limit,
            self.sample,
            self._warnings,
            self._warning,
        )


class _Warnings(logging.Handler):
    def __init__(self, recorder: ProgressRecorder) -> None:
        super().__init__(logging.INFO)
        self._recorder = recorder

    def emit(self, record: logging.LogRecord) -> None:
        """Prints what no other handler does, as Python prints warnings that have no handler at
        all."""
        try:
            if record.levelno >= logging.WARNING:
                self._recorder.warn(record.getMessage())
            logger: logging.Logger | None = logging.getLogger(record.name)
            while logger is not None and all(handler is self for handler in logger.handlers):
                logger = logger.parent if logger.propagate else None
            if logging.lastResort is not None and logger is None:
                logging.lastResort.handle(record)
        except Exception:
            self.handleError(record)


@contextmanager
def warnings_to(recorder: ProgressRecorder) -> Iterator[None]:
    """Inside the block the library's messages are printed, and the recorder counts its warnings."""
    logger = logging.getLogger("skyasync")
    handler = _Warnings(recorder)
    former = logger.level
    if former == logging.NOTSET:  # else the user has chosen
        logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(former)
