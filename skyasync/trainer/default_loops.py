"""The two loops of SkyRL's tutorial on asynchronous training, for a ``train()`` that does not define its own.

    generation_buffer = asyncio.Queue(maxsize=1)
    generator_task = asyncio.create_task(self._run_generate_loop(generation_buffer))
    for idx in range(len(self.train_dataloader)):
        status = await self._run_training(generation_buffer)
        if idx != len(self.train_dataloader) - 1:
            await self.generation_ack.wait()
        await self.async_sync_policy_weights_to_inference_engines()
        self.sync_finished.set()
        self.generation_ack.clear()

| who waits              | for what                              | woken by                                     |
|------------------------|---------------------------------------|----------------------------------------------|
| ``_run_generate_loop`` | space in the buffer; ``sync_finished`` | the plan, which takes a batch; which has synced |
| ``_run_training``      | a batch in the buffer                 | ``_run_generate_loop``                       |
| the plan               | ``generation_ack``                    | ``_run_generate_loop``, whose batch is there |

Invariant: such a plan is whole: it resumes, evaluates, saves and logs as any other, and trains all steps of the run.
What ends a step comes before the next one, or after the plan.
Source: SkyRL's tutorial "Async Training: One-Step Off-Policy Pipelining".
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from skyasync.data.prompts import PromptBatch
from skyasync.rollout.types import Rollout
from skyasync.trainer.context import Metrics

if TYPE_CHECKING:
    from skyasync.trainer.trainer import RayPPOTrainer


class RemainingBatches:
    """The batches that are left. Their number is that of the time when a loop over them began."""

    def __init__(self, trainer: RayPPOTrainer) -> None:
        self._trainer = trainer
        self.begin()

    def begin(self) -> None:
        self._left = self._trainer.total_steps - self._trainer.global_step

    def __len__(self) -> int:
        return self._left

    def __iter__(self) -> Iterator[PromptBatch]:
        return islice(self._trainer.remaining_prompts(), self._left)


@asynccontextmanager
async def running_default_loops(trainer: RayPPOTrainer) -> AsyncIterator[None]:
    """Around a plan that is made of these loops: what a plan of its own has in ``running``.

    A loop over ``trainer.epochs`` is gone through once at least: the first pass has all batches of the run.
    """
    if not trainer.cfg.trainer.epochs:
        trainer.cfg = replace(trainer.cfg, trainer=replace(trainer.cfg.trainer, epochs=1))
    trainer.generation_ack, trainer.sync_finished = asyncio.Event(), asyncio.Event()
    async with trainer.running():
        trainer.train_dataloader = RemainingBatches(trainer)
        yield
        await _end_last_step(trainer)


def run_generate_loop(trainer: RayPPOTrainer, generation_buffer: asyncio.Queue[Rollout]) -> Coroutine[Any, Any, None]:
    """Generate one batch before it is trained. The batches left are counted when this is called."""
    trainer.train_dataloader.begin()

    async def generate() -> None:
        for index, prompts in enumerate(trainer.train_dataloader):
            await generation_buffer.put(await trainer.generate(prompts))
            if index:
                trainer.generation_ack.set()
                await trainer.sync_finished.wait()
                trainer.sync_finished.clear()

    return generate()


async def run_training(trainer: RayPPOTrainer, generation_buffer: asyncio.Queue[Rollout]) -> Metrics:
    """Train the next batch of the buffer."""
    await _end_last_step(trainer)
    rollout = await trainer.waiting("data", generation_buffer.get())
    trainer.unfinished_step = await trainer.train_on(rollout)
    return dict(trainer.unfinished_step)


async def _end_last_step(trainer: RayPPOTrainer) -> None:
    status, trainer.unfinished_step = trainer.unfinished_step, None
    if status is not None:
        await trainer.end_step(status)
