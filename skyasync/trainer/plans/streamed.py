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
    """The rollouts of one batch: each has a slot, in the order of the stream, and is accepted or
    rejected at its end.

    A pure record. ``in_order`` lets a group out only when all before it have been decided.
    ``portion`` lets out so many slots at a time, less only at the end: what is trained together is
    then the same, in whatever order rollouts end.
    """

    in_order: bool
    started: int
    portion: int = 0
    ended: int = 0
    accepted: list[Group] = field(default_factory=list)
    rejected: list[Group] = field(default_factory=list)
    metrics: list[Metrics] = field(default_factory=list)
    waiting: dict[int, list[Group]] = field(default_factory=dict)  # by slot: ended, not yet taken
    _next: int = 0  # the first slot that has not been taken

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
        """All groups that may be trained now (or a portion of them), in the order of their
        slots."""
        groups: list[Group] = []
        while not groups:  # all of a portion may have been rejected
            if self.in_order or self.portion:
                slots = list(takewhile(self.waiting.__contains__, count(self._next)))
            else:
                slots = sorted(self.waiting)
            if self.portion:
                enough = len(slots) >= self.portion or self.ended == self.started
                slots = slots[: self.portion] if enough else []
            if not slots:
                break
            self._next = slots[-1] + 1
            for slot in slots:
                groups += self.waiting.pop(slot)
        self.accepted += groups
        return groups

    @property
    def complete(self) -> bool:
        """Nothing is generated any more, and everything has been taken."""
        return self.ended == self.started and not self.waiting


@PLANS.register("streamed")
class StreamedRayPPOTrainer(RayPPOTrainer):
    """Streamed: on policy, and yet overlapped. Groups are trained as they finish, while stragglers
    are generated.

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
        several = self.cfg.trainer.policy_mini_batch_size > 0  # updates, with generation in between
        self._arrivals = Arrivals(several, len(prompts.prompts), self.cfg.trainer.stream_groups)
        self._arrived = asyncio.Event()
        self._positions = list(prompts.positions)

        async def roll_out_all() -> None:
            async with together() as rollouts:
                for slot, prompt in enumerate(prompts.prompts):
                    rollouts.start(self._roll_out(rollouts, prompt, slot))

        both = run_together(roll_out_all(), self._train_all())
        async with self.keeping_bad(self._rollout):
            await (self.checkpointer.uninterrupted(both) if several else both)

    async def _roll_out(self, rollouts: StrictTaskGroup, prompt: Prompt, slot: int) -> None:
        arrivals = self._arrivals
        refill = self.context.refill
        groups, metrics = await self.roll_out([prompt])
        if not refill.active:
            groups = list(self.postprocess_generator_output(groups))
        accepted = not refill.active or bool(list(self.filter_groups(groups)))
        if not accepted and len(arrivals.rejected) + 1 < refill.most_rejected:
            more = refill.next_prompts(1)
            if more.prompts:
                self._positions += more.positions
                rollouts.start(self._roll_out(rollouts, more.prompts[0], arrivals.start()))
        arrivals.end(slot, groups, metrics, accepted=accepted)
        self._arrived.set()

    async def _train_all(self) -> None:
        in_gradient = 0
        while not self._arrivals.complete:
            groups = self._arrivals.take()
            if groups:
                with self.timed("train"):
                    async with self.context.phases.limited("update"):
                        in_gradient = await self._train_some(groups, in_gradient)
            elif not self._arrivals.complete:
                self._arrived.clear()
                await self.waiting("data", self._arrived.wait())
        with self.timed("train"):
            self.checkpointer.between_steps = False
            await self.checkpointer.uninterrupted(self._last_step(update=in_gradient > 0))

    async def _train_some(self, groups: list[Group], in_gradient: int) -> int:
        """Add their gradient, and step when a mini-batch is complete; returns how many groups wait
        for the step."""
        batch = await self.prepare(groups)
        size = self.cfg.trainer.policy_mini_batch_size
        if batch is None:
            return in_gradient
        with self.timed("update"):
            for part, count in batch.mini_batches(size, first=size - in_gradient):
                await self.forward_backward(part, complete=False)
                in_gradient += count
                if in_gradient == size:
                    self.checkpointer.between_steps = False
                    await self.checkpointer.uninterrupted(self.optimizer_step())
                    in_gradient = 0
        return in_gradient

    async def _last_step(self, *, update: bool) -> None:
        async with self.context.phases.limited("update"):
            if update:
                with self.timed("update"):
                    await self.optimizer_step()
        self.metrics.update(self.learner.finish())
        await self.finish_step(self._rollout())

    def _rollout(self) -> Rollout:
        """The groups of the batch that have been taken so far."""
        done = self._arrivals
        return self.assemble(
            done.accepted, merged(done.metrics), self._positions, done.rejected, postprocessed=True
        )
