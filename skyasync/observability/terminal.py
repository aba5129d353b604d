"""What the user sees while a run goes on: a live panel below, and above it all that anybody prints.

Invariant: nothing that is written to the terminal meanwhile is lost or torn by the panel. Standard output and standard
error lead into a file of the run, for every writer (also libraries in C and other processes). From there whole lines go
to the terminal, above the panel. The terminal is never put into a mode that a killed process would leave on. Without a
terminal each step is one line.

| who waits  | for what            | woken by                                      |
|------------|---------------------|-----------------------------------------------|
| a writer   | nothing: a file     |                                               |
| the panel  | ``update`` or exit  | the driver, which polls the run for its state |
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import IO

from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live
from rich.text import Text

from skyasync.observability.lines import status_line, write_plainly
from skyasync.observability.panel import History, panel
from skyasync.observability.progress import ProgressReport

log = logging.getLogger(__name__)

LEAST = (10, 3)  # columns and lines; a terminal that is smaller gets plain lines


class ScreenConsole(Console):
    """A console on one terminal, whatever has become of the standard streams."""

    def show_cursor(self, show: bool = True) -> bool:
        """It stays: a process that is killed could not bring it back."""
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
        mode: ``auto`` shows the panel on a terminal, ``live`` wherever it is written, ``lines`` nowhere.
        steps: whether there is a line per step; false if a tracker writes it.
        folder: takes what is written to the terminal while the panel is shown; None captures nothing.
    """

    def __init__(
        self, *, mode: str = "auto", console: Console | None = None, folder: Path | None = None, steps: bool = True
    ) -> None:
        self._mode, self._console, self._folder = mode, console or Console(file=sys.stdout), folder
        self._live: Live | None = None
        self._captured: _Captured | None = None
        self._history, self._report = History(), ProgressReport(0, 0)
        self._phase, self._lock = "", threading.RLock()
        self._steps = steps
        self._printed = 0  # the step of the last line
        self.seen = -1

    def __enter__(self) -> ProgressView:
        size, console = self._console.size, self._console
        able = (
            console.is_terminal and not console.is_dumb_terminal and size.width >= LEAST[0] and size.height >= LEAST[1]
        )
        if self._mode == "live" or (self._mode == "auto" and able):
            if self._folder is not None and self._console.file is sys.stdout:
                force = self._mode == "live"
                with suppress(OSError):  # no room for the file: then the panel may be torn
                    self._captured = _Captured(self._folder / "driver.log", force=force)
                    self._console = ScreenConsole(file=self._captured.tty, force_terminal=True if force else None)
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=self._captured is None,
                redirect_stderr=self._captured is None,
            )
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if self._captured is not None:
                self._captured.restore()  # first: whatever happens now, the user's own output is where it belongs
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
                self._print([status_line(self._report.step, self._report.metrics, self._report.total or None)])
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
            elif self.seen < 0 and report.phase != self._phase:  # before the first step there is nothing else to see
                self._print([report.phase])
            self._phase, self._report = report.phase, report

    def _draw(self, report: ProgressReport) -> None:
        """A terminal that is gone, or a panel that cannot be drawn, costs the panel and never the run."""
        assert self._live is not None
        try:
            self._print(self._captured.lines() if self._captured else [])
            if self._live is not None:
                lines = panel(report, self._history, *self._console.size)  # of the terminal as it is now
                self._live.update(Group(*lines), refresh=True)
        except OSError:
            self._lose_terminal()
        except Exception as error:
            if self._captured is not None:
                self._captured.restore()
            self._leave()
            log.warning("the live view ends, the run goes on: %s: %s", type(error).__name__, error)

    def say(self, lines: Sequence[str], error: bool) -> None:
        """What another process has written, from any thread."""
        with self._lock:
            # With captured streams: those that lead to the panel's terminal.
            if self._live is not None and (self._captured is None or (2 if error else 1) in self._captured.streams):
                self._print(lines)
                return
        with suppress(OSError):  # the terminal is gone; the lines are in a file
            write_plainly(lines, error)

    def _print(self, lines: Sequence[str]) -> None:
        try:
            for line in lines:
                if line or self._live is not None:
                    text = Text.from_ansi(line) if self._live is not None else Text(line)
                    self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        except OSError:
            self._lose_terminal()

    def _lose_terminal(self) -> None:
        """It is gone, as with a broken connection: what is written goes on into the file."""
        live, self._live = self._live, None
        if live is not None:
            with suppress(OSError):
                live.stop()


class _Captured:
    """Standard output and error, as far as they are terminals, lead into a file; the terminal is at hand.

    A file and no pipe: a writer never waits for the reader, and the lines before a crash remain.
    """

    def __init__(self, path: Path, *, force: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        sink = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        taken = [number for number in (1, 2) if os.isatty(number) or (force and number == 1)]
        self.streams = {number: os.dup(number) for number in taken}
        raw = os.fdopen(os.dup(1), "wb")
        self.tty: IO[str] = TextIOWrapper(raw, encoding=sys.stdout.encoding or "utf-8", errors="replace")
        self._source = os.open(path, os.O_RDONLY)
        os.lseek(self._source, 0, os.SEEK_END)
        self._torn = b""
        self._flush()
        for number in self.streams:
            os.dup2(sink, number)
        os.close(sink)

    def lines(self) -> list[str]:
        """What has been written since the last call, in whole lines."""
        self._flush()
        while chunk := os.read(self._source, 1 << 16):
            self._torn += chunk
        *whole, self._torn = self._torn.split(b"\n")
        # Each as a terminal would leave it: what follows its last carriage return.
        return [line.decode(errors="replace").rstrip("\r").rpartition("\r")[2] for line in whole]

    def rest(self) -> list[str]:
        """As ``lines``, and the line that was not ended."""
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
            if stream is not None and not getattr(stream, "closed", False):  # the user may have replaced it
                with suppress(OSError):  # a full disk: what is left goes to the terminal later
                    stream.flush()
