"""The plan ``fully_async``, and its variants on shared devices."""

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
    """Groups stream in as they finish, weights are synced in flight, and staleness is bounded.

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

    asynchronous = True  # ``max_staleness=0`` makes it synchronous, see ``__init__``
    reads: ClassVar[tuple[str, ...]] = (
        "trainer.max_staleness",
        "trainer.staleness_bound",
        "trainer.async_generation_ratio",
        "trainer.eval_mode",
        "generator.generate_batch_size",
        "generator.max_concurrent_rollouts",
        "trainer.partial_rollout",
    )

    def __init__(self, cfg: Config, *args: Any, **components: Any) -> None:
        # Set first: the base class checks that stale samples are corrected.
        self.asynchronous = cfg.trainer.max_staleness > 0
        super().__init__(cfg, *args, **components)

    async def train(self) -> None:
        self.admission = self._new_admission()
        self._follow_staleness_control()
        # Position -> the rollout's groups and metrics, until a batch takes them.
        self._finished_rollouts: dict[int, tuple[list[Group], Metrics]] = {}
        self._rejected_groups: list[Group] = []  # since the previous batch
        self._slot_freed = asyncio.Event()
        self._rollout_finished = asyncio.Event()
        await run_together(self._run_generation(), self._train_batches())

    def _new_admission(self) -> Admission:
        progress = self.context.progress
        refill = self.context.refill
        steps = inf
        max_rejected = inf
        if refill.active:
            max_rejected = refill.max_rejected
            # Steps that train fewer prompts leave more: the run's end bounds what is generated.
            if self.cfg.trainer.max_training_steps:
                steps = self.cfg.trainer.max_training_steps - self.global_step
        limits = AdmissionLimits.of(
            self.cfg, self.context.prompts.total, steps=steps, max_rejected=max_rejected
        )
        # Prompts that an interrupted run had started keep their versions.
        interrupted = self.ledger.open_positions(progress.position, progress.trained_early)
        return Admission(
            limits, progress.step, progress.position, progress.trained_early, interrupted
        )

    # ---------------------------------------------------------------- generation loop

    async def _run_generation(self) -> None:
        admission = self.admission
        async with together() as rollouts:
            for position in admission.interrupted:
                rollouts.start(self._roll_out(position))
            while not admission.exhausted:
                for position in admission.admit():
                    rollouts.start(self._roll_out(position))
                await self._slot_freed.wait()
                self._slot_freed.clear()

    async def _roll_out(self, position: int) -> None:
        """One rollout: generate the groups of a prompt, then finish or reject them."""
        groups, metrics = await self.roll_out([self.context.prompts.prompt(position)])
        if self.context.refill.active and not list(self.filter_groups(groups)):
            self._rejected_groups += groups
            self.ledger.release(groups)
            self.admission.reject(position)
            self._slot_freed.set()
        else:
            self._finished_rollouts[position] = groups, metrics
            self.admission.finish(position)
        self._rollout_finished.set()
        if self.cfg.generator.max_concurrent_rollouts:
            # A finished rollout keeps its slot, and no longer counts as concurrent.
            self._slot_freed.set()

    # ---------------------------------------------------------------- training loop

    async def _train_batches(self) -> None:
        while self.global_step < self.total_steps:
            rollout = await self.waiting("data", self._next_rollout())
            status = await self.train_on(rollout)
            await self.async_sync_policy_weights_to_inference_engines()
            # Generation goes on during the end of the step, which may evaluate and save. A
            # synchronous run generates nothing in that time.
            if self.asynchronous:
                self._release()
            await self.end_step(status)
            self._release()

    async def _next_rollout(self) -> Rollout:
        """Wait for a batch that ``admission`` allows, and assemble it."""
        while (batch := self.admission.take()) is None:
            self._rollout_finished.clear()
            await self._rollout_finished.wait()
        # Rejections are counted from zero again: ``admit`` may allow more prompts.
        self._slot_freed.set()
        groups: list[Group] = []
        rollout_metrics = []
        for position in batch.positions:
            rolled_out, metrics = self._finished_rollouts.pop(position)
            groups += rolled_out
            rollout_metrics.append(metrics)
        rejected_groups = self._rejected_groups
        self._rejected_groups = []
        batch_metrics = merged(rollout_metrics)
        batch_metrics["rollout/running"] = float(self.admission.running)
        batch_metrics["rollout/finished"] = float(self.admission.finished)
        positions = batch.positions + batch.rejected
        return self.assemble(groups, batch_metrics, positions, rejected_groups)

    def _release(self) -> None:
        """Free the slots of trained prompts if the engines have the weights of this step."""
        self._follow_staleness_control()
        if self.policy_version == self.global_step:
            self.admission.sync(self.policy_version)
            self._slot_freed.set()

    def _follow_staleness_control(self) -> None:
        """Admit by the bound that ``trainer.staleness_control`` has chosen, if it chooses one."""
        control = self.learner.control
        if control is not None and control.staleness_bound is not None:
            self.admission.max_staleness = control.staleness_bound


@PLANS.register("colocated_async")
class ColocatedAsyncRayPPOTrainer(FullyAsyncRayPPOTrainer):
    """Training begins when a batch is complete; other rollouts wait while it has the devices.

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
    # ``trainer.partial_rollout`` has no effect: sleeping engines lose their caches, so that
    # requests always continue from their tokens.
    reads = tuple(key for key in FullyAsyncRayPPOTrainer.reads if key != "trainer.partial_rollout")

    async def async_sync_policy_weights_to_inference_engines(self) -> None:
        """Sync as if no request were in flight: the engines sleep, and none must be paused."""
        await self.sync_policy_weights_to_inference_engines()


@PLANS.register("hybrid_async")
class HybridAsyncRayPPOTrainer(FullyAsyncRayPPOTrainer):
    """Fully asynchronous, and the policy's devices generate until its next batch is complete.

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
        # A wait shorter than a change of the devices is not worth one.
        with suppress(TimeoutError):
            async with asyncio.timeout(self.weight_updates.switch_s):
                return await super()._next_rollout()
        # With a full batch finished, training waits for one slow prompt: more engines would not
        # make it faster.
        too_few_finished = self.admission.finished < self.cfg.trainer.train_batch_size
        if too_few_finished and await self.context.client.waiting():
            await self.weight_updates.wake_engines()
        return await super()._next_rollout()
