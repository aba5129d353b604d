"""The terminal while a run goes on: a live panel below, and above it all that is printed.

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
from collections.abc import Iterable, Sequence
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
from skyasync.observability.progress import LatestSample, ProgressReport

log = logging.getLogger(__name__)

LEAST = (10, 3)  # columns and lines; a terminal that is smaller gets plain lines


BARS = "▁▂▃▄▅▆▇█"
HOLDERS = ("controller", "workers", "engines", "environments")
LABEL = 8  # columns of a row's name
LEAST_WIDTH = 20  # columns; below it names are left out
QUESTION = 40  # columns of a prompt, as a response is what the reader looks for
REWARDS = 200  # steps in the sparkline, more than its columns
#: Rows that a small terminal leaves out, in this order: what matters least is first.
FIRST_OUT = ("memory", "sample", "stale", "speed", "waits", "loss", "reward", "warning")
SPEEDS = (
    ("time/step_s", "{:.1f} s/step"),
    ("throughput/samples_per_s", "{:,.0f} samples/s"),
    ("throughput/tokens_per_s", "{:,.0f} tokens/s"),
)
LOSSES = (("sft/loss", "{:.3f}"), ("eval/loss", "held-out {:.3f}"))
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
            self.rewards = [*self.rewards, reward][-REWARDS:]
        score = row.get("eval/score")
        if score is not None and (self.best is None or score > self.best):
            self.best = score
            self.best_step = step


def sparkline(values: Sequence[float]) -> str:
    """The values as bars from their lowest to their highest."""
    low = min(values)
    high = max(values)
    scale = 0.0  # equal values are all lowest bars
    if high > low:
        scale = (len(BARS) - 1) / (high - low)
    return "".join(BARS[round((value - low) * scale)] for value in values)


def panel(report: ProgressReport, history: History, width: int, height: int) -> list[Text]:
    """The lines: at most ``height - 1``, as the cursor needs a line of a small terminal."""
    width = max(1, width - NEVER_FULL)
    rows = {"reward": _reward(report.metrics, history, width)}
    for name, text in _rows(report).items():
        rows[name] = Text(text)
    shown = [name for name, row in rows.items() if row.plain]
    for name in FIRST_OUT:
        if len(shown) > max(0, height - 2) and name in shown:
            shown.remove(name)
    lines = [_head(report, width)]
    for name in shown:
        style = "yellow" if name == "warning" else "dim"
        line = Text()
        if width >= LEAST_WIDTH:
            line.append(f"{name:<{LABEL}}", style)
        lines.append(line.append_text(rows[name]))
    for line in lines:
        line.no_wrap = True
        line.overflow = "ellipsis"
        line.truncate(width, overflow="ellipsis")
    return lines


def _head(report: ProgressReport, width: int) -> Text:
    """``step 12/80 ━━━━━━────── 0:42, 1:53 left, training``; the bar takes what the words leave."""
    title = report.phase
    phase = ""
    if report.total:
        title = f"step {report.step}/{report.total}"
        phase = f", {report.phase}" if report.phase else ""
    words = f" {duration(report.elapsed_s)}"
    if report.eta_s is not None and report.step < report.total:
        words += f", {duration(report.eta_s)} left"
    line = Text(title, style="bold")
    free = min(30, width - cell_len(title) - cell_len(words + phase) - 1)
    if report.total and free >= 8:  # a shorter bar shows no progress
        done = round(free * min(1.0, report.step / report.total))
        line.append(" ")
        line.append("━" * done, style="green")
        line.append("─" * (free - done), style="dim")
    line.append(words)
    line.append(phase, style="dim")
    return line


def _reward(metrics: Metrics, history: History, width: int) -> Text:
    """The mean reward, its course, the score: the course takes what the words leave."""
    words = []
    reward = metrics.get("reward/mean")
    if reward is not None:
        words.append(Text(f"{reward:.2f}"))
    score = metrics.get("eval/score")
    if score is not None:
        evaluation = f"eval {score:.2f}"
        if history.best is not None:
            evaluation += f", best {history.best:.2f} at step {history.best_step}"
        words.append(Text(evaluation, style="green"))
    free = min(60, width - LABEL - sum(cell_len(text.plain) + 2 for text in words))
    if len(history.rewards) > 1 and free >= 4:
        rewards = Text(sparkline(history.rewards[-free:]), style="cyan")
        # After the reward, in front of the evaluation.
        words.insert(0 if reward is None else 1, rewards)
    return Text(" ").join(words)


def _rows(report: ProgressReport) -> dict[str, str]:
    """The text of each row by its name, "" if there is nothing to show."""
    return {
        "loss": ", ".join(_figures(report.metrics, LOSSES)),
        "speed": _speed(report.metrics),
        "waits": _waits(report),
        "stale": _staleness(report.metrics),
        "memory": _memory(report.metrics),
        "sample": printable(_sample(report.sample)),
        "warning": printable(_warning(report)),
    }


def _figures(metrics: Metrics, formats: Iterable[tuple[str, str]]) -> list[str]:
    """The metrics that have a value, as text."""
    figures = []
    for name, form in formats:
        value = metrics.get(name)
        if value is not None:
            figures.append(form.format(value))
    return figures


def _speed(metrics: Metrics) -> str:
    speeds = ", ".join(_figures(metrics, SPEEDS))
    engine_speeds: dict[int, float] = {}
    for name, value in metrics.items():
        match = _ENGINE.fullmatch(name)
        if match and value is not None:
            engine_speeds[int(match[1])] = value
    if speeds and engine_speeds:
        engines = ", ".join(f"{engine_speeds[number]:,.0f}" for number in sorted(engine_speeds))
        speeds += f" (engines {engines})"
    return speeds


def _waits(report: ProgressReport) -> str:
    """The idle shares, and the limit of the speed without its figures."""
    formats = (("idle/trainer", "trainer {:.0%}"), ("idle/engines", "engines {:.0%}"))
    idle = ", ".join(_figures(report.metrics, formats))
    if not idle:
        return ""
    limit = report.limit.partition(":")[0]
    if limit:
        return f"{idle} idle; {limit}"
    return f"{idle} idle"


def _staleness(metrics: Metrics) -> str:
    """The staleness and the lengths of the responses, which are its main cause."""
    texts = []
    staleness = metrics.get("staleness/mean")
    if staleness is not None:
        text = f"{staleness:.2f} versions"
        largest = metrics.get("staleness/max")
        if largest is not None:
            text += f", at most {largest:.0f}"
        texts.append(text)
    length = metrics.get("response/length_mean")
    if length is not None:
        text = f"responses of {length:.1f} tokens"
        truncated = metrics.get("response/truncated")
        if truncated:
            text += f", {truncated:.0%} cut"
        texts.append(text)
    return "; ".join(texts)


def _memory(metrics: Metrics) -> str:
    formats = [(f"memory/{holder}_gib", f"{holder} {{:.1f}}") for holder in HOLDERS]
    memory = ", ".join(_figures(metrics, formats))
    if memory:
        memory += " GiB"
    free = metrics.get("memory/free_gib")
    if free is not None:
        memory += f"; {free:.1f} GiB free"
    return memory


def _sample(sample: LatestSample | None) -> str:
    if sample is None:
        return ""
    prompt = " ".join(sample.prompt.split())
    response = " ".join(sample.response.split())
    if cell_len(prompt) > QUESTION:
        prompt = f"…{prompt[1 - QUESTION :]}"  # the question stands at the end
    return f"{sample.reward:.2f}: {prompt} → {response}"


def _warning(report: ProgressReport) -> str:
    """The newest warning on one line, with the number of warnings if there are several."""
    if not report.warnings:
        return ""
    warning = " ".join(report.warning.split())
    if report.warnings > 1:
        return f"({report.warnings}) {warning}"
    return warning


def printable(text: str) -> str:
    """Without control characters: a model may generate anything."""
    return "".join(letter if letter.isprintable() else "·" for letter in text)


class ScreenConsole(Console):
    """A console on one terminal, also if the standard streams lead into a file."""

    def show_cursor(self, show: bool = True) -> bool:
        """Never hides the cursor: a killed process could not show it again."""
        return False

    @property
    def size(self) -> ConsoleDimensions:
        """The size now: the user may have resized the terminal."""
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
        if self._mode == "live" or (self._mode == "auto" and self._fits_terminal()):
            if self._folder is not None and self._console.file is sys.stdout:
                force = self._mode == "live"
                with suppress(OSError):  # no room for the file: then the panel may be torn
                    self._captured = _Captured(self._folder / "driver.log", force=force)
                    self._console = ScreenConsole(
                        file=self._captured.tty, force_terminal=True if force else None
                    )
            self._live = Live(
                console=self._console,
                auto_refresh=False,  # only ``update`` draws, under its lock
                transient=True,
                # Streams that are captured already lead into the file.
                redirect_stdout=self._captured is None,
                redirect_stderr=self._captured is None,
            )
            self._live.start()
        return self

    def _fits_terminal(self) -> bool:
        """Whether standard output is a terminal with room for a panel."""
        console = self._console
        if not console.is_terminal or console.is_dumb_terminal:
            return False
        columns, lines = LEAST
        return console.size.width >= columns and console.size.height >= lines

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        try:
            # Restored before the panel ends, which may fail: the user's output then reaches the
            # terminal all the same.
            if self._captured is not None:
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
            report = self._report
            if self._steps and report.step > self._printed:
                self._print([status_line(report.step, report.metrics, report.total or None)])
            if self._captured is not None:
                self._captured.close()

    def update(self, report: ProgressReport) -> None:
        """Show the report. Rows that were shown before are left out."""
        with self._lock:
            for step, row in report.rows:
                if step <= self.seen:
                    continue
                self._history.add(step, row)
                # Above a panel only evaluations stay as lines: the panel shows the steps.
                if self._steps and (self._live is None or row.get("eval/score") is not None):
                    self._print([status_line(step, row, report.total)])
                    self._printed = step
                self.seen = step
            if self._live:
                self._draw(report)
            elif self.seen < 0 and report.phase != self._phase:
                # Before the first step there is nothing else to see.
                self._print([report.phase])
            self._phase = report.phase
            self._report = report

    def _draw(self, report: ProgressReport) -> None:
        """Draw the panel. If the terminal is gone or drawing fails, only the panel ends."""
        assert self._live is not None
        try:
            if self._captured is not None:
                self._print(self._captured.lines())
            if self._live is not None:  # else printing has lost the terminal
                width, height = self._console.size  # now: the user may have resized the terminal
                lines = panel(report, self._history, width, height)
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
        stream = 2 if error else 1
        with self._lock:
            # A captured stream is one that led to the panel's terminal.
            if self._live is not None and (
                self._captured is None or stream in self._captured.streams
            ):
                self._print(lines)
                return
        with suppress(OSError):  # the terminal is gone; the lines are in a file
            write_plainly(lines, error)

    def _print(self, lines: Sequence[str]) -> None:
        try:
            for line in lines:
                # Above a panel stands what was captured: with colours, and empty lines as written.
                if self._live is not None:
                    text = Text.from_ansi(line)
                elif line:
                    text = Text(line)
                else:
                    continue
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
    """Leads standard output and error into a file, if they are terminals; ``tty`` is the terminal.

    A file and no pipe: a writer never waits for the reader, and the lines before a crash remain.
    """

    def __init__(self, path: Path, *, force: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        sink = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.streams: dict[int, int] = {}  # stream -> a descriptor of what it was
        for number in (1, 2):
            if os.isatty(number) or (force and number == 1):
                self.streams[number] = os.dup(number)
        raw = os.fdopen(os.dup(1), "wb")
        self.tty: IO[str] = TextIOWrapper(
            raw, encoding=sys.stdout.encoding or "utf-8", errors="replace"
        )
        self._source = os.open(path, os.O_RDONLY)
        os.lseek(self._source, 0, os.SEEK_END)
        self._torn = b""
        self._flush()  # what was written until now belongs to the terminal
        for number in self.streams:
            os.dup2(sink, number)
        os.close(sink)

    def lines(self) -> list[str]:
        """The whole lines that have been written since the last call."""
        self._flush()
        while chunk := os.read(self._source, 1 << 16):
            self._torn += chunk
        *complete, self._torn = self._torn.split(b"\n")
        return [self._as_shown(line) for line in complete]

    def rest(self) -> list[str]:
        """Lines as those of ``lines``, with the unfinished last one."""
        lines = self.lines()
        if self._torn.strip():
            lines.append(self._as_shown(self._torn))
        return lines

    @staticmethod
    def _as_shown(line: bytes) -> str:
        """The line as a terminal would leave it: the text after its last carriage return."""
        text = line.decode(errors="replace").rstrip("\r")
        return text.rpartition("\r")[2]

    def restore(self) -> None:
        """The streams are the terminal again. Safe to call twice."""
        self._flush()
        for number, terminal in self.streams.items():
            os.dup2(terminal, number)

    def close(self) -> None:
        for number in [self._source, *self.streams.values()]:
            os.close(number)
        self.tty.close()

    @staticmethod
    def _flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                # The disk is full, and the rest comes later; or the stream is closed.
                with suppress(OSError, ValueError):
                    stream.flush()
