"""Charts of a report: one unit per chart, and bars that add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyasync.observability.report.charts import sections, step_parts
from tests.observability.report.folders import metrics

NAMES = ("time/train_s", "time/update_s", "time/logprobs_s", "time/sync_s", "time/generate_s", "time/wait_data_s",
         "time/wait_generation_s", "time/reference_s")  # fmt: skip


@given(st.floats(0.001, 1e4), st.dictionaries(st.sampled_from(NAMES), st.floats(0, 1e4)))
def test_the_parts_of_a_step_add_up_to_it(step_s: float, phases: dict[str, float]) -> None:
    parts = step_parts({"time/step_s": step_s, **phases})
    assert sum(parts.values()) == pytest.approx(step_s, rel=0.01)
    assert all(seconds > 0 for seconds in parts.values())


def test_what_overlaps_with_training_is_no_wait() -> None:
    """Recorded: a streamed, a synchronous and a one-step-off step."""
    streamed = {"time/wait_data_s": 0.922, "time/update_s": 2.129, "time/train_s": 2.149, "time/generate_s": 1.189,
                "time/sync_s": 0.064, "time/step_s": 3.136}  # fmt: skip
    assert step_parts(streamed) == pytest.approx(
        {"update": 2.129, "training, the rest": 0.02, "sync": 0.064, "wait data": 0.922}, abs=0.002
    )
    sync = {"time/update_s": 0.808, "time/generate_s": 0.405, "time/train_s": 0.819, "time/sync_s": 1.389,
            "time/step_s": 2.626}  # fmt: skip
    assert step_parts(sync)["generate"] == 0.405
    assert step_parts({"step": 0}) == {}


def test_own_metrics_that_are_no_shares_have_charts_of_their_own() -> None:
    rows = [
        {**metrics(step), "env/right": 0.5, "env/close": 0.1 * step, "env/length": 4.0 + step}
        for step in range(9)
    ]
    (responses,) = (part for part in sections(rows) if part.name == "responses")
    own = [
        [line.label for line in chart.lines]
        for chart in responses.charts
        if "own metrics" in chart.title
    ]
    assert own == [["close", "right"], ["length"]]
