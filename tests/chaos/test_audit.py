"""The audit of a run with fault injection follows from the observations."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.audit import (
    Ending,
    Outcome,
    Seen,
    cost_s,
    costs,
    table,
    unexplained,
    unlike,
    usual_s,
    wrong_prompts,
    wrong_steps,
)
from tests.chaos.channel import USED
from tests.chaos.events import FOREVER, Event
from tests.chaos.report import complaints, summary


def test_a_cost_is_how_much_later_than_usual_the_next_steps_were_finished():
    steps = [(10.0, 1), (12.0, 2), (14.0, 3), (31.0, 4), (33.0, 5)]
    assert usual_s(steps) == 2.0
    assert cost_s(15.0, steps, 2.0) == 14.0
    assert cost_s(31.5, steps, 2.0) == 0.0
    assert cost_s(33.5, steps, 2.0) is None
    assert cost_s(13.5, steps, 2.0) == 13.5, (
        "the current step did not need the failed part any more"
    )
    assert cost_s(9.0, [*steps, (99.0, 6)], 2.0) == 0.0, "later delays have other reasons"


def test_a_step_that_is_made_again_is_no_progress():
    seen = Seen()
    for at, number in [(1.0, 1), (2.0, 2), (8.0, 2), (9.0, 3)]:
        seen.step(at, number)
    assert seen.steps == [(1.0, 1), (2.0, 2), (9.0, 3)]


def test_every_event_has_a_line_with_what_it_hit_and_what_it_cost():
    seen = Seen(steps=[(10.0, 1), (12.0, 2), (25.0, 3), (27.0, 4)])
    seen.outcomes = [
        Outcome(Event(1, 13.0, "kill-engine"), 13.0, "engine 77"),
        Outcome(Event(2, 20.0, "freeze-rank", FOREVER), 20.0, ""),
        Outcome(Event(3, 28.0, "delay-messages", 1.5), 28.0, "engine 78"),
    ]
    assert table(seen)[2:] == [
        "| 1 | 13 s | kill-engine | engine 77 | 10.0 s |",
        "| 2 | 20 s | freeze-rank for good | - | nothing was there |",
        "| 3 | 28 s | delay-messages for 1.5 s | engine 78 | no step since |",
    ]
    assert costs(seen) == {"kill-engine": [10.0]}


@given(st.integers(1, 30), st.sets(st.integers(1, 30)), st.sets(st.integers(1, 30)))
def test_steps_that_are_missing_or_there_twice_are_found(last, gone, twice):
    whole = list(range(1, last + 1))
    gone, twice = gone & set(whole[:-1]), (twice & set(whole)) - gone
    steps = [0, *(step for step in whole if step not in gone), *twice]
    assert bool(wrong_steps(steps)) == bool(gone | twice)
    assert all(
        any(f"step {step} " in line for line in wrong_steps(steps)) for step in sorted(gone)[:5]
    )


def test_prompts_that_ended_twice_and_steps_without_a_line_are_found():
    lines = [
        {"step": 1, "trained": ["a", "b"]},
        {"step": 2, "trained": ["b"], "given_up": {"c": "why"}},
    ]
    assert wrong_prompts(lines[:1]) == []
    assert wrong_prompts(lines) == ["prompt b ended 2 times: trained@1, trained@2"]
    assert unlike(lines, [0, 1, 2]) == []
    assert unlike(lines, [1, 2, 3]) == ["step 3 is not in the ledger"]


DEFECT = "AttributeError: 'NoneType' object has no attribute 'progress'"
FLIPPED = "skyasync.weight_sync.update.WeightSyncError: an engine holds other weights"


def test_a_run_that_ends_by_itself_is_wrong_by_name_unless_an_event_explains_its_error(
    tmp_path: Path,
) -> None:
    seen = Seen(steps=[(10.0, 1), (70.0, 2)], ended="the command was done")
    seen.outcomes = [Outcome(Event(1, 12.0, "kill-engine"), 12.0, "engine 77"),
                    Outcome(Event(2, 60.0, "flip-bit"), 60.0, "the weights of version 2")]  # fmt: skip
    seen.endings = [Ending(0.0, 13.0, "status 1", DEFECT), Ending(15.0, 61.0, "status 1", FLIPPED)]
    wrong = f"the run ended by itself after 13 s: status 1, {DEFECT}"
    assert complaints(seen, tmp_path)[0] == wrong
    lines = summary(seen, tmp_path, [wrong])
    assert f"- {wrong}" in lines
    assert (
        f"| - | 13 s | the run ended by itself | status 1, {DEFECT} | by no event: wrong |" in lines
    )
    assert f"| - | 61 s | the run ended by itself | status 1, {FLIPPED} | by event 2 |" in lines


def test_a_flipped_bit_that_engines_took_is_wrong_unless_it_ends_the_run(tmp_path: Path) -> None:
    seen = Seen(steps=[(10.0, 1), (70.0, 2)], ended="the command was done")
    hits = [
        f"the weights of version 1{USED}",
        f"the weights of version 2{USED}",
        "the weights of version 3",
    ]
    seen.outcomes = [
        Outcome(Event(n, 10.0 * n, "flip-bit"), 10.0 * n, hit)
        for n, hit in enumerate(hits, start=1)
    ]
    seen.endings = [Ending(0.0, 12.0, "status 1", FLIPPED)]
    assert complaints(seen, tmp_path) == [
        "event 2 was not noticed: flip-bit, the weights of version 2, which the engines took"
    ]


@given(
    st.sampled_from(["flip-bit", "fill-disk", "kill-engine", "kill-driver", "delay-messages"]),
    st.booleans(),
    st.floats(0, 200),
    st.integers(1, 3),
    st.sampled_from(
        [
            FLIPPED,
            "skyasync.errors.UserError: the checkpoint of step 4 could not be saved",
            DEFECT,
            "",
        ]
    ),
)
def test_an_event_explains_one_ending_of_its_own_kind_that_it_met(kind, hit, at, times, error):
    seen = Seen(outcomes=[Outcome(Event(1, at, kind), at, "something" if hit else "")])
    seen.endings = [Ending(50.0, 100.0, f"status {number}", error) for number in range(times)]
    of_its_kind = (kind, error[:24]) in {
        ("flip-bit", FLIPPED[:24]),
        ("fill-disk", "skyasync.errors.UserErro"),
    }
    assert len(unexplained(seen)) == times - (hit and of_its_kind and 30.0 <= at <= 100.0)
