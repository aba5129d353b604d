import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyasync.observe.spans import Lanes, Shares, Span, shares

times = st.integers(0, 40)
spans = st.lists(st.builds(
    lambda name, track, a, b: Span(name, track, min(a, b), max(a, b)),
    st.sampled_from(["train", "generate", "wait_data"]), st.sampled_from(["trainer", "engine"]), times, times,
), max_size=12)  # fmt: skip


@given(spans, times, st.integers(1, 20))
def test_shares_agree_with_counting_the_moments(found, start, length):
    result = shares(found, start, start + length, ["trainer", "engine"])
    for track, share in result.items():
        mine = [span for span in found if span.track == track]
        busy = sum(
            any(span.start_s <= moment < span.end_s for span in mine)
            and not any(span.start_s <= moment < span.end_s for span in mine if span.waits)
            for moment in range(start, start + length)
        )
        assert share.busy == pytest.approx(busy / length)
        assert share.busy + share.idle == pytest.approx(1)


@given(spans, st.floats(0, 39), st.floats(0.01, 5))
def test_doing_the_same_work_twice_at_once_is_not_busier(found, start, length):
    assert shares(found + found, start, start + length) == shares(found, start, start + length)


def test_waiting_inside_a_step_is_idle():
    step, wait = Span("step", "trainer", 0, 10), Span("wait_data", "trainer", 2, 6)
    assert shares([step, wait], 0, 10) == {"trainer": Shares(0.6, 0.4)}


def test_a_track_without_spans_is_idle_if_it_is_asked_for():
    assert shares([], 0, 1) == {}
    assert shares([], 0, 1, ["engine 0"]) == {"engine 0": Shares(0.0, 1.0)}


def test_an_empty_window_is_refused():
    with pytest.raises(ValueError, match="window"):
        shares([], 1, 1)


@given(spans)
def test_spans_in_one_lane_are_disjoint_or_nested(found):
    lanes, rows = Lanes(), {}
    for span in found:
        rows.setdefault(lanes.place(span), []).append(span)
    for row in rows.values():
        for a in row:
            for b in row:
                disjoint = a.end_s <= b.start_s or b.end_s <= a.start_s
                nested = (a.start_s <= b.start_s and b.end_s <= a.end_s) or (
                    b.start_s <= a.start_s and a.end_s <= b.end_s
                )
                assert disjoint or nested


def test_a_lane_stays_right_and_small_beyond_its_memory():
    lanes = Lanes()
    count = Lanes.MEMORY * 3
    assert {lanes.place(Span("s", "t", i, i + 1)) for i in range(count)} == {0}
    assert len(lanes._rows[0]) <= Lanes.MEMORY
    assert lanes.place(Span("over forgotten ones", "t", 0.5, count)) == 1
    assert lanes.place(Span("next", "t", count, count + 1)) == 0
