"""Checks of a trace against the Trace Event Format (JSON array, events X and M), and of our own guarantees."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

NAMES = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}
Track = tuple[int, str]


def check(path: Path) -> dict[Track, list[tuple[int, int, str]]]:
    """The spans of each track (process, lane's name) as (start, end, name) in microseconds, in order of their start.

    Raises:
        AssertionError: for an event that a viewer would reject or draw wrongly.
    """
    events = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    assert isinstance(events, list)
    tracks: dict[tuple[int, int], str] = {}
    spans: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    for event in events:
        place = event["pid"], event["tid"]
        assert all(type(number) is int and number >= 0 for number in place), event
        assert (
            isinstance(event["args"], dict) and isinstance(event["name"], str) and event["name"]
        ), event
        if event["ph"] == "M":
            assert event.keys() == {"ph", "name", "pid", "tid", "args"}, event
            value = event["args"][NAMES[event["name"]]]
            assert type(value) is (int if event["name"] == "thread_sort_index" else str), event
            if event["name"] == "thread_name":
                assert place not in tracks, f"two names for {place}"
                tracks[place] = value
        else:
            assert event["ph"] == "X" and event.keys() == {
                "ph",
                "name",
                "pid",
                "tid",
                "ts",
                "dur",
                "args",
            }, event
            assert type(event["ts"]) is int and type(event["dur"]) is int and event["dur"] >= 0, (
                event
            )
            assert place in tracks, "a lane has its name before its first span"
            spans[place].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    assert len(set(tracks.items())) == len({(pid, name) for (pid, _), name in tracks.items()}), (
        "lanes of one name"
    )
    for lane in spans.values():
        lane.sort(key=lambda span: (span[0], -span[1]))
        _nested(lane)
    return {(place[0], tracks[place]): lane for place, lane in spans.items()}


def _nested(lane: list[tuple[int, int, str]]) -> None:
    """Spans of a lane are disjoint or nested."""
    outer: list[int] = []
    for start, end, name in lane:
        while outer and outer[-1] <= start:
            outer.pop()
        assert not outer or end <= outer[-1], (
            f"{name} at {start} is longer than the span that contains it"
        )
        outer.append(end)


def covered(lane: list[tuple[int, int, str]]) -> int:
    """Microseconds covered by the outermost spans."""
    total, reached = 0, 0
    for start, end, _ in lane:
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def extent(lanes: dict[Track, list[tuple[int, int, str]]]) -> int:
    """From the first beginning to the last end."""
    every = [span for lane in lanes.values() for span in lane]
    return max(end for _, end, _ in every) - min(start for start, _, _ in every)


def _refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is no JSON")
