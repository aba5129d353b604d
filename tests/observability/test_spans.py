from hypothesis import given
from hypothesis import strategies as st

from skyasync.observability.timeline import Lanes, Span

times = st.integers(0, 40)
spans = st.lists(st.builds(
    lambda name, track, a, b: Span(name, track, min(a, b), max(a, b)),
    st.sampled_from(["train", "generate", "wait_data"]), st.sampled_from(["trainer", "engine"]), times, times,
), max_size=12)  # fmt: skip


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
