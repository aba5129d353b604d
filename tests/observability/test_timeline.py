import asyncio
import json
import math
import signal
import subprocess
import sys
import time
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyasync.observability.timeline import Lanes, Timeline, prolong, to_the_end, wall_clock
from tests.observability import chrome_trace, perfetto

pytestmark = pytest.mark.slow


class VirtualClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return VirtualClock()


def events(path, phase):
    return [event for event in json.loads(path.read_text()) if event["ph"] == phase]


def tracks(path):
    return {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events(path, "M")
        if e["name"] == "thread_name"
    }


def test_every_prefix_of_whole_lines_is_a_valid_trace(tmp_path, clock):
    timeline = Timeline(tmp_path / "t.json", clock=clock)
    for step in range(3):
        with timeline.span("train", "trainer", step, note="a\nb"):
            clock.now += 1
        with timeline.span("sync", f"engine {step}"):
            clock.now += 1
    raw = (tmp_path / "t.json").read_text().splitlines(keepends=True)
    assert len(raw) > 10
    sizes = [len(json.loads("".join(raw[:count]) + "]")) for count in range(1, len(raw) + 1)]
    assert sizes == list(range(len(raw)))
    timeline.close()
    timeline.close()
    whole = json.loads((tmp_path / "t.json").read_text())
    assert len([event for event in whole if event["name"] != "idle"]) == len(raw) - 1


def test_a_killed_process_leaves_what_it_recorded(tmp_path):
    code = (
        "import os, signal, sys; from skyasync.observability import Timeline\n"
        "t = Timeline(sys.argv[1])\n"
        "with t.span('train', 'trainer'): pass\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = tmp_path / "t.json"
    done = subprocess.run([sys.executable, "-c", code, str(path)])
    assert done.returncode == -signal.SIGKILL
    assert [
        event["name"] for event in json.loads(path.read_text() + "]") if event["ph"] == "X"
    ] == ["train"]


def test_a_span_has_its_clocks_times_in_microseconds_its_track_and_args(tmp_path, clock):
    timeline = Timeline(tmp_path / "t.json", clock=clock)
    with timeline.span("train", "trainer", 7, tokens=5) as args:
        clock.now += 0.25
        args["loss"] = 0.5
    timeline.close()
    [span] = events(tmp_path / "t.json", "X")
    assert (span["ts"], span["dur"], span["args"]) == (
        100_000_000,
        250_000,
        {"step": 7, "tokens": 5, "loss": 0.5},
    )
    assert tracks(tmp_path / "t.json")[span["pid"], span["tid"]] == "trainer"


def test_an_exception_passes_through_and_is_recorded(tmp_path, clock):
    timeline = Timeline(tmp_path / "t.json", clock=clock)
    with pytest.raises(KeyError), timeline.span("train", "trainer"):
        raise KeyError("x")
    timeline.close()
    assert events(tmp_path / "t.json", "X")[0]["args"] == {"error": "KeyError"}
    assert [span.name for span in timeline.spans()] == ["train"]


async def test_spans_of_concurrent_tasks_overlap_and_get_lanes_of_their_own(tmp_path, clock):
    timeline = Timeline(tmp_path / "t.json", clock=clock)
    first_runs, second_runs = asyncio.Event(), asyncio.Event()

    async def first():
        with timeline.span("first", "engine"):
            first_runs.set()
            await second_runs.wait()
            clock.now += 1

    async def second():
        await first_runs.wait()
        clock.now += 1
        with timeline.span("second", "engine"):
            second_runs.set()
            await one
            clock.now += 1

    one = asyncio.create_task(first())
    await second()
    timeline.close()
    spans = {event["name"]: event for event in events(tmp_path / "t.json", "X")}
    assert (spans["first"]["ts"], spans["first"]["dur"]) == (100_000_000, 2_000_000)
    assert (spans["second"]["ts"], spans["second"]["dur"]) == (101_000_000, 2_000_000)
    names = tracks(tmp_path / "t.json")
    assert [names[1, spans[name]["tid"]] for name in ("first", "second")] == [
        "engine",
        "engine (2)",
    ]


def test_nested_spans_share_a_lane(tmp_path, clock):
    timeline = Timeline(tmp_path / "t.json", clock=clock)
    with timeline.span("step", "trainer"):
        for _ in range(100):
            with timeline.span("micro-batch", "trainer"):
                clock.now += 1 / 3
    timeline.close()
    found = events(tmp_path / "t.json", "X")
    assert len({event["tid"] for event in found}) == 1
    outer = found[-1]
    assert all(e["ts"] + e["dur"] <= outer["ts"] + outer["dur"] for e in found)


def test_a_resumed_trace_continues_the_file_as_another_part(tmp_path, clock):
    path = tmp_path / "t.json"
    for ending in ("", ',{"ph": "X", "na', None):
        timeline = Timeline(path, clock=clock)
        timeline.add_span("train", "trainer", 1, 2)
        if ending is None:
            timeline.close()
        elif ending:
            with path.open("a") as file:  # the crash
                file.write(ending)
    Timeline(path, clock=clock).close()
    names = [
        event["args"]["name"] for event in events(path, "M") if event["name"] == "process_name"
    ]
    assert names == ["skyasync", *(f"skyasync (resumed, part {part})" for part in (2, 3, 4))]
    assert [event["pid"] for event in events(path, "X")] == [1, 2, 3]


def test_what_json_cannot_hold_is_text(tmp_path, clock):
    timeline = Timeline(tmp_path / "t.json", clock=clock)
    timeline.add_span("train", "trainer", 0, 1, gap=math.inf, where=tmp_path, deep=[math.nan])
    timeline.close()
    assert events(tmp_path / "t.json", "X")[0]["args"] == {
        "gap": "inf",
        "where": str(tmp_path),
        "deep": "[nan]",
    }


def test_memory_is_bounded_and_the_file_is_not(tmp_path, clock):
    timeline = Timeline(tmp_path / "t.json", clock=clock, memory=10)
    for second in range(50):
        timeline.add_span("s", "t", second, second + 1)
    timeline.close()
    assert len(timeline.spans()) == 10
    assert len(events(tmp_path / "t.json", "X")) == 50


def test_the_default_clock_is_wall_time():
    before = time.time()
    assert abs(wall_clock() - before) < 1.0
    timeline = Timeline(None)
    with timeline.span("s", "t"):
        pass
    [span] = timeline.spans()
    assert abs(span.start_s - before) < 1.0 and span.end_s >= span.start_s


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 50), st.integers(0, 50)), max_size=40),
    st.integers(1, 4),
)
def test_once_closed_every_lane_is_full_from_the_runs_beginning_to_its_end(
    tmp_path_factory, found, settled
):
    path, clock = tmp_path_factory.mktemp("trace") / "t.json", VirtualClock()
    with patch.object(Lanes, "SETTLED", settled):
        timeline = Timeline(path, clock=clock, began=100.0)
        for track, start, seconds in found:
            timeline.add_span("work", track, 100.0 + start, 100.0 + start + seconds)
        clock.now = 250.0
        timeline.close()
    lanes = chrome_trace.check(path)
    for lane in lanes.values():
        assert lane[0][0] == 100_000_000
        assert chrome_trace.covered(lane) == 150_000_000
        ends = [end for _, end, name in lane if name == "idle"]
        assert len(ends) == len(set(ends))


def test_a_long_span_that_holds_many_short_ones_stays_in_their_lane(tmp_path, clock):
    timeline = Timeline(tmp_path / "t.json", clock=clock)
    with timeline.span("outer", "trainer"):
        for _ in range(3 * Lanes.SETTLED):
            clock.now += 1
            with timeline.span("inner", "trainer"):
                clock.now += 1
    clock.now += 5
    timeline.close()
    assert tracks(tmp_path / "t.json") == {(1, 1): "trainer"}
    idle = [event["dur"] for event in events(tmp_path / "t.json", "X") if event["name"] == "idle"]
    assert idle == [5_000_000]


def test_what_nothing_can_fill_any_more_is_told_while_the_run_goes_on(tmp_path, clock):
    timeline = Timeline(tmp_path / "t.json", clock=clock)
    for _ in range(2 * Lanes.SETTLED):
        clock.now += 1
        with timeline.span("work", "trainer"):
            clock.now += 1
    written = [
        event["name"]
        for event in json.loads((tmp_path / "t.json").read_text() + "]")
        if event["ph"] == "X"
    ]
    assert written.count("idle") == Lanes.SETTLED


def test_a_closed_trace_is_prolonged_to_the_runs_end_and_one_that_was_not_closed_stays(
    tmp_path, clock
):
    path = tmp_path / "t.json"
    for part in (1, 2):  # the second is a resumed run's
        timeline = Timeline(path, clock=clock)
        timeline.add_span("work", "a", clock.now, clock.now + 2)
        timeline.add_span("work", "b", clock.now, clock.now + 1)
        clock.now += 2
        before = path.read_text()
        prolong(path, clock.now + 1)
        assert path.read_text() == before
        timeline.close()
        clock.now += 3
        prolong(path, clock.now)
        lanes = chrome_trace.check(path)
        assert {name: chrome_trace.covered(lane) for (of, name), lane in lanes.items() if of == part} == {
            "a": 5_000_000, "b": 5_000_000,
        }  # fmt: skip
    with to_the_end(tmp_path / "none.json"):
        pass
    assert not (tmp_path / "none.json").exists()


@pytest.mark.skipif(
    not perfetto.THERE, reason="TRACE_PROCESSOR names no folder with Perfetto's trace processor"
)
def test_perfettos_own_processor_reads_it_and_every_lane_sums_to_the_runs_time(tmp_path, clock):
    path = tmp_path / "t.json"
    for _ in range(2):  # the second is a resumed run's
        timeline = Timeline(path, clock=clock)
        with timeline.span("step", "trainer", 1, note='a\n"b" \u00e9'):
            clock.now += 1
            with timeline.span("sync", "trainer", 1):
                clock.now += 2
        timeline.add_span("rollout", "engine 0", clock.now - 3, clock.now)
        timeline.add_span(
            "rollout", "engine 0", clock.now - 2, clock.now - 0.5
        )  # overlaps: a lane of its own
        timeline.add_span("rollout", "engine 0", clock.now - 2.5, clock.now + 1)
        clock.now += 5
        timeline.close()
        clock.now += 2
        prolong(path, clock.now)
    found = perfetto.lanes(path)
    assert {part for part, _ in found} == {1, 2} and len(found) >= 6
    assert set(found.values()) == {10.0}
    assert found == {
        lane: chrome_trace.covered(spans) / 1e6 for lane, spans in chrome_trace.check(path).items()
    }
    assert perfetto.rows(
        path, "select count(*) from slice where name = 'sync' and dur = 2000000000"
    ) == [[2]]
