"""The synchronous plan, with scripted parts in simulation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.plans import PLANS
from tests.trainer.plans.parts import make_run

SECONDS = st.lists(st.sampled_from([0.0, 0.1, 1.0, 7.0]), min_size=1, max_size=5)


def test_the_plan_is_the_base_trainer_under_its_name():
    assert PLANS["sync"] is RayPPOTrainer
    assert not RayPPOTrainer.asynchronous


@settings(max_examples=30, deadline=None)
@given(steps=st.integers(1, 6), generating=SECONDS, updating=SECONDS, syncing=SECONDS)
def test_every_sample_is_from_the_newest_policy(steps, generating, updating, syncing):
    run = make_run(
        RayPPOTrainer, prompts=4 * steps, generating=generating, updating=updating, syncing=syncing
    ).train()
    assert (
        run.tracker.of("staleness/min")
        == run.tracker.of("staleness/max")
        == dict.fromkeys(range(1, steps + 1), 0)
    )
    assert run.sync.versions == list(range(steps + 1))


def test_phases_take_turns():
    run = make_run(
        RayPPOTrainer, prompts=12, generating=[2.0], updating=[3.0], syncing=[0.5]
    ).train()
    assert list(run.tracker.of("time/step_s").values()) == pytest.approx([5.5] * 3)


def test_it_needs_no_correction():
    assert make_run(RayPPOTrainer, trainer__algorithm__off_policy_correction="none").train().trained
