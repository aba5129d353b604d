"""The plan ``fully_async``: groups stream in as they finish, and staleness is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from skyasync.config.schema import Config
from skyasync.rollout.types import Group
from skyasync.trainer import RayPPOTrainer, Rollout
from skyasync.trainer.context import Metrics
from skyasync.trainer.plans import PLANS
from skyasync.trainer.plans.admission import Admission, Batch, Limits
from skyasync.utils.task_group import run_together, together


@PLANS.register("fully_async")
class FullyAsyncRayPPOTrainer(RayPPOTrainer):
    """Fully asynchronous: groups stream in as they finish, weights are swapped in flight, staleness is bounded.

    ```
     admission ──▶ rollouts, one task per prompt ──▶ finished ──▶ train ──▶ swap ──▶ end of step
         ▲           (engines go on during training)                          │
         └──────────────────────── free slots, new version ◀──────────────────┘
    ```

    | who waits       | for what                                   | woken by                                          |
    |-----------------|--------------------------------------------|---------------------------------------------------|
    | generation loop | a free slot                                | training loop, after each swap; a finished        |
    |                 |                                            | rollout, where only the concurrency was at its    |
    |                 |                                            | limit; one that is rejected                       |
    | a rollout       | the engines                                | they answer or fail; a swap holds them back       |
    |                 |                                            | briefly                                           |
    | a rollout       | the gate (partial_rollout=wait, evaluation | whoever closed it, which itself waits only for    |
    |                 | with eval_mode=pause)                      | rollouts inside to end                            |
    | training loop   | a batch that ``admission`` lets it take    | a rollout that finishes. When all have finished   |
    |                 |                                            | there is a batch: see ``admission``               |

    Charge and release: a prompt's slot is charged in ``_run_generation`` (``admit``) and freed in ``_release``
    (``sync``).

    What is trained, and in which order: a batch is in the order of the prompt stream, oldest first. Prompts that
    were open at a checkpoint are not in its position: a resumed run admits them first, as old as they are, and has
    those that were finished from the checkpoint. None is lost and none is trained twice. With ``max_staleness=0`` all
    prompts of a step start together, nothing starts before the step has ended, and the engines see what they see in the
    synchronous plan.

    If a rollout or either loop fails, everything else is cancelled and the error is raised.
    """

    asynchronous = True  # but for max_staleness=0
    reads = (
        "trainer.max_staleness",
        "trainer.staleness_bound",
        "trainer.async_generation_ratio",
        "trainer.partial_rollout",
        "trainer.eval_mode",
        "generator.generate_batch_size",
        "generator.max_concurrent_rollouts",
    )

    def __init__(self, cfg: Config, *args: Any, **parts: Any) -> None:
        self.asynchronous = cfg.trainer.max_staleness > 0
        super().__init__(cfg, *args, **parts)

    async def train(self) -> None:
        async with self.running():
            progress, prompts = self.context.progress, self.context.prompts
            limits = Limits.of(self.cfg, prompts.total, **self._rejecting())
            open_before = self.checkpointer.ledger.open_positions(progress.position, progress.ahead)  # by a run before
            self.admission = Admission(limits, progress.step, progress.position, progress.ahead, open_before)
            self._finished: dict[int, tuple[list[Group], Metrics]] = {}
            self._rejected: list[Group] = []  # since the last batch
            self._slot_freed, self._rollout_finished = asyncio.Event(), asyncio.Event()
            await run_together(self._run_generation(), self._run_training())

    def _rejecting(self) -> dict[str, float]:
        if not self.context.refill.active:
            return {}
        return {"steps": self.total_steps - self.global_step, "most_rejected": self.context.refill.most_rejected}

    async def _run_generation(self) -> None:
        async with together() as rollouts:
            for position in self.admission.begun:
                rollouts.start(self._roll_out(position))
            while not self.admission.exhausted:
                for position in self.admission.admit():
                    rollouts.start(self._roll_out(position))
                await self._slot_freed.wait()
                self._slot_freed.clear()

    async def _run_training(self) -> None:  # type: ignore[override]  # the whole loop
        while self.global_step < self.total_steps:
            rollout = await self.waiting("data", self._next_rollout())
            status = await self.train_on(rollout)
            await self.async_sync_policy_weights_to_inference_engines()
            if self.asynchronous:
                self._release()
            await self.end_step(status)
            self._release()

    async def _roll_out(self, position: int) -> None:
        groups, metrics = await self.roll_out([self.context.prompts.prompt(position)])
        if self.context.refill.active and not self.filter_groups(groups):
            self._rejected += groups
            self.admission.reject(position)
            self._slot_freed.set()
        else:
            self._finished[position] = groups, metrics
            self.admission.finish(position)
        self._rollout_finished.set()
        if self.cfg.generator.max_concurrent_rollouts:
            self._slot_freed.set()

    async def _next_rollout(self) -> Rollout:
        while (batch := self.admission.take()) is None:
            self._rollout_finished.clear()
            await self._rollout_finished.wait()
        return self._assemble(batch)

    def _assemble(self, batch: Batch) -> Rollout:
        finished = [self._finished.pop(position) for position in batch.positions]
        rejected, self._rejected = self._rejected, []
        status = {
            "rollout/running": float(self.admission.running),
            "rollout/finished": float(self.admission.finished),
        }
        groups = [group for found, _ in finished for group in found]
        metrics = merge([metrics for _, metrics in finished])
        return self.assemble(groups, metrics | status, batch.position, batch.ahead, rejected)

    def _release(self) -> None:
        if self.policy_version == self.global_step:  # this step's weights have been handed over
            self.admission.sync(self.policy_version)
            self._slot_freed.set()


def merge(metrics: Sequence[Metrics]) -> Metrics:
    """The mean of what the rollouts of a batch report; of times the longest, as if they had been one call."""
    values: dict[str, list[float]] = {}
    for reported in metrics:
        for name, value in reported.items():
            values.setdefault(name, []).append(value)
    return {name: max(found) if name.startswith("time/") else fmean(found) for name, found in values.items()}
