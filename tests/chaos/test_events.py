"""The seed determines the schedule."""

from __future__ import annotations

import itertools
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyasync.config.schema import Config
from skyasync.errors import UserError
from tests.chaos.command import SETTINGS, added
from tests.chaos.events import FOREVER, KINDS, schedule, weights_of

SEEDS = st.integers(0, 2**32 - 1)
WEIGHTS = st.one_of(
    st.none(),
    st.dictionaries(st.sampled_from(sorted(KINDS)), st.floats(0, 10), min_size=1).filter(
        lambda w: any(w.values())
    ),
)


@given(SEEDS, st.floats(0.5, 50), st.floats(0, 300), WEIGHTS)
def test_the_same_seed_gives_the_same_schedule(seed, mean_s, length_s, weights):
    events = schedule(seed, mean_s, length_s, weights)
    assert events == schedule(seed, mean_s, length_s, weights)
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    assert all(first.at <= second.at < length_s for first, second in itertools.pairwise(events))


@given(SEEDS, st.floats(1, 50), st.floats(0, 300), st.floats(0, 300))
def test_a_longer_one_begins_with_the_shorter_one(seed, mean_s, length_s, more_s):
    events, more = schedule(seed, mean_s, length_s), schedule(seed, mean_s, length_s + more_s)
    assert more[: len(events)] == events


@given(SEEDS, WEIGHTS)
def test_only_what_is_asked_for_happens_and_only_what_is_seen_to_hangs(seed, weights):
    for event in schedule(seed, 1.0, 100.0, weights):
        assert weights is None or weights[event.kind] > 0
        assert event.hangs <= event.about.may_hang
        assert (event.lasts > 0) == event.about.passes
        assert 0 <= event.pick < 1


def test_gaps_have_the_mean_and_kinds_their_shares():
    events = schedule(1, 30.0, 30.0 * 20_000)
    gaps = [second.at - first.at for first, second in itertools.pairwise(events)]
    assert mean(gaps) == pytest.approx(30.0, rel=0.05)
    assert mean(gap > 30.0 for gap in gaps) == pytest.approx(0.368, abs=0.02), "exponential"
    total = sum(kind.weight for kind in KINDS.values())
    for name, kind in KINDS.items():
        assert mean(event.kind == name for event in events) == pytest.approx(
            kind.weight / total, abs=0.02
        )
    frozen = [event.lasts for event in events if event.about.may_hang]
    assert mean(lasts == FOREVER for lasts in frozen) == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"kill-engin": 1.0}, "kill-engine"),
        ({"kill-rank": -1.0}, "from 0 on"),
        ({"kill-rank": 0.0}, "at least one"),
    ],
)
def test_what_cannot_be_is_refused(names, says):
    with pytest.raises(UserError, match=says):
        weights_of(names)
    with pytest.raises(UserError):
        schedule(1, 0.0, 10.0)


def test_a_setting_that_is_given_is_not_added_though_it_is_the_default():
    left = {
        each.partition("=")[0]
        for each in added(Config(), "run", ["generator.engine_start_timeout_s=300"])
    }
    assert left == {*SETTINGS, "trainer.run_name"} - {"generator.engine_start_timeout_s"}
