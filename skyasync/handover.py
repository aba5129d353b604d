"""How new weights reach the engines, and who has the devices meanwhile.

Invariant: a version is announced (``policy_version``) when every engine computes with it, and verified then. Engines
that share their devices with the policy (``trainer.placement.colocate_all``) sleep from the beginning of a training
step to the next sync, which wakes them; nothing is asked of them in between.

| who waits                             | for what                        | woken by                           |
|---------------------------------------|---------------------------------|------------------------------------|
| a sync                                | the engines to take the weights | they do or fail; ``step_timeout_s``|
| ``partial_rollout=wait``, eval paused | rollouts in flight to end       | the generator; its own limits      |
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from skyasync.cleanup import afterwards
from skyasync.errors import UserError
from skyasync.phases import Phases
from skyasync.rollout.gate import Gate
from skyasync.weight_sync.turns import DeviceTurns


class HandOver(Phases):
    """What ``RayPPOTrainer`` inherits: steps of its plans between two trainings."""

    inference_engine_client: Any
    weight_sync: Any
    gate: Gate
    global_step: int
    policy_version: int
    turns: DeviceTurns | None  # where engines and policy share devices

    async def sync_policy_weights_to_inference_engines(self) -> None:
        """Hand the newest weights to engines that are idle."""
        async with self._syncing():
            await self.weight_sync.sync(self.global_step)

    async def async_sync_policy_weights_to_inference_engines(self) -> None:
        """Hand the newest weights to engines that are busy; ``partial_rollout`` says what is in flight meanwhile."""
        client, partial_rollout = self.inference_engine_client, self.cfg.trainer.partial_rollout
        if partial_rollout == "wait":
            async with self.without_rollouts():
                return await self.sync_policy_weights_to_inference_engines()
        async with self._syncing():
            await (client.cut() if partial_rollout == "recompute" else client.pause("keep"))
            async with afterwards(client.resume):
                await self.weight_sync.sync(self.global_step)

    @asynccontextmanager
    async def _syncing(self) -> AsyncIterator[None]:
        """Around a hand-over of weights; behind it, when the engines compute again, it is verified."""
        with self.timed("sync", self._metrics):
            async with self._limited("weight sync"):
                yield
                self.policy_version = self.global_step
                self._metrics |= await self.weight_sync.verify(self.global_step)

    async def make_way_for_training(self) -> None:
        """Give devices that the policy shares with the engines to it; the next sync wakes them. They must be idle."""
        if self.turns is not None:
            with self.timed("sleep", self._metrics):
                async with self._limited("sleep of the engines"):
                    await self.turns.make_way_for_policy()

    def check_awake(self) -> None:
        """Raises UserError where a plan would generate between a training step and the sync that follows it."""
        if self.turns is not None and not self.turns.engines_are_awake:
            raise UserError(
                f"{type(self).__name__} generates after training without a weight sync in between, when "
                f"trainer.placement.colocate_all=true has put the engines to sleep: sync first, or set "
                f"trainer.placement.colocate_all=false"
            )

    @asynccontextmanager
    async def without_rollouts(self) -> AsyncIterator[None]:
        """Let rollouts in flight end and none begin, for as long as the block takes."""
        async with AsyncExitStack() as stack:
            await self.waiting("rollouts", stack.enter_async_context(self.gate.closed()))
            yield
