"""Tasks that a plan creates: a failure ends the run unless the plan awaits the task and handles it."""

import asyncio
import sys
import traceback
from contextlib import suppress

import pytest

from skyasync.errors import UserError
from skyasync.simulate.clock import run_virtual
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.plan_tasks import GRACE_S
from skyasync.trainer.plans.one_step_off import AsyncRayPPOTrainer
from tests.trainer.plans.parts import make_run


class Broken(Exception):
    pass


class BackgroundTrainer(RayPPOTrainer):
    """Generates in a task that is never awaited."""

    async def train(self):
        buffer = asyncio.Queue(maxsize=1)
        self.task = asyncio.create_task(self.generate_in_background(buffer))
        while self.global_step < self.total_steps:
            status = await self.train_on(await self.waiting("data", buffer.get()))
            await self.async_sync_policy_weights_to_inference_engines()
            await self.end_step(status)

    async def generate_in_background(self, buffer):
        for prompts in self.remaining_prompts():
            await buffer.put(await self.generate(prompts))


class ExitingTrainer(BackgroundTrainer):
    async def generate_in_background(self, buffer):
        try:
            await super().generate_in_background(buffer)
        except Exception:
            sys.exit(1)


def failing(plan, part="generate", call=2, **settings):
    run = make_run(plan, generating=[2.0], **settings)
    run.engines.update_in_flight = True
    run.faults[part, call] = Broken("no sample")
    return run


def error_and_time(run):
    """The error that ends a run, and when."""

    async def scenario():
        try:
            await run.trainer.run()
        except Exception as error:
            assert [
                task for task in asyncio.all_tasks() if task is not asyncio.current_task()
            ] == []
            assert (
                isinstance(run.trainer, AsyncRayPPOTrainer)
                or asyncio.current_task().cancelling() == 0
            )
            assert asyncio.get_running_loop().get_task_factory() is None
            return error, asyncio.get_running_loop().time()

    return run_virtual(scenario())


@pytest.mark.parametrize("plan", [BackgroundTrainer, ExitingTrainer])
def test_a_task_that_is_never_awaited_ends_the_run_with_its_error_and_traceback(plan):
    error, at = error_and_time(run := failing(plan))
    assert isinstance(error, Broken) and str(error) == "no sample"
    assert "generate_in_background" in [
        frame.name for frame in traceback.extract_tb(error.__traceback__)
    ]
    assert at < 20
    assert run.tracker.closed == run.timeline.closed == 1


def test_it_ends_within_the_steps_limit_however_busy_the_others_are():
    run = failing(BackgroundTrainer, trainer__step_timeout_s=30.0, updating=[1e3])
    error, at = error_and_time(run)
    assert "no sample" in f"{error!r} {getattr(error, '__notes__', '')}"
    assert at <= 40


def test_a_train_that_is_called_without_run_is_refused_with_what_to_call():
    async def scenario():
        with pytest.raises(
            UserError, match=r"BackgroundTrainer\.generate was called without run\(\)"
        ):
            await make_run(BackgroundTrainer).trainer.generate_in_background(asyncio.Queue())
        with pytest.raises(
            UserError,
            match=r"RayPPOTrainer\.generate was called without run\(\): `await trainer\.run",
        ):
            await make_run(RayPPOTrainer).trainer.train()

    run_virtual(scenario())


class TakingTrainer(RayPPOTrainer):
    """Awaits its task after training, and continues without its result."""

    async def train(self):
        for prompts in self.remaining_prompts():
            task = asyncio.create_task(self.fetch())
            status = await self.train_on(await self.generate(prompts))
            with pytest.raises(Broken):
                await task
            await self.sync_policy_weights_to_inference_engines()
            await self.end_step(status)

    async def fetch(self):
        raise Broken


class GatheringTrainer(TakingTrainer):
    async def fetch(self):
        found = await asyncio.gather(super().fetch(), return_exceptions=True)
        raise found[0]


@pytest.mark.parametrize("plan", [TakingTrainer, GatheringTrainer])
def test_an_error_that_the_plan_takes_is_its_own_affair_however_late_it_takes_it(plan):
    run = make_run(plan, generating=[400.0], updating=[400.0])
    run_virtual(run.trainer.run())
    assert run.trainer.global_step == run.trainer.total_steps


def test_an_error_that_is_raised_again_ends_the_run_once():
    class RaisesAgain(TakingTrainer):
        async def train(self):
            await asyncio.create_task(self.fetch())

    error, _ = error_and_time(make_run(RaisesAgain))
    assert isinstance(error, Broken) and not hasattr(error, "__notes__")


def test_a_plan_that_ends_before_anybody_took_the_error_fails_with_it():
    class Forgets(TakingTrainer):
        async def train(self):
            self.task = asyncio.create_task(self.fetch())
            await asyncio.sleep(1)

    error, at = error_and_time(make_run(Forgets))
    assert isinstance(error, Broken) and at < GRACE_S


def test_what_else_has_failed_is_noted_on_the_plans_own_error():
    class Both(TakingTrainer):
        async def train(self):
            self.task = asyncio.create_task(self.fetch())
            await asyncio.sleep(1)
            raise KeyError("mine")

    error, _ = error_and_time(make_run(Both))
    assert isinstance(error, KeyError) and error.__notes__ == ["at the same time: Broken()"]


def test_a_cancelled_run_stays_cancelled_and_its_tasks_end():
    async def scenario():
        run = make_run(BackgroundTrainer, generating=[50.0])
        task = asyncio.create_task(run.trainer.run())
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(scenario())


def test_tasks_that_a_step_makes_are_not_the_plans():
    run, tasks = make_run(RayPPOTrainer), []
    generate = run.generator.generate

    async def fails():
        raise Broken

    async def starts(batch):
        tasks.extend([asyncio.create_task(fails()), asyncio.create_task(asyncio.sleep(1e6))])
        return await generate(batch)

    async def scenario():
        run.generator.generate = starts
        await run.trainer.run()
        assert run.trainer.global_step == 3
        assert [type(task) for task in tasks] == [asyncio.Task] * 6
        assert not any(task.cancelling() for task in tasks), (
            "a part of the run may need them longer than the plan"
        )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run_virtual(scenario())


# ---------------------------------------------------------------- a plan that waits


class WaitingTrainer(RayPPOTrainer):
    """Waits for an event that is never set, after its second step."""

    async def train(self):
        for prompts in self.remaining_prompts():
            status = await self.train_on(await self.generate(prompts))
            await self.sync_policy_weights_to_inference_engines()
            await self.end_step(status)
            if self.global_step == 2:
                await asyncio.Event().wait()


class WaitingInATask(WaitingTrainer):
    async def train(self):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(super().train())


@pytest.mark.parametrize("plan", [WaitingTrainer, WaitingInATask])
def test_a_plan_that_waits_for_what_never_happens_ends_after_the_steps_limit_with_one_line(plan):
    run = make_run(plan, prompts=24, trainer__step_timeout_s=90.0)
    error, at = error_and_time(run)
    limit = "90 s (trainer.step_timeout_s)"
    assert isinstance(error, TimeoutError)
    assert str(error) == f"{plan.__name__}.train waits, and no step was under way for {limit}"
    assert 90 < at < 100
    assert run.tracker.closed == run.timeline.closed == 1


def test_the_line_at_which_it_waits_is_in_the_traceback():
    error, _ = error_and_time(make_run(WaitingTrainer, prompts=24))
    assert "await asyncio.Event().wait()" in [
        entry.line for entry in traceback.extract_tb(error.__cause__.__traceback__)
    ]


def test_a_plan_that_swallows_the_end_is_ended_all_the_same():
    class Swallows(WaitingTrainer):
        async def train(self):
            with suppress(asyncio.CancelledError):
                await super().train()

    error, _ = error_and_time(make_run(Swallows, prompts=24))
    assert isinstance(error, TimeoutError)


def test_steps_that_take_long_are_no_stall_however_short_the_waits_between_them():
    run = make_run(
        BackgroundTrainer, generating=[80.0], updating=[80.0], trainer__step_timeout_s=90.0
    )
    run.engines.update_in_flight = True
    assert run.train().trainer.global_step == 3


def test_a_plan_of_ours_ends_at_once_as_before():
    error, at = error_and_time(failing(AsyncRayPPOTrainer))
    assert isinstance(error, Broken) and at < GRACE_S
