"""Intervals of work on named tracks: what share of the time a track was busy, and how to draw overlaps.

Invariant: pure functions of the spans given; no clock, no file. Busy and idle shares are in [0, 1] and add up
to 1, however the spans overlap.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """``[start_s, end_s)`` on one track (a trainer, an engine), on whatever clock all spans share."""

    name: str
    track: str
    start_s: float
    end_s: float
    step: int | None = None

    @property
    def waits(self) -> bool:
        """A span named ``wait...`` says that the track does nothing."""
        return self.name.startswith("wait")


class Shares(NamedTuple):
    """Parts of a window of time; they add up to 1."""

    busy: float
    idle: float


def shares(spans: Iterable[Span], start: float, end: float, tracks: Sequence[str] = ()) -> dict[str, Shares]:
    """Busy and idle share of each track within ``[start, end)``.

    A moment is busy if some span covers it and none that waits does (``wait_data`` inside ``step`` is idle).

    Args:
        tracks: reported even if they have no span; tracks with spans always are.

    Raises:
        ValueError: if the window is empty.
    """
    if not start < end:
        raise ValueError(f"the window must have a length: start {start}, end {end}")
    by_track: dict[str, list[Span]] = {track: [] for track in tracks}
    for span in spans:
        by_track.setdefault(span.track, []).append(span)
    return {track: _shares(of_track, start, end) for track, of_track in by_track.items()}


def _shares(spans: Sequence[Span], start: float, end: float) -> Shares:
    covered = _union_length(spans, start, end)
    waiting = _union_length([span for span in spans if span.waits], start, end)
    busy = min(1.0, max(0.0, (covered - waiting) / (end - start)))
    return Shares(busy, 1.0 - busy)


def _union_length(spans: Iterable[Span], start: float, end: float) -> float:
    """Seconds of ``[start, end)`` that at least one span covers."""
    total, reached = 0.0, start
    for left, right in sorted((span.start_s, span.end_s) for span in spans):
        left, right = max(left, reached), min(right, end)
        if right > left:
            total += right - left
            reached = right
    return total


class Lanes:
    """Rows of one track, such that spans in a row are disjoint or nested, as trace viewers demand.

    A row remembers its last ``MEMORY`` outermost spans; a span that reaches back further gets another row.
    """

    MEMORY = 1024

    def __init__(self) -> None:
        self._rows: list[list[tuple[float, float]]] = []  # per row: disjoint outermost spans, ascending
        self._forgotten: list[float] = []  # per row: no span before this time is remembered

    def place(self, span: Span) -> int:
        """The number of the first row that can take the span; later spans respect it."""
        number = next((row for row in range(len(self._rows)) if self._fits(row, span)), len(self._rows))
        if number == len(self._rows):
            self._rows.append([])
            self._forgotten.append(float("-inf"))
        row = self._rows[number]
        row[_overlap(row, span)] = [(span.start_s, span.end_s)]
        if len(row) > self.MEMORY:
            self._forgotten[number] = row.pop(0)[1]
        return number

    def _fits(self, number: int, span: Span) -> bool:
        row = self._rows[number]
        inside = all(left >= span.start_s and right <= span.end_s for left, right in row[_overlap(row, span)])
        return inside and span.start_s >= self._forgotten[number]


def _overlap(row: Sequence[tuple[float, float]], span: Span) -> slice:
    """Which of the disjoint ascending intervals share more than a border with the span."""
    stop = start = bisect_left(row, (span.end_s, float("-inf")))
    while start > 0 and row[start - 1][1] > span.start_s:
        start -= 1
    return slice(start, stop)
