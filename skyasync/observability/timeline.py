"""A trace of what ran when, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Invariant: the file is usable at any moment. It is a JSON array with one event per line and the
comma in front. So every line but the last brackets a valid array, and both viewers accept an array
without its end. Once it is closed, every lane is full from the run's beginning to its end: what is
no work is a span named ``idle``.

``Span`` and ``Lanes`` are pure: how spans that overlap are laid out in rows. ``Timeline`` has the
clock and the file. All times are the timeline's clock, in seconds. The default clock is
``wall_clock``, so that spans measured by other processes of the machine line up; a simulation
passes its virtual clock. Format: "Trace Event Format" (Google, Chromium project), events X and M.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

logger = logging.getLogger(__name__)

IDLE = "idle"  # nothing was done: a span that fills a gap
END = "end"  # the run's processes end, the last figures are written
#: Added to a clock that never steps back; read once, so that all spans have the same offset.
_WALL_MINUS_MONOTONIC = time.time() - time.perf_counter()

Clock = Callable[[], float]
Interval = tuple[float, float]


class Span(NamedTuple):
    """``[start_s, end_s)`` on one track (a trainer, an engine), by a clock that all spans share."""

    name: str
    track: str
    start_s: float
    end_s: float
    step: int | None = None


class Lanes:
    """Rows of one track, with spans in a row disjoint or nested, as trace viewers demand.

    A row remembers its last ``MEMORY`` outermost spans; a span that reaches back further gets
    another row. With the gaps between them, which ``gaps`` tells once nothing can fill them any
    more, a row has no holes.
    """

    MEMORY = 1024  # outermost spans of a row
    SETTLED = 64  # outermost spans of a row after which its gaps are final

    def __init__(self) -> None:
        self._rows: list[list[Interval]] = []  # per row: disjoint outermost spans, ascending
        self._forgotten: list[float] = []  # per row: no span before this time is remembered
        self._reported: list[float] = []  # per row: up to here there is a span or a reported gap

    def place(self, span: Span) -> int:
        """The number of the first row that can take the span; later spans respect it."""
        for number, row in enumerate(self._rows):
            inside = all(
                left >= span.start_s and right <= span.end_s
                for left, right in row[_overlap(row, span)]
            )
            if inside and span.start_s >= self._forgotten[number]:
                break
        else:  # no row can take it
            number = len(self._rows)
            self._rows.append([])
            self._forgotten.append(float("-inf"))
            self._reported.append(float("-inf"))
        row = self._rows[number]
        # Replaces the spans inside it, which are outermost no more.
        row[_overlap(row, span)] = [(span.start_s, span.end_s)]
        if len(row) > self.MEMORY:
            _, end_s = row.pop(0)
            self._forgotten[number] = end_s
        return number

    def gaps(
        self, number: int, since: float, open_since: float, until: float | None = None
    ) -> list[Interval]:
        """The gaps of a row that nothing will fill from here on, each reported once.

        Args:
            since: where the row begins.
            open_since: a span that is not over yet began then.
            until: all gaps up to here are wanted: the row ends.
        """
        row = self._rows[number]
        reported = max(since, self._reported[number])
        gaps = list[Interval]()
        stop = len(row)
        if until is None:
            stop = max(0, len(row) - self.SETTLED)
        settled = 0
        for start, end in row[:stop]:
            # An open span may turn out to lie over this one, in the same row.
            if until is None and end > open_since:
                break
            if start > reported:
                gaps.append((reported, start))
            reported = max(reported, end)
            settled += 1
        del row[:settled]
        if until is not None and until > reported:
            gaps.append((reported, until))
            reported = until
        if settled or until is not None:
            self._reported[number] = reported
            # A later span must not cover a gap that has been reported.
            self._forgotten[number] = max(self._forgotten[number], reported)
        return gaps

    def __len__(self) -> int:
        return len(self._rows)


def _overlap(row: Sequence[Interval], span: Span) -> slice:
    """The disjoint ascending intervals that share more than a border with the span."""
    stop = bisect_left(row, (span.end_s, float("-inf")))
    start = stop
    while start > 0 and row[start - 1][1] > span.start_s:
        start -= 1
    return slice(start, stop)


def wall_clock() -> float:
    """Seconds since 1970 that never step back while the process runs."""
    return _WALL_MINUS_MONOTONIC + time.perf_counter()


class Timeline:
    """Records spans, each as it ends; safe to use from several threads.

    Args:
        path: the trace file; one that exists is continued (a resumed run). None writes nothing.
        clock: seconds; see the module's docstring.
        memory: finished spans kept for ``spans``; older ones are only in the file.
        began: when the run did, by the clock; now by default.
    """

    def __init__(
        self,
        path: Path | str | None,
        *,
        clock: Clock = wall_clock,
        memory: int = 20_000,
        began: float | None = None,
    ) -> None:
        self._clock = clock
        self._began = clock() if began is None else began
        self._recent: deque[Span] = deque(maxlen=memory)
        self._open: dict[int, Span] = {}  # by ticket
        self._tickets = itertools.count()
        self._lock = threading.RLock()
        self._lanes: dict[str, Lanes] = {}  # by track
        self._threads: dict[tuple[str, int], int] = {}  # (track, lane) -> thread id
        self._file: TextIO | None = None
        self._separator = ""  # in front of the next event
        self._part = 1  # process id of the events: a run and its resumptions are parts
        if path is not None:
            self._open_file(Path(path))

    def _open_file(self, path: Path) -> None:
        """Begin the trace, or a new part of it after those of the interrupted run."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else b""
        # Without a torn last line, and without the closing bracket.
        complete = content[: content.rfind(b"\n") + 1].removesuffix(b"]\n")
        old_parts = complete.count(b'"name": "process_name"')
        self._file = path.open("r+" if content else "w", encoding="utf-8")
        self._file.truncate(len(complete) if old_parts else 0)
        self._file.seek(0, 2)
        name = "skyasync"
        if old_parts:
            self._separator = ","
            self._part = old_parts + 1
            name = f"skyasync (resumed, part {self._part})"
        else:
            self._file.write("[\n")
        self._emit({"ph": "M", "name": "process_name", "args": {"name": name}})

    @contextmanager
    def span(
        self, name: str, track: str, step: int | None = None, **args: object
    ) -> Iterator[dict[str, Any]]:
        """Record the time inside ``with``, awaits included.

        Entries of the yielded dict become args. An exception is recorded as ``error`` and raised.
        """
        start = self._clock()
        ticket = next(self._tickets)
        with self._lock:
            self._open[ticket] = Span(
                name,
                track,
                start,
                start,
                step,
            )
        try:
            yield args
        except BaseException as error:
            args["error"] = type(error).__name__
            raise
        finally:
            with self._lock:
                del self._open[ticket]
            self.add_span(
                name,
                track,
                start,
                self._clock(),
                step,
                **args,
            )

    def add_span(
        self,
        name: str,
        track: str,
        start_s: float,
        end_s: float,
        step: int | None = None,
        **args: object,
    ) -> None:
        """Record a span that has ended; spans of a track that overlap are drawn in several lanes."""
        span = Span(
            name,
            track,
            start_s,
            max(start_s, end_s),
            step,
        )
        if step is not None:
            args = {"step": step, **args}
        with self._lock:
            self._recent.append(span)
            lanes = self._lanes.setdefault(track, Lanes())
            lane = lanes.place(span)
            self._emit_span(name, self._thread(track, lane), span.start_s, span.end_s, args)
            open_since = float("inf")
            for open_span in self._open.values():
                if open_span.track == track:
                    open_since = min(open_since, open_span.start_s)
            self._emit_gaps(track, lane, lanes.gaps(lane, self._began, open_since))

    def spans(self) -> list[Span]:
        """The recent spans, and those still open as if they ended now."""
        with self._lock:
            now = self._clock()
            spans = list(self._recent)
            for span in self._open.values():
                spans.append(span._replace(end_s=now))
            return spans

    def now(self) -> float:
        """The timeline's clock."""
        return self._clock()

    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._began

    def close(self) -> None:
        """Fill the gaps and terminate the array; later events stay in memory. Safe to call twice."""
        with self._lock:
            if self._file is not None:
                now = self._clock()
                for track, lanes in self._lanes.items():
                    for lane in range(len(lanes)):
                        gaps = lanes.gaps(lane, self._began, now, until=now)
                        self._emit_gaps(track, lane, gaps)
            if self._file is not None:  # else the disk was full
                with suppress(OSError):
                    self._file.write("]\n")
                    self._file.close()
                self._file = None

    def _emit_gaps(self, track: str, lane: int, gaps: Iterable[Interval]) -> None:
        for start, end in gaps:
            self._emit_span(IDLE, self._thread(track, lane), start, end, {})

    def _emit_span(
        self, name: str, thread: int, start_s: float, end_s: float, args: dict[str, Any]
    ) -> None:
        # Both ends are rounded alike, so that nested spans stay nested.
        event = _span_event(name, _micros(start_s), _micros(end_s))
        self._emit({**event, "tid": thread, "args": args})

    def _thread(self, track: str, lane: int) -> int:
        """The thread id of a lane; its name and place in the picture are written on first use."""
        key = (track, lane)
        if key not in self._threads:
            thread = len(self._threads) + 1
            self._threads[key] = thread
            name = track if lane == 0 else f"{track} ({lane + 1})"
            self._emit({"ph": "M", "name": "thread_name", "tid": thread, "args": {"name": name}})
            # The lanes of a track are neighbours, in the order in which tracks first appeared.
            order = list(self._lanes).index(track) * 1000 + lane
            args = {"sort_index": order}
            self._emit({"ph": "M", "name": "thread_sort_index", "tid": thread, "args": args})
        return self._threads[key]

    def _emit(self, event: Mapping[str, Any]) -> None:
        """One line, on disk when this returns. A full disk ends the trace, not the run."""
        if self._file is None:
            return
        line = _encode({"pid": self._part, "tid": 0, **event})
        try:
            self._file.write(f"{self._separator}{line}\n")
            self._separator = ","
            self._file.flush()
        except OSError as error:
            logger.warning("timeline: no more events are written: %s", error)
            self._file = None


@contextmanager
def to_the_end(path: Path) -> Iterator[None]:
    """Extend the trace to the end of the block (``prolong``), unless the disk refuses."""
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            prolong(path, wall_clock())


def prolong(path: Path, until_s: float) -> None:
    """Fill the lanes of a closed trace's last part, which the trainer has ended, up to a time.

    Args:
        until_s: seconds by the trace's clock.
    """
    part = 0
    full_until = dict[int, int]()  # microseconds, by thread
    line = ""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if '"ph": "X"' in line:
                event = json.loads(line.lstrip(","))
                if event["pid"] > part:
                    part = event["pid"]
                    full_until = {}
                if event["pid"] == part:
                    thread = event["tid"]
                    end = event["ts"] + event["dur"]
                    full_until[thread] = max(full_until.get(thread, 0), end)
    if line != "]\n":  # the run ended without closing it
        return
    until = _micros(until_s)
    text = ""
    for thread, end in full_until.items():
        if end < until:
            event = {"pid": part, "tid": thread, **_span_event(END, end, until), "args": {}}
            text += f",{_encode(event)}\n"
    with path.open("r+", encoding="utf-8") as file:
        file.truncate(path.stat().st_size - len("]\n"))
        file.seek(0, 2)
        file.write(f"{text}]\n")


def _span_event(name: str, start: int, end: int) -> dict[str, Any]:
    """A complete event of the trace format; times in microseconds."""
    return {"ph": "X", "name": name, "ts": start, "dur": end - start}


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


def _encode(event: Mapping[str, Any]) -> str:
    """Strict JSON on one line; args that JSON cannot hold (NaN, objects) are written as text."""
    try:
        return json.dumps(event, allow_nan=False, default=str)
    except (ValueError, TypeError):
        texts = {str(key): str(value) for key, value in event["args"].items()}
        return json.dumps({**event, "args": texts})
