"""The tutorial's printed ``train()``, which defines neither of the loops that it calls: defaults exist."""

import asyncio
import traceback

import pytest

from skyasync.errors import UserError
from skyasync.trainer import RayPPOTrainer as Base
from tests.trainer.plans.parts import make_run, stream


class Broken(Exception):
    pass


class AsyncRayPPOTrainer(Base):
    async def train(self):
        assert not self.cfg.trainer.placement.colocate_all, (
            "colocate_all is not supported for async training"
        )
        generation_buffer = asyncio.Queue(maxsize=1)
        generator_task = asyncio.create_task(self._run_generate_loop(generation_buffer))
        assert generator_task
        for idx in range(len(self.train_dataloader)):
            status = await self._run_training(generation_buffer)
            assert status
            if idx != len(self.train_dataloader) - 1:
                await self.generation_ack.wait()
            await self.async_sync_policy_weights_to_inference_engines()
            self.sync_finished.set()
            self.generation_ack.clear()


class EpochsTrainer(Base):
    """As in the complete example: once per epoch, with events of its own."""

    async def train(self):
        for _ in range(self.cfg.trainer.epochs):
            generation_buffer = asyncio.Queue(maxsize=1)
            self.sync_finished, self.generation_ack = asyncio.Event(), asyncio.Event()
            generator_task = asyncio.create_task(self._run_generate_loop(generation_buffer))
            for idx in range(len(self.train_dataloader)):
                await self._run_training(generation_buffer)
                if idx != len(self.train_dataloader) - 1:
                    await self.generation_ack.wait()
                await self.async_sync_policy_weights_to_inference_engines()
                self.sync_finished.set()
                self.generation_ack.clear()
            generator_task.cancel()


class HelperTrainer(AsyncRayPPOTrainer):
    """Its lines are in a method of their own."""

    async def train(self):
        await self.body()

    async def body(self):
        await super().train()


class EarlyTrainer(AsyncRayPPOTrainer):
    """The author knows that its samples are stale."""

    asynchronous = True


every_form = pytest.mark.parametrize("plan", [AsyncRayPPOTrainer, HelperTrainer, EpochsTrainer])


@every_form
def test_it_trains_all_steps_of_the_run_one_step_off(plan):
    run = make_run(
        plan, prompts=10, trainer__epochs=2, trainer__eval_interval=2, eval_prompts=2
    ).train()
    assert run.tracker.of("staleness/max") == {1: 0, 2: 1, 3: 1, 4: 1, 5: 1}
    assert run.trained == stream(10, epochs=2)
    assert run.sync.versions == [0, 1, 2, 3, 4, 5]
    assert sorted(run.tracker.of("eval/version")) == [2, 4, 5]
    assert run.tracker.closed == 1


@every_form
def test_generation_overlaps_training(plan):
    run = make_run(
        plan, prompts=24, trainer__epochs=1, generating=[2.0], updating=[2.0], syncing=[0.0]
    ).train()
    assert all(run.tracker.of("time/step_s")[step] == pytest.approx(2.0) for step in range(2, 6))


@every_form
def test_it_reads_the_number_of_steps_saves_and_resumes(plan, tmp_path):
    settings = {
        "prompts": 24, "trainer__epochs": 1, "trainer__ckpt_path": str(tmp_path), "trainer__ckpt_interval": 1,
    }  # fmt: skip
    first = make_run(plan, **settings, trainer__max_training_steps=2).train()
    more = make_run(
        plan, **settings, trainer__max_training_steps=5, trainer__resume_mode="latest"
    ).train()
    assert first.trained + more.trained == stream(24)[: len(first.trained + more.trained)]
    assert (first.trainer.global_step, more.trainer.global_step) == (2, 5)
    assert [step for step, _ in more.tracker.rows] == [3, 4, 5]


@every_form
@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_stopped_anywhere_and_resumed_it_trains_what_is_left_in_the_middle_of_an_epoch_too(
    plan, stop, tmp_path
):
    settings = {
        "prompts": 10, "trainer__epochs": 2, "trainer__ckpt_path": str(tmp_path), "trainer__ckpt_interval": 1,
        "trainer__ckpt_rollouts": True, "eval_prompts": 2, "trainer__eval_interval": 2,
    }  # fmt: skip
    first = make_run(plan, **settings)
    first.faults["log", stop] = Broken()
    with pytest.raises(Broken):
        first.train()
    second = make_run(plan, **settings, trainer__resume_mode="latest").train()
    assert first.trained + second.trained == stream(10, epochs=2)
    assert second.trainer.global_step == 5
    assert all(staleness <= 1 for staleness in second.tracker.of("staleness/max").values())
    third = make_run(plan, **settings, trainer__resume_mode="latest").train()
    assert third.trained == []


@every_form
def test_rejected_prompts_that_leave_fewer_batches_end_it_well(plan):
    sampling = {"type": "variance", "mode": "refill"}
    settings = {
        f"trainer__algorithm__dynamic_sampling__{name}": value for name, value in sampling.items()
    }
    run = make_run(
        plan, prompts=30, trainer__epochs=1, all_right=frozenset(range(0, 30, 2)), **settings
    ).train()
    assert run.trained == [prompt for prompt in stream(30) if prompt.row % 2]
    assert run.trainer.global_step == 4


@every_form
def test_a_generate_loop_that_fails_ends_it_with_its_error(plan):
    run = make_run(plan, prompts=24, trainer__epochs=1)
    error = run.faults["generate", 3] = Broken("no sample")
    with pytest.raises(Broken) as caught:
        run.train()
    assert caught.value is error
    assert "generate_batches" in [entry.name for entry in traceback.extract_tb(error.__traceback__)]


def test_a_loop_over_no_epochs_is_told_why_it_trains_nothing():
    run = make_run(EpochsTrainer, prompts=24, trainer__max_training_steps=3)
    with pytest.raises(
        UserError, match=r"without a step, and 3 steps are left; a loop over trainer\.epochs=0"
    ):
        run.train()


UNCORRECTED = {
    "prompts": 24,
    "trainer__epochs": 1,
    "trainer__algorithm__off_policy_correction": "none",
}


@every_form
def test_stale_samples_that_nothing_corrects_end_the_run_at_the_first_batch(plan):
    run = make_run(plan, **UNCORRECTED)
    with pytest.raises(
        UserError, match=r"trains samples of policy version 0 in step 2, whose policy is version 1"
    ):
        run.train()
    assert run.trainer.global_step == 1 and run.dispatch.weights == 1
    make_run(plan, **UNCORRECTED | {"trainer__algorithm__off_policy_correction": "auto"}).train()
    make_run(
        plan, **UNCORRECTED | {"trainer__algorithm__policy_loss_type": "decoupled_ppo"}
    ).train()


def test_uncorrected_samples_must_be_requested():
    with pytest.raises(UserError, match="asynchronous"):
        make_run(EarlyTrainer, **UNCORRECTED)
    make_run(EarlyTrainer, **UNCORRECTED, trainer__allow_uncorrected=True).train()


def test_a_synchronous_run_without_a_correction_is_what_it_says():
    make_run(Base, **UNCORRECTED).train()
