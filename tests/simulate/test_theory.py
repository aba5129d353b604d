"""Formulas for a step's duration, against the plans' own classes in simulation."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyasync.simulate.clock import run_virtual
from skyasync.simulate.run import simulate, work
from skyasync.simulate.theory import FORMULAS, DrawnBatches, completion_times, expected_step_s
from tests.simulate.test_engines import client
from tests.simulate.test_plans import config

pytestmark = pytest.mark.slow

SECONDS = st.floats(0.01, 10.0)
GROUPS = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=6)


@pytest.mark.parametrize(
    "lengths", ["constant", "lognormal", pytest.param("bimodal", marks=pytest.mark.matrix)]
)
@pytest.mark.parametrize("plan", list(FORMULAS))
@pytest.mark.parametrize("slots", [8, 32], ids=["four waves", "a slot each"])
def test_theory_is_what_virtual_time_gives(plan: str, lengths: str, slots: int) -> None:
    steps = 20 if lengths == "constant" else 120  # if every batch is the same, a few show it
    cfg = config(lengths, steps=steps, length_max=800, slots=slots, sync_s=1.5)
    assert simulate(cfg, plan).step_s == pytest.approx(expected_step_s(cfg, plan), rel=0.03)


@pytest.mark.parametrize(
    "training", [0.5, 1.0, 3.0], ids=lambda times: f"training {times} times generation"
)
def test_streamed_with_equal_lengths_hides_all_but_a_wave_of_the_shorter_side(
    training: float,
) -> None:
    """Four waves of four groups: while one is generated the former one is trained."""
    cfg = config(slots=8)
    generation = work(cfg).generation_s
    cfg.simulate.train_s_per_token = training * generation / 6400
    expected = (1 + training) * generation / 4 + max(1, training) * generation * 3 / 4
    assert simulate(cfg, "streamed").step_s == pytest.approx(expected, rel=1e-6)
    assert expected_step_s(cfg, "streamed") == pytest.approx(expected, rel=1e-6)


def test_portions_of_groups_have_no_formula() -> None:
    assert expected_step_s(config(stream_groups=4), "streamed") is None
    assert expected_step_s(config(stream_groups=4), "sync") is not None


@given(GROUPS)
def test_the_streamed_formula_is_the_recursion_and_within_its_bounds(
    groups: list[tuple[float, float]],
) -> None:
    complete, training = np.array(sorted(groups)).T
    end = 0.0
    for ready, seconds in zip(complete, training, strict=True):
        end = max(end, ready) + seconds
    batches = DrawnBatches(complete[None], training[None])
    (streamed,), (sync,) = FORMULAS["streamed"](batches), FORMULAS["sync"](batches)
    assert streamed == pytest.approx(end)
    assert max(complete[-1] + training[-1], complete[0] + training.sum()) <= streamed * (1 + 1e-9)
    assert streamed <= sync * (1 + 1e-9)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 3), st.integers(1, 4))
def test_sequences_end_when_the_virtual_engines_end_them(
    lengths: list[int], engines: int, slots: int
) -> None:
    async def run() -> list[float]:
        loop, found, ends = asyncio.get_running_loop(), client(slots, engines), [0.0] * len(lengths)
        sequences = [found.submit(0, length) for length in lengths]
        for i, sequence in enumerate(sequences):
            sequence.done.add_done_callback(lambda _, i=i: ends.__setitem__(i, loop.time()))
        await asyncio.gather(*(sequence.done for sequence in sequences))
        await asyncio.sleep(1)
        return ends

    assert run_virtual(run()) == pytest.approx(
        completion_times(np.array([lengths], float), engines, slots)[0]
    )


def test_there_is_no_formula_where_none_was_derived() -> None:
    assert expected_step_s(config(), "fully_async") is None
    assert expected_step_s(config(token_s_per_sequence=0.001), "sync") is None
    assert expected_step_s(config(policy_mini_batch_size=8), "streamed") is None
