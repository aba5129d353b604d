"""The two loops of the tutorial on asynchronous training, for a ``train()`` that brings none of its own.

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
| ``_run_generate_loop`` | room in the buffer; ``sync_finished`` | the plan, which takes a batch; which has synced |
| ``_run_training``      | a batch in the buffer                 | ``_run_generate_loop``                       |
| the plan               | ``generation_ack``                    | ``_run_generate_loop``, whose batch is there |

Invariant: such a plan is whole: it resumes, evaluates, saves and logs as any other, and trains all steps of the run.
What ends a step comes before the next one, or behind the plan.
Source: SkyRL's tutorial "Async Training: One-Step Off-Policy Pipelining".
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from skyasync.data.prompts import PromptBatch
from skyasync.training.hooks import AlgorithmHooks
from skyasync.training.phases import Metrics

if TYPE_CHECKING:
    from skyasync.config.schema import Config
    from skyasync.rollout.types import Rollout


class Batches:
    """The batches that are left. Their number is that of the time when a loop over them began."""

    def __init__(self, trainer: OneAhead) -> None:
        self._trainer = trainer
        self.begin()

    def begin(self) -> None:
        self._left = self._trainer.total_steps - self._trainer.global_step

    def __len__(self) -> int:
        return self._left

    def __iter__(self) -> Iterator[PromptBatch]:
        return islice(self._trainer.remaining_prompts(), self._left)


class OneAhead(AlgorithmHooks):
    """``RayPPOTrainer`` inherits it."""

    cfg: Config
    generation_ack: asyncio.Event
    sync_finished: asyncio.Event
    train_dataloader: Any
    _status: Metrics | None = None  # of a step whose end is to come

    if TYPE_CHECKING:

        def running(self) -> AbstractAsyncContextManager[None]: ...
        def remaining_prompts(self) -> Iterator[PromptBatch]: ...
        async def generate(self, prompts: PromptBatch) -> Rollout: ...
        async def train_on(self, rollout: Rollout) -> Metrics: ...
        async def end_step(self, status: Metrics) -> None: ...

    @asynccontextmanager
    async def beginning(self) -> AsyncIterator[None]:
        """Around a plan that is made of these loops: what a plan of its own has in ``running``.

        A loop over ``trainer.epochs`` is gone through once at least: the first pass has all batches of the run.
        """
        if not self.cfg.trainer.epochs:
            self.cfg = replace(self.cfg, trainer=replace(self.cfg.trainer, epochs=1))
        self.generation_ack, self.sync_finished = asyncio.Event(), asyncio.Event()
        async with self.running():
            self.train_dataloader = Batches(self)
            yield
            await self._end_last_step()

    def _run_generate_loop(self, generation_buffer: asyncio.Queue[Rollout]) -> Coroutine[Any, Any, None]:
        """Generate one batch ahead of training. What is left is counted when this is called."""
        self.train_dataloader.begin()
        return self._generate_ahead(generation_buffer)

    async def _generate_ahead(self, generation_buffer: asyncio.Queue[Rollout]) -> None:
        for ahead, prompts in enumerate(self.train_dataloader):
            await generation_buffer.put(await self.generate(prompts))
            if ahead:
                self.generation_ack.set()
                await self.sync_finished.wait()
                self.sync_finished.clear()

    async def _run_training(self, generation_buffer: asyncio.Queue[Rollout]) -> Metrics:
        """Train the next batch of the buffer."""
        await self._end_last_step()
        rollout = await self.phases.waiting("data", generation_buffer.get())
        self._status = await self.train_on(rollout)
        return dict(self._status)

    async def _end_last_step(self) -> None:
        status, self._status = self._status, None
        if status is not None:
            await self.end_step(status)
