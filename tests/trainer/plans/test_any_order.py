"""A user's plan that trains its batches in any order, in simulation: every prompt is trained once, however it ends."""

import asyncio
import random
from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from skyasync.callbacks import RunExtension
from skyasync.simulate.clock import run_virtual
from skyasync.trainer import RayPPOTrainer, Rollout
from skyasync.trainer.checkpoint.checkpoints import Checkpoints, load_state
from tests.trainer.plans.parts import make_run, stream


class Broken(Exception):
    pass


class StopsAfter(RunExtension):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer, metrics):
        if trainer.global_step == self.step:
            trainer.stop("enough")


class FreshestFirst(RayPPOTrainer):
    """Generates two batches ahead, and trains the freshest first."""

    asynchronous = True

    async def train(self):
        batches, waiting = self.remaining_prompts(), []
        while self.global_step < self.total_steps:
            while len(waiting) < 2 and (prompts := next(batches, None)):
                waiting.append(await self.generate(prompts))
            status = await self.train_on(waiting.pop())
            await self.sync_policy_weights_to_inference_engines()
            await self.end_step(status)


class AnyOrder(RayPPOTrainer):
    """Trains any of the batches that it has, alone or two of them together."""

    asynchronous = True
    seed, ahead, merges = 0, 3, False

    async def train(self):
        chance, batches, waiting = random.Random(self.seed), self.remaining_prompts(), []
        while self.global_step < self.total_steps:
            while len(waiting) < self.ahead and (prompts := next(batches, None)):
                waiting.append(await self.generate(prompts))
            rollout = waiting.pop(chance.randrange(len(waiting)))
            if self.merges and waiting and chance.random() < 0.3:
                other = waiting.pop()
                rollout = Rollout(
                    [*rollout.groups, *other.groups], [*rollout.positions, *other.positions]
                )
            status = await self.train_on(rollout)
            await self.sync_policy_weights_to_inference_engines()
            await self.end_step(status)


def test_the_freshest_first_trains_every_prompt_in_all_steps(caplog):
    run = make_run(FreshestFirst, prompts=48, trainer__max_training_steps=12).train()
    assert run.trainer.global_step == 12
    assert run.trained[:8] == [*stream(48)[4:8], *stream(48)[8:12]]
    assert sorted(run.trained) == sorted(stream(48))
    assert "has ended" not in caplog.text


def test_its_checkpoint_has_the_position_of_what_was_trained(tmp_path):
    shared = {"prompts": 24, "trainer__ckpt_path": str(tmp_path), "trainer__ckpt_interval": 1}
    first = make_run(FreshestFirst, **shared, callbacks=[StopsAfter(2)]).train()
    folder = Checkpoints(tmp_path).latest()
    state = load_state(folder, seed=first.trainer.cfg.trainer.seed, dataset_size=24)
    assert (state.step, state.position, state.trained_early) == (2, 0, list(range(4, 12)))
    second = make_run(FreshestFirst, **shared, trainer__resume_mode="latest").train()
    assert first.trained == stream(24)[4:12]
    assert sorted(first.trained + second.trained) == sorted(stream(24))
    assert second.trainer.global_step == 6


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.integers(1, 14),
    epochs=st.integers(1, 2),
    batch=st.integers(1, 4),
    ahead=st.integers(1, 4),
    merges=st.booleans(),
    saves=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_whatever_the_order_and_however_often_it_is_killed_and_resumed_every_prompt_is_trained_once(
    prompts, epochs, batch, ahead, merges, saves, seed, tmp_path_factory
):
    class Plan(AnyOrder): ...

    Plan.ahead, Plan.merges = ahead, merges
    chance, folder = random.Random(seed), tmp_path_factory.mktemp("checkpoints")
    trained, saved = [], 0
    for attempt in range(12):
        Plan.seed = chance.random()
        run = make_run(
            Plan, prompts=prompts, trainer__epochs=epochs, trainer__train_batch_size=batch, generating=[1.0, 3.0],
            trainer__ckpt_path=str(folder), trainer__ckpt_interval=2, trainer__ckpt_on_exit=saves,
            trainer__resume_mode="latest",
        )  # fmt: skip
        if attempt < 10:
            part = chance.choice(["generate", "update", "sync", "log", "never"])
            run.faults[part, chance.randint(1, 4)] = Broken()
        after = chance.uniform(0, 30) if attempt < 10 and chance.random() < 0.5 else 1e9
        with suppress(Broken, asyncio.CancelledError):
            run_virtual(killed(run, after))
            break
        # what was trained after the last checkpoint is trained again
        trained += run.dispatch.trained[: run.trainer.checkpointer.saved_step - saved]
        saved = run.trainer.checkpointer.saved_step
    trained += run.dispatch.trained
    assert sorted(prompt for step in trained for prompt in step) == sorted(
        stream(prompts, epochs=epochs)
    )
    progress = run.trainer.context.progress
    assert (progress.position, progress.trained_early) == (prompts * epochs, frozenset())
    assert progress.step == len(trained)


async def killed(run, after):
    task = asyncio.create_task(run.trainer.run())
    timer = asyncio.get_running_loop().call_later(after, task.cancel)
    try:
        await task
    finally:
        timer.cancel()


def test_prompts_that_were_rejected_are_consumed_in_any_order_too():
    refill = {"type": "variance", "mode": "refill", "max_sample_batches": 5}
    settings_ = {
        f"trainer__algorithm__dynamic_sampling__{name}": value for name, value in refill.items()
    }
    dull = frozenset(range(0, 24, 3))
    run = make_run(FreshestFirst, prompts=24, all_right=dull, **settings_).train()
    assert sorted(run.trained) == [
        prompt for prompt in sorted(stream(24)) if prompt.row not in dull
    ]
    assert run.trainer.context.progress.position == 24
