"""What the user sees while a run goes on: a live panel below, and above it all that anybody prints.

Invariant: nothing that is written to the terminal meanwhile is lost or torn by the panel. Standard
output and standard error lead into a file of the run, for every writer (also libraries in C and
other processes). From there whole lines go to the terminal, above the panel. The terminal is never
put into a mode that a killed process would leave on. Without a terminal each step is one line.
``panel`` is a pure function of the report, the history and the size: no line is longer than the
terminal is wide, none wraps, and what matters least is left out first.

| who waits  | for what            | woken by                                      |
|------------|---------------------|-----------------------------------------------|
| a writer   | nothing: a file     |                                               |
| the panel  | ``update`` or exit  | the driver, which polls the run for its state |
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import IO

from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live
from rich.text import Text

from skyasync.observability.lines import Metrics, duration, status_line, write_plainly
from skyasync.observability.progress import ProgressReport

log = logging.getLogger(__name__)

LEAST = (10, 3)  # columns and lines; a terminal that is smaller gets plain lines


BARS = "▁▂▃▄▅▆▇█"
HOLDERS = ("controller", "workers", "engines", "environments")
LABEL = 8  # columns of a row's name
LEAST_WIDTH = 20  # below it names are left out
FIRST_OUT = (
    "memory",
    "sample",
    "stale",
    "speed",
    "waits",
    "loss",
    "reward",
    "warning",
)  # of a small terminal
_ENGINE = re.compile(r"throughput/engine_(\d+)_tokens_per_s")
NEVER_FULL = 1  # a full last column makes some terminals wrap


@dataclass
class History:
    """The earlier steps' values that a panel shows."""

    rewards: list[float] = field(default_factory=list)
    best: float | None = None
    best_step: int = 0

    def add(self, step: int, row: Metrics) -> None:
        reward = row.get("reward/mean")
        if reward is not None:
            self.rewards = [*self.rewards[-199:], reward]
        score = row.get("eval/score")
        if score is not None and (self.best is None or score > self.best):
            self.best = score
            self.best_step = step


def sparkline(values: Sequence[float]) -> str:
    """The values as bars from their lowest to their highest."""
    low = min(values)
    high = max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


def panel(report: ProgressReport, history: History, width: int, height: int) -> list[Text]:
    """The lines, at most ``height - 1`` of them: the cursor's line of a small terminal is left
    alone."""
    width = max(1, width - NEVER_FULL)
    rows = {"reward": _reward(report.metrics, history, width)}
    rows |= {name: Text(text) for name, text in _rows(report).items()}
    shown = [name for name, text in rows.items() if text.plain]
    for name in FIRST_OUT:
        if len(shown) > max(0, height - 2) and name in shown:
            shown.remove(name)
    lines = [_head(report, width)]
    for name in shown:
        style = "yellow" if name == "warning" else "dim"
        if width >= LEAST_WIDTH:
            label = Text(f"{name:<{LABEL}}", style)
        else:
            label = Text()
        lines.append(Text.assemble(label, rows[name]))
    for line in lines:
        line.no_wrap = True
        line.overflow = "ellipsis"
        line.truncate(width, overflow="ellipsis")
    return lines


def _head(report: ProgressReport, width: int) -> Text:
    """``step 12/80 ━━━━━━────── 0:42, 1:53 left, training``; the bar takes what the words leave."""
    line = Text(
        f"step {report.step}/{report.total}" if report.total else report.phase, style="bold"
    )
    if report.eta_s is None or report.step >= report.total:
        left = ""
    else:
        left = f", {duration(report.eta_s)} left"
    words = f" {duration(report.elapsed_s)}{left}"
    phase = f", {report.phase}" if report.total and report.phase else ""
    free = min(30, width - cell_len(line.plain) - cell_len(words + phase) - 1)
    if report.total and free >= 8:
        done = round(free * min(1.0, report.step / report.total))
        line.append(" ")
        line.append("━" * done, style="green")
        line.append("─" * (free - done), style="dim")
    return line.append(words).append(phase, style="dim")


def _reward(metrics: Metrics, history: History, width: int) -> Text:
    """The mean reward, its course, the score: the course takes what the words leave."""
    value = metrics.get("reward/mean")
    score = metrics.get("eval/score")
    words = [] if value is None else [Text(f"{value:.2f}")]
    if history.best is None:
        best = ""
    else:
        best = f", best {history.best:.2f} at step {history.best_step}"
    if score is None:
        evaluation = []
    else:
        evaluation = [Text(f"eval {score:.2f}{best}", style="green")]
    free = min(60, width - LABEL - sum(cell_len(text.plain) + 2 for text in words + evaluation))
    if len(history.rewards) > 1 and free >= 4:
        words.append(Text(sparkline(history.rewards[-free:]), style="cyan"))
    return Text(" ").join([*words, *evaluation])


def _rows(report: ProgressReport) -> dict[str, str]:
    """Each row's text, empty if nothing is known of it."""
    metrics = report.metrics
    speed = [
        form.format(value)
        for name, form in (
            ("time/step_s", "{:.1f} s/step"),
            ("throughput/samples_per_s", "{:,.0f} samples/s"),
            ("throughput/tokens_per_s", "{:,.0f} tokens/s"),
        )
        if (value := metrics.get(name)) is not None
    ]
    engines = {
        int(match[1]): v
        for name, v in metrics.items()
        if (match := _ENGINE.fullmatch(name)) and v is not None
    }
    if engines and speed:
        speed[-1] += (
            f" (engines {', '.join(f'{engines[number]:,.0f}' for number in sorted(engines))})"
        )
    shares = [(who, metrics.get(f"idle/{who}")) for who in ("trainer", "engines")]
    idle = ", ".join(f"{who} {value:.0%}" for who, value in shares if value is not None)
    if idle:
        waits = [f"{idle} idle", report.limit.partition(":")[0]]
    else:
        waits = []
    stale = []
    value = metrics.get("staleness/mean")
    if value is not None:
        most = metrics.get("staleness/max")
        stale.append(f"{value:.2f} versions" + ("" if most is None else f", at most {most:.0f}"))
    value = metrics.get("response/length_mean")
    if value is not None:
        cut = metrics.get("response/truncated")
        stale.append(f"responses of {value:.1f} tokens" + ("" if not cut else f", {cut:.0%} cut"))
    holders = [
        f"{who} {value:.1f}"
        for who in HOLDERS
        if (value := metrics.get(f"memory/{who}_gib")) is not None
    ]
    memory = ", ".join(holders) + " GiB" if holders else ""
    free = metrics.get("memory/free_gib")
    sample = ""
    if report.sample is not None:
        prompt, response = (
            " ".join(text.split()) for text in (report.sample.prompt, report.sample.response)
        )
        # the question stands at the end
        if cell_len(prompt) <= 40:
            prompt = prompt
        else:
            prompt = f"…{prompt[-39:]}"
        sample = f"{report.sample.reward:.2f}: {prompt} → {response}"
    count = f"({report.warnings}) " if report.warnings > 1 else ""
    losses = (("sft/loss", "{:.3f}"), ("eval/loss", "held-out {:.3f}"))
    return {
        "loss": ", ".join(
            form.format(v) for name, form in losses if (v := metrics.get(name)) is not None
        ),
        "speed": ", ".join(speed),
        "waits": "; ".join(part for part in waits if part),
        "stale": "; ".join(stale),
        "memory": memory + (f"; {free:.1f} GiB free" if free is not None else ""),
        "sample": printable(sample),
        "warning": printable(count + " ".join(report.warning.split())) if report.warnings else "",
    }


def printable(text: str) -> str:
    """Without control characters: a model may generate anything."""
    return "".join(each if each.isprintable() else "·" for each in text)


class ScreenConsole(Console):
    """A console on one terminal, also if the standard streams lead into a file."""

    def show_cursor(self, show: bool = True) -> bool:
        """Never hides the cursor: a killed process could not show it again."""
        return False

    @property
    def size(self) -> ConsoleDimensions:
        """As it is now."""
        try:
            return ConsoleDimensions(*os.get_terminal_size(self.file.fileno()))
        except (OSError, ValueError):
            return super().size

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size


class ProgressView:
    """The driver's side: a live panel on a terminal, else one line per step.

    ``with ProgressView() as view: view.update(await controller.report(view.seen))``.

    Args:
        mode: ``auto`` shows the panel on a terminal, ``live`` wherever it is written, ``lines``
            nowhere.
        steps: whether there is a line per step; false if a tracker writes it.
        folder: takes what is written to the terminal while the panel is shown; None captures
            nothing.
    """

    def __init__(
        self,
        *,
        mode: str = "auto",
        console: Console | None = None,
        folder: Path | None = None,
        steps: bool = True,
    ) -> None:
        self._mode = mode
        self._console = console or Console(file=sys.stdout)
        self._folder = folder
        self._live: Live | None = None
        self._captured: _Captured | None = None
        self._history = History()
        self._report = ProgressReport(0, 0)
        self._phase = ""
        self._lock = threading.RLock()
        self._steps = steps
        self._printed = 0  # the step of the last line
        self.seen = -1

    def __enter__(self) -> ProgressView:
        size = self._console.size
        console = self._console
        able = (
            console.is_terminal
            and not console.is_dumb_terminal
            and size.width >= LEAST[0]
            and size.height >= LEAST[1]
        )
        if self._mode == "live" or (self._mode == "auto" and able):
            if self._folder is not None and self._console.file is sys.stdout:
                force = self._mode == "live"
                with suppress(OSError):  # no room for the file: then the panel may be torn
                    self._captured = _Captured(self._folder / "driver.log", force=force)
                    self._console = ScreenConsole(
                        file=self._captured.tty, force_terminal=True if force else None
                    )
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=self._captured is None,
                redirect_stderr=self._captured is None,
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        try:
            if self._captured is not None:
                # first: whatever happens now, the user's own output is where it belongs
                self._captured.restore()
        finally:
            if self._live is not None:
                with suppress(OSError):  # the terminal is gone
                    self._leave()

    def _leave(self) -> None:
        """The panel goes; what was printed last, and how far the run was, stay as lines."""
        assert self._live is not None
        with self._lock:
            live = self._live
            try:
                if self._captured is not None:
                    self._print(self._captured.rest())
            finally:
                self._live = None
                live.stop()
            if self._steps and self._report.step > self._printed:
                self._print(
                    [
                        status_line(
                            self._report.step, self._report.metrics, self._report.total or None
                        )
                    ]
                )
            if self._captured is not None:
                self._captured.close()

    def update(self, report: ProgressReport) -> None:
        """Show the report. Rows that were shown before are left out."""
        with self._lock:
            fresh = [(step, row) for step, row in report.rows if step > self.seen]
            for step, row in fresh:
                self._history.add(step, row)
                if self._steps and (self._live is None or row.get("eval/score") is not None):
                    self._print([status_line(step, row, report.total)])
                    self._printed = step
                self.seen = step
            if self._live:
                self._draw(report)
            elif (
                self.seen < 0 and report.phase != self._phase
            ):  # before the first step there is nothing else to see
                self._print([report.phase])
            self._phase = report.phase
            self._report = report

    def _draw(self, report: ProgressReport) -> None:
        """Draw the panel. If the terminal is gone or drawing fails, only the panel ends."""
        assert self._live is not None
        try:
            self._print(self._captured.lines() if self._captured else [])
            if self._live is not None:
                lines = panel(
                    report, self._history, *self._console.size
                )  # of the terminal as it is now
                self._live.update(Group(*lines), refresh=True)
        except OSError:
            self._lose_terminal()
        except Exception as error:
            if self._captured is not None:
                self._captured.restore()
            self._leave()
            log.warning(
                "the live view ends, the run continues: %s: %s", type(error).__name__, error
            )

    def say(self, lines: Sequence[str], error: bool) -> None:
        """Show what another process has written; may be called from any thread."""
        with self._lock:
            # With captured streams: those that lead to the panel's terminal.
            if self._live is not None and (
                self._captured is None or (2 if error else 1) in self._captured.streams
            ):
                self._print(lines)
                return
        with suppress(OSError):  # the terminal is gone; the lines are in a file
            write_plainly(lines, error)

    def _print(self, lines: Sequence[str]) -> None:
        try:
            for line in lines:
                if line or self._live is not None:
                    if self._live is not None:
                        text = Text.from_ansi(line)
                    else:
                        text = Text(line)
                    self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        except OSError:
            self._lose_terminal()

    def _lose_terminal(self) -> None:
        """The terminal is gone, as with a broken connection; output continues into the file."""
        live = self._live
        self._live = None
        if live is not None:
            with suppress(OSError):
                live.stop()


class _Captured:
    """Standard output and error, as far as they are terminals, lead into a file; the terminal is at
    hand.

    A file and no pipe: a writer never waits for the reader, and the lines before a crash remain.
    """

    def __init__(self, path: Path, *, force: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        sink = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        taken = [number for number in (1, 2) if os.isatty(number) or (force and number == 1)]
        self.streams = {number: os.dup(number) for number in taken}
        raw = os.fdopen(os.dup(1), "wb")
        self.tty: IO[str] = TextIOWrapper(
            raw, encoding=sys.stdout.encoding or "utf-8", errors="replace"
        )
        self._source = os.open(path, os.O_RDONLY)
        os.lseek(self._source, 0, os.SEEK_END)
        self._torn = b""
        self._flush()
        for number in self.streams:
            os.dup2(sink, number)
        os.close(sink)

    def lines(self) -> list[str]:
        """The whole lines that have been written since the last call."""
        self._flush()
        while chunk := os.read(self._source, 1 << 16):
            self._torn += chunk
        *whole, self._torn = self._torn.split(b"\n")
        # Each as a terminal would leave it: what follows its last carriage return.
        return [line.decode(errors="replace").rstrip("\r").rpartition("\r")[2] for line in whole]

    def rest(self) -> list[str]:
        """As ``lines``, with the unfinished last line."""
        whole = self.lines()
        if not self._torn.strip():
            return whole
        return [*whole, self._torn.decode(errors="replace").rstrip("\r").rpartition("\r")[2]]

    def restore(self) -> None:
        """The streams are the terminal again. Safe to call twice."""
        self._flush()
        for number, before in self.streams.items():
            os.dup2(before, number)

    def close(self) -> None:
        for number in [self._source, *self.streams.values()]:
            os.close(number)
        self.tty.close()

    @staticmethod
    def _flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                with suppress(
                    OSError, ValueError
                ):  # the disk is full, and what is left comes later; or it is closed
                    stream.flush()
