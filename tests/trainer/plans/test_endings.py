"""Ends of a run: parts that never answer, and the checkpoint that every end leaves; every plan, in simulation."""

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import (
    EngineConfig,
    GenerationRequest,
    InferenceEngine,
    SamplingParams,
)
from skyasync.simulate.clock import run_virtual
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.plans.fully_async import FullyAsyncRayPPOTrainer
from skyasync.trainer.plans.one_step_off import AsyncRayPPOTrainer
from tests.trainer.plans.parts import BOUNDED, PLANS, make_run, stream

every_plan = pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.__name__)
QUICK = (RayPPOTrainer, AsyncRayPPOTrainer, FullyAsyncRayPPOTrainer)
NEVER = 1e12


class Broken(Exception):
    pass


async def never(*args, **kwargs):
    await asyncio.sleep(NEVER)


async def error_of(kind, run, *, within):
    """The error that ends the run within ``within`` seconds, with all tasks cancelled and all parts closed."""
    with pytest.raises(kind) as caught:
        await run.trainer.run()
    assert asyncio.get_running_loop().time() <= within
    if hasattr(run, "client"):
        await run.client.shutdown()
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
    assert run.tracker.closed == run.timeline.closed == 1
    assert run.engines.generating == 0
    return caught.value


# ---------------------------------------------------------------- parts that never answer


class SilentEngine(InferenceEngine):
    async def generate(self, requests):
        await never()
        yield []

    async def shutdown(self): ...


@every_plan
def test_an_engine_that_never_answers_ends_the_run_within_its_limit_naming_request_and_key(plan):
    async def scenario():
        run = make_run(plan, prompts=12)
        run.client = InferenceClient([SilentEngine(EngineConfig("model"))], request_timeout_s=30)
        generate = run.generator.generate

        async def calls_the_engine(batch):
            if run.trainer.global_step == 1:
                name = str(batch["trajectory_ids"][0])
                await run.client.generate(GenerationRequest(name, [1], SamplingParams()))
            return await generate(batch)

        run.generator.generate = calls_the_engine
        error = await error_of(TimeoutError, run, within=60)
        assert (
            "was not answered: engine 0 generated nothing for 30 s (generator.request_timeout_s)"
            in str(error)
        )
        assert str(error).startswith("request e0-i")

    run_virtual(scenario())


@every_plan
@pytest.mark.parametrize("held_out", [False, True])
def test_a_generator_of_ones_own_that_never_answers_has_the_limit_of_a_step(plan, held_out):
    run = make_run(
        plan, prompts=12, eval_prompts=2, trainer__eval_interval=1, trainer__step_timeout_s=50.0
    )
    generate = run.generator.generate

    async def hangs(batch):
        stuck = batch["is_eval"] == held_out and run.trainer.global_step == 1
        return await (never() if stuck else generate(batch))

    run.generator.generate = hangs
    error = run_virtual(error_of(TimeoutError, run, within=110))
    what = "evaluation" if held_out else "generation"
    assert f"the {what} of step " in str(error) and "within 50 s (trainer.step_timeout_s)" in str(
        error
    )


@pytest.mark.parametrize(
    ("plan", "call"),
    [(plan, "stats") for plan in PLANS]
    + [
        (plan, call)
        for plan in (AsyncRayPPOTrainer, FullyAsyncRayPPOTrainer)
        for call in ("pause", "resume")
    ],
)
def test_an_engine_that_is_stuck_in_any_call_ends_the_run_within_its_limit(plan, call):
    run = make_run(plan, prompts=12, trainer__step_timeout_s=50.0)
    answers = getattr(run.engines, call)
    setattr(
        run.engines, call, lambda *args: never() if run.trainer.global_step == 1 else answers(*args)
    )
    error = run_virtual(error_of(TimeoutError, run, within=80))
    assert "(trainer.step_timeout_s)" in str(error)


# ---------------------------------------------------------------- a checkpoint at every end


def cancelled_after(run, seconds):
    async def scenario():
        task = asyncio.create_task(run.trainer.run())
        await asyncio.sleep(seconds)
        task.cancel()
        with suppress(asyncio.CancelledError):  # it may have ended before
            await task

    run_virtual(scenario())


def shared(tmp_path, **more):
    return {
        "prompts": 10, "trainer__epochs": 2, "trainer__ckpt_path": str(tmp_path), "trainer__ckpt_on_exit": True,
        "trainer__policy_mini_batch_size": 2, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    "plan",
    [plan if plan in QUICK else pytest.param(plan, marks=pytest.mark.matrix) for plan in PLANS],
    ids=lambda plan: plan.__name__,
)
@settings(max_examples=25, deadline=None)
@given(after=st.floats(0.05, 40.0))
def test_ctrl_c_at_any_moment_leaves_whole_steps_and_the_resumed_run_trains_exactly_what_is_left(
    plan, after, tmp_path_factory
):
    settings_ = shared(tmp_path_factory.mktemp("checkpoints"))
    first = make_run(plan, **settings_, generating=[1.0, 3.0], updating=[2.0])
    cancelled_after(first, after)
    second = make_run(plan, **settings_, trainer__resume_mode="latest").train()
    # A step is two mini-batches, and these are the run's last prompts: all partial rollouts finish, and are saved.
    trained = first.trained + second.trained
    if plan in BOUNDED:  # groups are trained in the order in which they finish
        assert sorted(trained) == sorted(stream(10, epochs=2))
    else:
        assert trained == stream(10, epochs=2)
    assert [step for step, _ in first.tracker.rows + second.tracker.rows] == [1, 2, 3, 4, 5]
    assert second.dispatch.weights == second.trainer.context.length.updates
    assert second.sync.versions[0] == first.trainer.global_step


@every_plan
@pytest.mark.parametrize("part", ["generate", "sync", "log", "stats"])
def test_an_error_after_a_whole_step_leaves_a_checkpoint_of_it(plan, part, tmp_path):
    first = make_run(plan, **shared(tmp_path))
    error = first.faults[part, 3] = Broken()
    with pytest.raises(Broken) as caught:
        first.train()
    assert caught.value is error
    second = make_run(plan, **shared(tmp_path), trainer__resume_mode="latest").train()
    assert first.trained + second.trained == stream(10, epochs=2)


@every_plan
def test_a_step_that_failed_midway_is_not_saved(plan, tmp_path):
    first = make_run(plan, **shared(tmp_path))
    first.faults["update", 4] = Broken()  # the second mini-batch of step 2
    with pytest.raises(Broken):
        first.train()
    assert list(tmp_path.iterdir()) == []


@every_plan
def test_a_checkpoint_that_cannot_be_saved_hides_no_error(plan, tmp_path):
    run = make_run(plan, **shared(tmp_path))
    error = run.faults["sync", 3] = Broken()
    run.faults["save", 1] = OSError("disk full")
    with pytest.raises(Broken) as caught:
        run.train()
    assert caught.value is error
    assert "disk full" in "".join(error.__notes__)


@every_plan
def test_what_has_been_saved_is_not_saved_again_at_the_end(plan, tmp_path):
    run = make_run(plan, **shared(tmp_path, trainer__ckpt_interval=1)).train()
    assert run.faults.calls["save"] == 5
    resumed = make_run(plan, **shared(tmp_path), trainer__resume_mode="latest").train()
    assert resumed.faults.calls["save"] == 0


@every_plan
def test_without_being_asked_ctrl_c_waits_for_no_update_and_saves_nothing(plan, tmp_path):
    run = make_run(plan, **shared(tmp_path, trainer__ckpt_on_exit=False), updating=[1000.0])
    cancelled_after(run, 5.0)
    assert run.dispatch.cancelled == 1
    assert list(tmp_path.iterdir()) == []


def test_a_second_cancellation_ends_the_update_too(tmp_path):
    run = make_run(RayPPOTrainer, **shared(tmp_path), updating=[1000.0])

    async def scenario():
        task = asyncio.create_task(run.trainer.run())
        for seconds in (5.0, 7.0):
            await asyncio.sleep(seconds)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.get_running_loop().time() < 20

    run_virtual(scenario())
    assert run.dispatch.cancelled == 1
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- plans that lack a step


class WithoutEndStep(RayPPOTrainer):
    async def train(self):
        for prompts in self.remaining_prompts():
            await self.train_on(await self.generate(prompts))
            await self.sync_policy_weights_to_inference_engines()


class EndsEarly(RayPPOTrainer):
    async def train(self):
        for prompts in self.remaining_prompts():
            status = await self.train_on(await self.generate(prompts))
            await self.sync_policy_weights_to_inference_engines()
            await self.end_step(status)
            return


def test_a_plan_that_never_ends_a_step_is_told_what_it_lacks(caplog):
    make_run(WithoutEndStep, prompts=12).train()
    message = (
        "WithoutEndStep.train trains on without end_step: step 1 is not logged, evaluated or saved"
    )
    assert [record.message for record in caplog.records if "end_step" in record.message] == [
        message
    ]


def test_a_plan_that_ends_before_its_prompts_does_not_seem_to_have_trained_them(caplog):
    make_run(EndsEarly, prompts=12).train()
    assert "EndsEarly.train has ended with step 1 of 3: prompts are left" in caplog.text


@every_plan
def test_a_plan_that_trains_all_causes_no_warning(plan, caplog):
    make_run(plan, prompts=10).train()
    assert "has ended with step" not in caplog.text and "end_step" not in caplog.text
