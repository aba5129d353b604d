"""The plan ``fully_async`` and its variants on shared devices: groups stream in, and staleness is
bounded."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from math import inf
from typing import Any, ClassVar

from skyasync.config.schema import Config
from skyasync.rollout.types import Group
from skyasync.trainer import RayPPOTrainer, Rollout
from skyasync.trainer.context import Metrics
from skyasync.trainer.plans import PLANS
from skyasync.trainer.plans.admission import Admission, AdmissionLimits
from skyasync.trainer.rollouts import merged
from skyasync.utils.task_group import run_together, together


@PLANS.register("fully_async")
class FullyAsyncRayPPOTrainer(RayPPOTrainer):
    """Fully asynchronous: groups stream in as they finish, weights are synced in flight, staleness
    is bounded.

    ```
     admission ──▶ rollouts, one task per prompt ──▶ finished ──▶ train ──▶ sync ──▶ end of step
         ▲           (engines go on during training)                          │
         └──────────────────────── free slots, new version ◀──────────────────┘
    ```

    | who waits       | for what                                   | woken by                                          |
    |-----------------|--------------------------------------------|---------------------------------------------------|
    | generation loop | a free slot                                | training loop, after each sync; a finished        |
    |                 |                                            | rollout, if only the concurrency was at its       |
    |                 |                                            | limit; one that is rejected; a batch that begins  |
    | a rollout       | the engines                                | they answer or fail; a sync holds them back       |
    |                 |                                            | briefly                                           |
    | a rollout       | the gate (partial_rollout=wait, evaluation | the sync or evaluation that closed it, which      |
    |                 | with eval_mode=pause)                      | waits only for rollouts inside to end             |
    | training loop   | a batch that ``admission`` lets it take    | a rollout that finishes. When all have finished   |
    |                 |                                            | there is a batch: see ``admission``               |

    Charge and release: a prompt's slot is charged in ``_run_generation`` (``admit``) and freed in
    ``_release`` (``sync``).

    What is trained, and in which order: a batch is in the order of the prompt stream, oldest first.
    Prompts that were open at a checkpoint are not in its position: a resumed run admits them first,
    with their versions, and has those that were finished from the checkpoint. None is lost and none
    is trained twice. With ``max_staleness=0`` all prompts of a step start together, nothing starts
    before the step has ended, and the engines see what they see in the synchronous plan.

    If a rollout or either loop fails, everything else is cancelled and the error is raised.
    """

    asynchronous = True  # but for max_staleness=0
    reads: ClassVar[tuple[str, ...]] = (
        "trainer.max_staleness",
        "trainer.staleness_bound",
        "trainer.async_generation_ratio",
        "trainer.eval_mode",
        "generator.generate_batch_size",
        "generator.max_concurrent_rollouts",
        "trainer.partial_rollout",
    )

    def __init__(self, cfg: Config, *args: Any, **parts: Any) -> None:
        self.asynchronous = cfg.trainer.max_staleness > 0
        super().__init__(cfg, *args, **parts)

    async def train(self) -> None:
        progress = self.context.progress
        prompts = self.context.prompts
        refill = self.context.refill
        rejecting = dict[str, float]()
        if refill.active:
            steps = (
                self.cfg.trainer.max_training_steps
            )  # else small batches leave more to be trained
            rejecting = {
                "steps": steps - self.global_step if steps else inf,
                "most_rejected": refill.most_rejected,
            }
        limits = AdmissionLimits.of(self.cfg, prompts.total, **rejecting)
        early = progress.trained_early
        ledger = self.ledger
        interrupted = ledger.open_positions(progress.position, early)  # in the run before
        self.admission = Admission(limits, progress.step, progress.position, early, interrupted)
        self._follow_control()
        self._finished: dict[int, tuple[list[Group], Metrics]] = {}
        self._rejected: list[Group] = []  # since the last batch
        self._slot_freed = asyncio.Event()
        self._rollout_finished = asyncio.Event()
        await run_together(self._run_generation(), self._train_batches())

    async def _run_generation(self) -> None:
        async with together() as rollouts:
            for position in self.admission.interrupted:
                rollouts.start(self._roll_out(position))
            while not self.admission.exhausted:
                for position in self.admission.admit():
                    rollouts.start(self._roll_out(position))
                await self._slot_freed.wait()
                self._slot_freed.clear()

    async def _train_batches(self) -> None:
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
        if self.context.refill.active and not list(self.filter_groups(groups)):
            self._rejected += groups
            self.ledger.release(groups)
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
        self._slot_freed.set()  # the next batch may reject as many as this one
        finished = [self._finished.pop(position) for position in batch.positions]
        rejected = self._rejected
        self._rejected = []
        metrics = merged([metrics for _, metrics in finished]) | {
            "rollout/running": float(self.admission.running),
            "rollout/finished": float(self.admission.finished),
        }
        groups = [group for rolled_out, _ in finished for group in rolled_out]
        return self.assemble(groups, metrics, [*batch.positions, *batch.rejected], rejected)

    def _release(self) -> None:
        self._follow_control()
        if self.policy_version == self.global_step:  # the engines have this step's weights
            self.admission.sync(self.policy_version)
            self._slot_freed.set()

    def _follow_control(self) -> None:
        control = self.learner.control
        if control is not None and control.staleness_bound is not None:
            self.admission.max_staleness = control.staleness_bound


@PLANS.register("colocated_async")
class ColocatedAsyncRayPPOTrainer(FullyAsyncRayPPOTrainer):
    """Colocated and asynchronous: training begins when a batch is complete, not when all rollouts
    have ended.

    ```
    devices   generate (more prompts than a batch) ─▶ train ─▶ sync ─▶ generate ─▶ train ─▶ ...
    requests  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┄┄┄ wait ┄┄┄┄┄┄┄┄━━━━━━━━━━
    ```

    | who waits       | for what                                   | woken by                                          |
    |-----------------|--------------------------------------------|---------------------------------------------------|
    | generation loop | a free slot                                | as in ``fully_async``                             |
    | a rollout       | the engines                                | they answer or fail; the weight sync, which wakes |
    |                 |                                            | them, if they sleep                               |
    | training loop   | a batch that ``admission`` lets it take    | a rollout that finishes: the engines are awake    |
    | the policy      | the devices: the engines end all requests  | the engines' answers; a failure                   |
    | the engines     | the devices, and the new weights           | the weight sync that follows every training step  |

    Requests in flight when the policy takes the devices keep their tokens. They wait in the client,
    and continue as partial rollouts under the new weights. So no device waits for the longest
    response of a batch: while fewer sequences of old prompts are left than the engines can compute,
    those of newer prompts fill them. ``admission`` limits how many, and bounds the staleness as in
    ``fully_async``; the proof there does not depend on time.
    """

    shares_devices = "all"
    reads = tuple(  # the cache is freed: requests continue from their tokens
        key for key in FullyAsyncRayPPOTrainer.reads if key != "trainer.partial_rollout"
    )

    async def async_sync_policy_weights_to_inference_engines(self) -> None:
        """The engines sleep: no request must be paused."""
        await self.sync_policy_weights_to_inference_engines()


@PLANS.register("hybrid_async")
class HybridAsyncRayPPOTrainer(FullyAsyncRayPPOTrainer):
    """Fully asynchronous, with hybrid engines: the policy's devices generate until its next batch
    is complete.

    ```
    own devices       generate ──────────────────────────────────────────────────────────▶
    policy's devices  train ─▶ sync ─▶ (wait) wake, generate ─▶ sleep ─▶ train ─▶ sync ─▶ ...
                                                    requests ──▶ own devices
    ```

    | who waits       | for what                                   | woken by                                          |
    |-----------------|--------------------------------------------|---------------------------------------------------|
    | generation loop | a free slot                                | as in ``fully_async``                             |
    | a rollout       | an engine that is awake                    | it answers, fails or falls asleep: its requests   |
    |                 |                                            | continue at the others                            |
    | training loop   | a batch that ``admission`` lets it take    | a rollout that finishes                           |
    | training loop   | hybrid engines: to have the newest weights | the engines; a failure                            |
    | the policy      | its devices                                | the hybrid engines, when their requests are gone  |

    The hybrid engines wake if too few prompts are finished, requests wait for an engine, and the
    policy has waited as long as the last change of the devices took: so short waits are not made
    longer. They get the weights of the last sync, proven as for a replacement engine. A weight sync
    finds them asleep.
    """

    shares_devices = "hybrid"
    reads = (*FullyAsyncRayPPOTrainer.reads, "generator.hybrid_engines")

    async def _next_rollout(self) -> Rollout:
        with suppress(TimeoutError):
            async with asyncio.timeout(self.weight_updates.switch_s):
                return await super()._next_rollout()
        too_few = (
            self.admission.finished < self.cfg.trainer.train_batch_size
        )  # else it waits for one slow prompt
        if too_few and await self.context.client.waiting():
            await self.weight_updates.wake_engines()
        return await super()._next_rollout()
