"""The plan ``streamed``: groups are trained as they finish, on policy."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import count, takewhile

from skyasync.data.prompts import PromptBatch
from skyasync.rollout.types import Group, Prompt
from skyasync.trainer import RayPPOTrainer, Rollout
from skyasync.trainer.context import Metrics
from skyasync.trainer.plans import PLANS
from skyasync.trainer.rollouts import merged
from skyasync.utils.task_group import StrictTaskGroup, run_together, together


@dataclass
class Arrivals:
    """The rollouts of one batch, each in a slot, in the order of the prompt stream.

    A pure record, without asyncio. A rollout is accepted or rejected at its end.

    Args:
        in_order: a slot may be taken only after all slots before it.
        started: rollouts so far.
        portion: slots that are taken at once, fewer only at the end; 0 is all that may be taken.
            With it groups are trained together in the same way in whatever order rollouts end.
    """

    in_order: bool
    started: int
    portion: int = 0
    ended: int = 0
    accepted: list[Group] = field(default_factory=list)
    rejected: list[Group] = field(default_factory=list)
    metrics: list[Metrics] = field(default_factory=list)
    waiting: dict[int, list[Group]] = field(default_factory=dict)  # by slot, ended and not taken
    _next_slot: int = 0  # to be taken, if slots are taken in order

    def start(self) -> int:
        """The slot of another rollout."""
        self.started += 1
        return self.started - 1

    def end(
        self, slot: int, groups: list[Group], metrics: Metrics, *, accepted: bool = True
    ) -> None:
        """The rollout in this slot has ended."""
        self.ended += 1
        self.waiting[slot] = groups if accepted else []
        self.metrics.append(metrics)
        if not accepted:
            self.rejected += groups

    def take(self) -> list[Group]:
        """The groups that may be trained now, in the order of their slots."""
        groups: list[Group] = []
        while not groups:  # all rollouts of a portion may have been rejected
            slots = self._slots_to_take()
            if not slots:
                break
            self._next_slot = slots[-1] + 1
            for slot in slots:
                groups += self.waiting.pop(slot)
        self.accepted += groups
        return groups

    def _slots_to_take(self) -> list[int]:
        if not (self.in_order or self.portion):
            return sorted(self.waiting)
        slots = list(takewhile(self.waiting.__contains__, count(self._next_slot)))
        if not self.portion:
            return slots
        if len(slots) < self.portion and self.ended < self.started:
            return []
        return slots[: self.portion]

    @property
    def complete(self) -> bool:
        """Nothing is generated any more, and all groups have been taken."""
        return self.ended == self.started and not self.waiting


@PLANS.register("streamed")
class StreamedRayPPOTrainer(RayPPOTrainer):
    """Groups are trained as they finish, on policy, while stragglers are generated.

    ```
    engines    g0 g1 g2 g3 ............ g4 (a long one)
                 ╲  ╲                    ╲
    trainer       +0  +1+2+3   (waits)    +4  optimizer step ─▶ sync ─▶ next batch
    ```

    | who waits     | for what                                 | woken by                                            |
    |---------------|------------------------------------------|-----------------------------------------------------|
    | a rollout     | the engines                              | they answer or fail                                 |
    | training loop | a finished group that may be trained now | a rollout that ends; when all have, there is one or |
    |               |                                          | the batch is complete                               |
    | ``train``     | both: all rollouts, and the last update  | their end, or the first error, which cancels both   |
    | ``train``     | the weights in every engine              | the weight sync; nothing is in flight then          |

    Every sample is of the policy that it trains: staleness is 0 and nothing needs a correction.
    Gradients add up while groups come in; the loss's denominator, which only the whole batch knows,
    is applied by the optimizer step. The gradient is that of the synchronous plan but for the order
    in which it is summed.

    With mini-batches an optimizer step follows as soon as the next ``policy_mini_batch_size``
    groups, in the order of the prompt stream, are complete. Later groups of the batch are still of
    the policy before: the engines get weights at the end of the batch. That policy is then gone, so
    the behaviour log-probabilities take the place of the proximal ones.

    Settings that compare the prompts of a whole batch are not supported
    (``skyasync.config.schema.algorithm``).
    """

    streams = True
    reads = ("trainer.stream_groups",)

    async def train(self) -> None:
        for prompts in self.remaining_prompts():
            await self._step(prompts)
            await self.sync_policy_weights_to_inference_engines()
            await self.end_step(self.metrics)

    async def _step(self, prompts: PromptBatch) -> None:
        # With mini-batches there are several updates, and rollouts go on in between.
        several_updates = self.cfg.trainer.policy_mini_batch_size > 0
        portion = self.cfg.trainer.stream_groups
        self._arrivals = Arrivals(several_updates, len(prompts.prompts), portion)
        self._rollout_ended = asyncio.Event()
        self._positions = list(prompts.positions)

        async def roll_out_all() -> None:
            async with together() as rollouts:
                for slot, prompt in enumerate(prompts.prompts):
                    rollouts.start(self._roll_out(rollouts, prompt, slot))

        step = run_together(roll_out_all(), self._train_all())
        async with self.keeping_bad(self._rollout):
            if several_updates:
                # A step that has made some of its updates is not a state to save or resume from.
                await self.checkpointer.uninterrupted(step)
            else:
                await step

    async def _roll_out(self, rollouts: StrictTaskGroup, prompt: Prompt, slot: int) -> None:
        """One rollout: generate the groups of a prompt; a rejected one is replaced by another."""
        arrivals = self._arrivals
        refill = self.context.refill
        groups, metrics = await self.roll_out([prompt])
        if refill.active:  # the groups are postprocessed already
            accepted = bool(list(self.filter_groups(groups)))
        else:
            groups = list(self.postprocess_generator_output(groups))
            accepted = True  # ``prepare`` filters
        if not accepted and len(arrivals.rejected) + 1 < refill.max_rejected:
            replacement = refill.next_prompts(1)
            if replacement.prompts:
                self._positions += replacement.positions
                # The slot is opened before this one ends: else the batch would seem complete.
                new_slot = arrivals.start()
                rollouts.start(self._roll_out(rollouts, replacement.prompts[0], new_slot))
        arrivals.end(slot, groups, metrics, accepted=accepted)
        self._rollout_ended.set()

    async def _train_all(self) -> None:
        """The training loop of one batch, up to its last update."""
        groups_in_gradient = 0
        while not self._arrivals.complete:
            groups = self._arrivals.take()
            if groups:
                with self.timed("train"):
                    async with self.context.phases.limited("update"):
                        groups_in_gradient = await self._train_some(groups, groups_in_gradient)
            elif not self._arrivals.complete:
                self._rollout_ended.clear()
                await self.waiting("data", self._rollout_ended.wait())
        with self.timed("train"):
            self.checkpointer.between_steps = False
            await self.checkpointer.uninterrupted(self._last_step(update=groups_in_gradient > 0))

    async def _train_some(self, groups: list[Group], groups_in_gradient: int) -> int:
        """Add the gradient of groups, and make an update when a mini-batch is complete.

        Returns:
            How many groups are in the gradient that the next update will apply.
        """
        batch = await self.prepare(groups)
        if batch is None:
            return groups_in_gradient
        size = self.cfg.trainer.policy_mini_batch_size
        with self.timed("update"):
            # The first part completes the mini-batch that earlier groups began.
            for part, count in batch.mini_batches(size, first=size - groups_in_gradient):
                await self.forward_backward(part, complete=False)
                groups_in_gradient += count
                if groups_in_gradient == size:
                    self.checkpointer.between_steps = False
                    await self.checkpointer.uninterrupted(self.optimizer_step())
                    groups_in_gradient = 0
        return groups_in_gradient

    async def _last_step(self, *, update: bool) -> None:
        async with self.context.phases.limited("update"):
            if update:
                with self.timed("update"):
                    await self.optimizer_step()
        self.metrics.update(self.learner.finish())
        await self.finish_step(self._rollout())

    def _rollout(self) -> Rollout:
        """The groups of the batch that have been taken so far."""
        arrivals = self._arrivals
        return self.assemble(
            arrivals.accepted,
            merged(arrivals.metrics),
            self._positions,
            arrivals.rejected,
            postprocessed=True,
        )
