"""How new weights reach the engines, and who has the devices meanwhile.

Invariant: a version is announced (``policy_version``) when every engine computes with it, and then
verified. Engines that share their devices with the policy (``trainer.placement.colocate_all``)
sleep from the beginning of a training step to the next sync, which wakes them; requests wait in
between. Hybrid engines, next to others, sleep until the policy waits for a batch.

| who waits                             | for what                        | woken by                           |
|---------------------------------------|---------------------------------|------------------------------------|
| a sync                                | the engines to take the weights | they do or fail; ``step_timeout_s``|
| ``partial_rollout=wait``, eval paused | rollouts in flight to end       | the generator; its own limits      |
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

from skyasync.config.schema.sampling import samples_as_scored
from skyasync.errors import UserError
from skyasync.rollout.generator_api import RolloutGate
from skyasync.utils.task_group import afterwards
from skyasync.weight_sync.colocation import Colocation
from skyasync.weight_sync.sync import Paused

if TYPE_CHECKING:
    from skyasync.trainer.context import RunContext

ENOUGH_TOKENS = 256  # as the verification prompts have at most; a few may be off by chance


class WeightSyncing(Protocol):
    """See ``skyasync.weight_sync.sync.WeightSync``."""

    async def sync(self, version: int, paused: Paused = nullcontext) -> object: ...
    async def verify(self, version: int) -> dict[str, float]: ...
    def sampled(self, version: int, gap: float) -> None: ...


class WeightUpdates:
    """Weight syncs of one run.

    Attributes:
        weight_sync: ``sync(version)`` and ``verify(version)``; set when the models are up.
        colocation: schedules devices that engines and policy share; None if they have their own.
        gate: rollouts for training enter through it, and can be kept out of the engines.
    """

    weight_sync: WeightSyncing

    def __init__(self, context: RunContext) -> None:
        self.colocation: Colocation | None = None
        self.gate = RolloutGate()
        self._cfg = context.cfg.trainer
        self._client = context.client
        self._progress = context.progress
        self._phases = context.phases
        self._comparable = samples_as_scored(context.cfg.generator.sampling_params)
        self._announced = False  # the engines have got weights at all
        self._wake_s = self._sleep_s = 0.0

    @property
    def switch_s(self) -> float:
        """Seconds that the devices' last change to hybrid engines took, and the one back."""
        if self._wake_s:
            return self._wake_s + self._sleep_s
        return 0.0

    def scheduled(self, last: bool) -> bool:
        """Whether weights are synced now: at first, every ``trainer.sync_interval`` steps, and in
        the end."""
        return last or not self._announced or self._progress.step % self._cfg.sync_interval == 0

    @asynccontextmanager
    async def syncing(self) -> AsyncIterator[None]:
        """Around a weight sync; after it, when the engines compute again, it is verified."""
        with self._phases.timed("sync"):
            async with self._phases.limited("weight sync"):
                yield
                self._progress.synced()
                self._announced = True
                self._phases.metrics |= await self.weight_sync.verify(self._progress.version)

    @asynccontextmanager
    async def engines_paused(self) -> AsyncIterator[None]:
        """Around an in-flight weight update: requests go on, or (``partial_rollout=recompute``) as
        new requests."""
        recompute = self._cfg.partial_rollout == "recompute"
        self._comparable = self._comparable and recompute  # else caches are of older weights
        await (self._client.cut() if recompute else self._client.pause("keep"))
        async with afterwards(self._client.resume):
            yield

    @asynccontextmanager
    async def without_rollouts(self) -> AsyncIterator[None]:
        """Let rollouts in flight end and none begin, inside of the block."""
        async with AsyncExitStack() as stack:
            await self._phases.waiting("rollouts", stack.enter_async_context(self.gate.closed()))
            yield

    def check_sampled_tokens(self, metrics: Mapping[str, float]) -> None:
        """Prove a sync by a batch's tokens of the trainer's own version, if they are enough.

        Raises:
            WeightSyncError: if the engines computed with something else.
        """
        enough = metrics.get("staleness/tokens_0", 0) >= ENOUGH_TOKENS
        if enough and self._comparable and "gap/mean" in metrics:
            self.weight_sync.sampled(self._progress.step, metrics["gap/mean"])

    async def offload_engines(self) -> None:
        """Put engines that share devices with the policy to sleep. Their requests continue at
        others, or wait."""
        if self.colocation is not None:
            began = self._phases.now()
            with self._phases.timed("sleep"):
                async with self._phases.limited("sleep of the engines"):
                    await self.colocation.give_devices_to_policy()
            self._sleep_s = self._phases.now() - began

    async def wake_engines(self) -> None:
        """Give hybrid engines the policy's devices, and the newest weights, until
        ``offload_engines``."""
        assert self.colocation is not None, "a plan with hybrid engines has a Colocation"
        began = self._phases.now()
        with self._phases.timed("wake"):
            async with self._phases.limited("wake-up of the engines"):
                await self.colocation.wake()
        self._wake_s = self._phases.now() - began

    def check_awake(self, plan: str) -> None:
        """Raises UserError if a plan generates between a training step and the sync that follows
        it."""
        if self.colocation is not None and not self.colocation.engines_are_awake:
            raise UserError(
                f"{plan} generates after training without a weight sync in between, when "
                f"trainer.placement.colocate_all=true has put the engines to sleep: sync first, or set "
                f"trainer.placement.colocate_all=false"
            )
