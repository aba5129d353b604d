"""The plan one step (or d steps) off policy, with scripted parts in simulation."""

import inspect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyasync.errors import UserError
from skyasync.trainer.plans.one_step_off import AsyncRayPPOTrainer
from tests.trainer.plans.parts import make_run, stream

SECONDS = st.lists(st.sampled_from([0.0, 0.1, 1.0, 7.0]), min_size=1, max_size=5)


def test_staleness_is_0_for_the_first_step_and_1_afterwards():
    run = make_run(AsyncRayPPOTrainer, prompts=24).train()
    assert run.tracker.of("staleness/min") == {1: 0, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1}
    assert run.tracker.of("staleness/max") == run.tracker.of("staleness/min")


@settings(max_examples=60, deadline=None)
@given(
    depth=st.integers(1, 4),
    steps=st.integers(1, 9),
    generating=SECONDS,
    updating=SECONDS,
    syncing=SECONDS,
)
def test_whatever_takes_long_the_staleness_is_that_of_the_depth_and_nothing_is_lost(
    depth, steps, generating, updating, syncing
):
    run = make_run(
        AsyncRayPPOTrainer, prompts=4 * steps, trainer__async_queue_size=depth,
        generating=generating, updating=updating, syncing=syncing,
    ).train()  # fmt: skip
    for metric in ("staleness/min", "staleness/max"):
        assert run.tracker.of(metric) == {
            step: min(step - 1, depth) for step in range(1, steps + 1)
        }
    assert run.trained == stream(4 * steps)
    assert run.sync.versions == list(range(steps + 1))
    assert run.engines.generating == 0
    assert not run.engines.paused


@settings(max_examples=40, deadline=None)
@given(depth=st.integers(1, 4), generating=SECONDS, updating=SECONDS)
def test_the_queue_never_holds_more_than_its_size(depth, generating, updating):
    most = []

    class Counting(AsyncRayPPOTrainer):
        async def generate(self, prompts):
            rollout = await super().generate(prompts)
            waiting.append(rollout.positions)
            return rollout

        async def train_on(self, rollout):
            waiting.remove(rollout.positions)
            most.append(len(waiting))
            return await super().train_on(rollout)

        async def _run_training(self, buffer):
            self.buffer = buffer
            return await super()._run_training(buffer)

        def _tell(self, event, *args):
            most.append(self.buffer.qsize() if hasattr(self, "buffer") else 0)
            super()._tell(event, *args)

    waiting: list[int] = []
    make_run(
        Counting,
        prompts=40,
        trainer__async_queue_size=depth,
        generating=generating,
        updating=updating,
    ).train()
    assert max(most) <= depth + 1  # the queue, and one finished batch that waits for a place in it
    assert not waiting


def test_generation_of_the_next_batch_overlaps_training_on_this_one():
    run = make_run(
        AsyncRayPPOTrainer, prompts=24, generating=[2.0], updating=[2.0], syncing=[0.0]
    ).train()
    elapsed = run.tracker.of("time/step_s")
    assert elapsed[1] == pytest.approx(4.0)  # nothing to overlap with yet
    assert all(elapsed[step] == pytest.approx(2.0) for step in range(2, 7))


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_the_last_steps_wait_for_no_generation_since_no_acknowledgement_is_owed(depth):
    run = make_run(AsyncRayPPOTrainer, prompts=24, trainer__async_queue_size=depth).train()
    assert sorted(run.tracker.of("time/wait_generation_s")) == list(range(1, 6 - depth + 1))


def test_every_generated_batch_is_trained():
    run = make_run(AsyncRayPPOTrainer, prompts=24, trainer__max_training_steps=3).train()
    assert run.generator.asked == run.trained == stream(24)[:12]


def test_engines_are_paused_for_every_weight_update_and_resumed_after_it():
    run = make_run(AsyncRayPPOTrainer, prompts=12).train()
    assert run.faults.calls["pause"] == run.faults.calls["resume"] == 3


def test_the_depth_may_exceed_the_number_of_steps():
    run = make_run(AsyncRayPPOTrainer, prompts=8, trainer__async_queue_size=7).train()
    assert run.trained == stream(8)
    assert run.tracker.of("staleness/max") == {1: 0, 2: 1}


def test_the_class_defines_its_loop_and_nothing_that_the_base_class_has():
    own = {name for name in vars(AsyncRayPPOTrainer) if not name.startswith("__")}
    assert own - {"_abc_impl"} == {"train", "_train_batches", "asynchronous", "reads"}


def test_the_loop_fits_on_a_screen():
    pictured = inspect.getsource(AsyncRayPPOTrainer).splitlines()
    assert len(pictured) - len((AsyncRayPPOTrainer.__doc__ or "").splitlines()) <= 40
    assert len(inspect.getsource(AsyncRayPPOTrainer.train).splitlines()) <= 10


@pytest.mark.parametrize(
    "settings_",
    [
        {"trainer__algorithm__off_policy_correction": "none"},
        {
            "trainer__algorithm__off_policy_correction": "none",
            "trainer__algorithm__policy_loss_type": "vanilla",
        },
    ],
)
def test_training_on_stale_samples_without_a_correction_is_refused_naming_both_keys(settings_):
    with pytest.raises(
        UserError, match=r"off_policy_correction=none.*policy_loss_type="
    ) as refused:
        make_run(AsyncRayPPOTrainer, **settings_)
    assert "trainer.allow_uncorrected=true" in str(refused.value)
    assert (
        make_run(AsyncRayPPOTrainer, trainer__allow_uncorrected=True, **settings_).train().trained
    )


@pytest.mark.parametrize(
    "settings_",
    [
        {},
        {"trainer__algorithm__ratio_anchor": "behaviour"},
        {
            "trainer__algorithm__off_policy_correction": "none",
            "trainer__algorithm__policy_loss_type": "decoupled_ppo",
        },
        {
            "trainer__algorithm__off_policy_correction": "none",
            "trainer__algorithm__policy_loss_type": "m2po",
        },
    ],
)
def test_a_loss_or_a_correction_that_uses_the_behaviour_policy_is_enough(settings_):
    make_run(AsyncRayPPOTrainer, **settings_)
