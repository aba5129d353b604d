"""What the user sees while a run goes on.

Training runs in another process than the terminal::

    controller                                   driver
    ProgressRecorder.log / .phase ──▶ report(seen) ──poll──▶ ProgressView.update ──▶ terminal

Invariant: every step is shown once, in order, however rarely the driver polls; a report is plain data.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from skyasync.observe.lines import FORMATS, Metrics, duration, status_line, words
from skyasync.observe.trackers import plain_metrics

ETA_STEPS = 20  # a step's duration is averaged over so many: long enough to be calm, short enough to follow a change
BARS = "▁▂▃▄▅▆▇█"

SHOWN = {*(name for name, _ in FORMATS), "idle/trainer", "idle/engines", "time/step_s"}


@dataclass
class ProgressReport:
    """The state of a run at one moment; crosses process borders.

    Args:
        step: the last finished step; 0 before the first.
        metrics: the newest value of each shown metric.
        rows: ``(step, metrics)`` of the steps that the poller has not seen.
        eta_s: seconds to the end; None while unknown.
    """

    step: int
    total: int
    phase: str = ""
    metrics: dict[str, float | None] = field(default_factory=dict)
    rows: list[tuple[int, dict[str, float | None]]] = field(default_factory=list)
    elapsed_s: float = 0.0
    eta_s: float | None = None


class ProgressRecorder:
    """The controller's side: a tracker that remembers what a view needs.

    Args:
        total: steps of the whole run; may be set when it is known.
        start: steps finished before this process (a resumed run).
    """

    def __init__(self, total: int = 0, *, start: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self._step, self._clock = total, start, clock
        self._begun = clock()
        self._phase = ""
        self._newest: dict[str, float | None] = {}
        self._rows: dict[int, dict[str, float | None]] = {}
        self._ends: deque[tuple[int, float]] = deque(maxlen=ETA_STEPS + 1)

    def phase(self, text: str) -> None:
        """What the run is doing: "starting engines", "training", ..."""
        self._phase = text

    def log(self, metrics: Metrics, step: int) -> None:
        shown = plain_metrics({name: value for name, value in metrics.items() if name in SHOWN})
        self._newest.update(shown)
        self._rows.setdefault(step, {}).update(shown)
        self._step = max(self._step, step)
        if not self._ends or step > self._ends[-1][0]:
            self._ends.append((step, self._clock()))

    def close(self) -> None:
        """Nothing is held back."""

    def report(self, seen: int = -1) -> ProgressReport:
        """The present state, with the rows of steps after ``seen``; rows up to ``seen`` are forgotten."""
        self._rows = {step: row for step, row in self._rows.items() if step > seen}
        rows = [(step, dict(self._rows[step])) for step in sorted(self._rows)]
        elapsed = self._clock() - self._begun
        return ProgressReport(self._step, self.total, self._phase, dict(self._newest), rows, elapsed, self._eta())

    def _eta(self) -> float | None:
        if len(self._ends) < 2:
            return None
        (first, begun), (last, ended) = self._ends[0], self._ends[-1]
        left = (self.total - last) * (ended - begun) / (last - first)
        return max(0.0, left - (self._clock() - ended))


class ProgressView:
    """The driver's side: a live panel on a terminal, else one line per step.

    ``with ProgressView() as view: view.update(await controller.report(view.seen))``.

    Args:
        live: False gives lines on a terminal too (``trainer.progress=false``).
    """

    def __init__(self, *, live: bool = True, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stdout)
        self._live = Live(console=self._console, auto_refresh=False) if live and self._console.is_terminal else None
        self._rewards: deque[float] = deque(maxlen=40)
        self._best: float | None = None
        self._phase = ""
        self.seen = -1

    def __enter__(self) -> ProgressView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def update(self, report: ProgressReport) -> None:
        """Show the report. Rows that were shown before are left out."""
        fresh = [(step, row) for step, row in report.rows if step > self.seen]
        for step, row in fresh:
            self._remember(row)
            if self._live is None:
                self._print(status_line(step, row, report.total))
            self.seen = step
        if self._live:
            self._live.update(self.render(report), refresh=True)
        elif self.seen < 0 and report.phase != self._phase:  # before the first step there is nothing else to see
            self._print(report.phase)
        self._phase = report.phase

    def render(self, report: ProgressReport) -> Group:
        """Two rows: how far the run is, and how it does."""
        left = "" if report.eta_s is None else f", {duration(report.eta_s)} left"
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(f"step {report.step}/{report.total}", style="bold"),
            ProgressBar(total=max(1, report.total), completed=report.step, width=30),
            Text(f"{duration(report.elapsed_s)}{left}"),
            Text(report.phase, style="dim"),
        )
        figures = Text("  ".join(words(report.metrics)))
        if len(self._rewards) > 1:
            figures.append(f"\nreward {sparkline(list(self._rewards))}", style="cyan")
        if self._best is not None:
            figures.append(f"  best eval {self._best:.2f}", style="green")
        return Group(head, figures)

    def _remember(self, row: Metrics) -> None:
        if (reward := row.get("reward/mean")) is not None:
            self._rewards.append(reward)
        if (score := row.get("eval/score")) is not None:
            self._best = score if self._best is None else max(self._best, score)

    def _print(self, line: str) -> None:
        if line:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def sparkline(values: list[float]) -> str:
    """The values as bars from their lowest to their highest."""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)
