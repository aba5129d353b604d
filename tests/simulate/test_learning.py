"""The law of learning: recovered from runs that follow it, and errors of a fit."""

from __future__ import annotations

from itertools import pairwise
from math import inf, log
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyasync.errors import UserError
from skyasync.simulate.learning import LearningLaw, Pilot, fit, read_pilot, resampled, tells_power

RATES, POWERS = st.floats(0.01, 0.1), st.floats(1.0, 4.0)
COSTS = st.floats(0.05, 0.8)  # a larger one leaves nothing to be seen in 40 steps of staleness 4
STARTS, STALENESS = st.floats(0.0, 0.6), st.floats(0.0, 16.0)


def pilot(law: LearningLaw, staleness: float, steps: int = 40, noise: float = 0.0, seed: int = 0) -> Pilot:
    """A run that follows the law; the staleness of its samples grows in the first steps, then stays."""
    stale = np.minimum(np.arange(steps), staleness).astype(float)
    progress = np.concatenate([[0.0], np.cumsum(1 / (1 + (law.cost * stale) ** law.power))])
    versions = np.arange(steps) - stale
    rewards = law.reward(np.interp(versions, np.arange(steps + 1), progress))
    return Pilot(stale, versions, rewards + noise * np.random.default_rng(seed).standard_normal(steps))


@settings(max_examples=40, deadline=None)
@given(STARTS, RATES, COSTS)
def test_two_runs_without_noise_give_their_law(start: float, rate: float, cost: float) -> None:
    law = LearningLaw(start, 1.0, rate, cost, 2.0)
    found = fit([pilot(law, 0), pilot(law, 4)], 1.0, power=2.0)
    assert found.start == pytest.approx(start, abs=0.01)
    assert found.rate == pytest.approx(rate, rel=0.001)
    assert found.steps_to(0.8, 4.0) == pytest.approx(law.steps_to(0.8, 4.0), rel=0.001)


@settings(max_examples=40, deadline=None)
@given(COSTS, POWERS)
def test_a_third_level_of_staleness_gives_the_power(cost: float, power: float) -> None:
    law = LearningLaw(0.4, 1.0, 0.05, cost, power)
    found = fit([pilot(law, staleness) for staleness in (0, 1, 4)], 1.0)
    for staleness in (0.0, 1.0, 2.0, 4.0):
        assert found.steps_to(0.8, staleness) == pytest.approx(law.steps_to(0.8, staleness), rel=0.02)


def test_the_power_needs_two_levels_besides_0() -> None:
    law = LearningLaw(0.4, 1.0, 0.05, 0.3)
    assert not tells_power([pilot(law, 0), pilot(law, 4)])
    assert not tells_power([pilot(law, 0), pilot(law, 4), pilot(law, 4, seed=1)])
    assert tells_power([pilot(law, 0), pilot(law, 1), pilot(law, 4)])


@given(STARTS, RATES, COSTS, POWERS, st.floats(0.0, 0.99), STALENESS)
def test_steps_to_a_target_earn_it(
    start: float, rate: float, cost: float, power: float, target: float, staleness: float
) -> None:
    law = LearningLaw(start, 1.0, rate, cost, power)
    steps = law.steps_to(target, staleness)
    progress = np.array(steps / (1 + (cost * staleness) ** power))
    assert float(law.reward(progress)) == pytest.approx(max(start, target), abs=1e-9)


@given(COSTS, POWERS, st.lists(STALENESS, min_size=2))
def test_more_staleness_never_takes_fewer_steps(cost: float, power: float, staleness: list[float]) -> None:
    law = LearningLaw(0.4, 1.0, 0.05, cost, power)
    assert all(law.steps_to(0.8, a) <= law.steps_to(0.8, b) for a, b in pairwise(sorted(staleness)))


def test_steps_by_hand() -> None:
    """From 0.2 to 0.6 is half of the way to 1; staleness 3 at cost 1/3 makes each step half a step."""
    law = LearningLaw(0.2, 1.0, 0.1, 1 / 3)
    assert law.steps_to(0.6, 0.0) == pytest.approx(log(2) / 0.1)
    assert law.steps_to(0.6, 3.0) == pytest.approx(2 * log(2) / 0.1)
    assert law.steps_to(0.1, 3.0) == 0.0


@pytest.mark.matrix
def test_intervals_of_resampled_laws_mostly_hold_the_truth() -> None:
    """Residuals in blocks vary a little less than the noise: the interval contained it for 50 of 60 pilots."""
    law, inside = LearningLaw(0.4, 1.0, 0.03, 0.4, 2.0), 0
    for seed in range(20):
        runs = [pilot(law, level, noise=0.03, seed=3 * seed + i) for i, level in enumerate((0, 1, 4))]
        steps = [one.steps_to(0.8, 2.0) for one in resampled(runs, fit(runs, 1.0), 60)]
        low, high = np.quantile(steps, (0.05, 0.95))
        inside += low <= law.steps_to(0.8, 2.0) <= high
    assert inside >= 14


def test_an_unknown_power_widens_the_interval() -> None:
    law = LearningLaw(0.4, 1.0, 0.05, 0.3, 2.0)
    two = [pilot(law, 0, noise=0.01), pilot(law, 4, noise=0.01, seed=1)]
    three = [*two, pilot(law, 1, noise=0.01, seed=2)]
    widths = []
    for runs in (two, three):
        steps = [one.steps_to(0.8, 2.0) for one in resampled(runs, fit(runs, 1.0), 60)]
        widths.append(np.ptp(np.quantile(steps, (0.05, 0.95))))
    assert widths[0] > 2 * widths[1]


def test_draws_in_which_the_reward_does_not_rise_count_as_runs_that_never_reach_the_target() -> None:
    law = LearningLaw(0.2, 1.0, 0.0015, 0.3, 2.0)
    runs = [pilot(law, level, steps=30, noise=0.03, seed=10 + i) for i, level in enumerate((0, 2, 4))]
    laws = resampled(runs, fit(runs, 1.0), 20)
    assert len(laws) == 20
    flat = [one for one in laws if not one.rate]
    assert 5 < len(flat) < 20
    assert {one.steps_to(0.8, 0.0) for one in flat} == {inf}
    assert flat[0].steps_to(law.start - 0.1, 0.0) == 0.0


def rows(steps: int, **metrics: float) -> list[dict[str, Any]]:
    return [{"step": step, "staleness/mean": 1.0, "reward/mean": step / 100} | metrics for step in range(1, steps + 1)]


def test_a_rollouts_reward_is_of_the_weights_that_sampled_it_and_an_evaluations_of_those_after_the_step() -> None:
    found = read_pilot(rows(10), "reward/mean", "run")
    assert found.versions.tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    evaluated = read_pilot(rows(10, **{"eval/score": 0.5}), "eval/score", "run")
    assert evaluated.versions.tolist() == list(range(1, 11))


def test_too_short_a_run_is_named() -> None:
    with pytest.raises(UserError, match=r"runs/a: 7 steps have reward/mean .* needs 8 of both"):
        read_pilot(rows(7), "reward/mean", "runs/a")


def test_runs_of_one_staleness_do_not_tell_its_cost() -> None:
    law = LearningLaw(0.4, 1.0, 0.05, 0.3)
    with pytest.raises(UserError, match=r"mean staleness 0, 0: its cost needs two that differ by 0.5"):
        fit([pilot(law, 0), pilot(law, 0)], 1.0)


def test_a_reward_that_falls_is_not_extrapolated() -> None:
    law = LearningLaw(0.4, 1.0, 0.05, 0.3)
    falling = [Pilot(one.staleness, one.versions, one.rewards[::-1]) for one in (pilot(law, 0), pilot(law, 4))]
    with pytest.raises(UserError, match="the reward does not rise"):
        fit(falling, 1.0)
