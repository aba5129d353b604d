"""Weight updates of the engines, and the devices that engines and policy share.

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

# As many as the verification prompts have at most: with fewer, chance decides.
ENOUGH_TOKENS = 256


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
        # Engines sample from the distribution that the trainer computes log-probabilities of.
        self._comparable = samples_as_scored(context.cfg.generator.sampling_params)
        self._has_version = False  # no version yet
        self._wake_s = 0.0
        self._sleep_s = 0.0

    @property
    def switch_s(self) -> float:
        """Seconds that the last change of the devices to hybrid engines took, and the one back."""
        if not self._wake_s:  # no change yet: the first wait is not delayed
            return 0.0
        return self._wake_s + self._sleep_s

    def scheduled(self, *, final: bool) -> bool:
        """Whether weights are synced now: first, every ``trainer.sync_interval`` steps, and last.

        Args:
            final: the training step was the run's last one.
        """
        return final or not self._has_version or self._progress.step % self._cfg.sync_interval == 0

    async def sync(self, version: int) -> None:
        """Give the weights of this training step to idle engines."""
        async with self._syncing():
            await self.weight_sync.sync(version)

    async def sync_in_flight(self, version: int) -> None:
        """Give the weights of this training step to busy engines, which are paused for it."""
        async with self._syncing():
            await self.weight_sync.sync(version, self.engines_paused)

    @asynccontextmanager
    async def _syncing(self) -> AsyncIterator[None]:
        """Measure and announce a weight sync, and verify it when the engines compute again."""
        with self._phases.timed("sync"):
            async with self._phases.limited("weight sync"):
                yield
                self._progress.synced()
                self._has_version = True
                self._phases.metrics |= await self.weight_sync.verify(self._progress.version)

    @asynccontextmanager
    async def engines_paused(self) -> AsyncIterator[None]:
        """Pause the engines inside the block.

        Requests continue after it with their caches, or without (``partial_rollout=recompute``).
        """
        if self._cfg.partial_rollout == "recompute":
            await self._client.cut()
        else:
            # From here on tokens are computed from caches of older weights.
            self._comparable = False
            await self._client.pause("keep")
        async with afterwards(self._client.resume):
            yield

    @asynccontextmanager
    async def without_rollouts(self) -> AsyncIterator[None]:
        """Wait for rollouts in flight to end; no rollout begins inside the block."""
        async with AsyncExitStack() as stack:
            await self._phases.waiting("rollouts", stack.enter_async_context(self.gate.closed()))
            yield

    def check_sampled_tokens(self, metrics: Mapping[str, float]) -> None:
        """Verify a sync by a batch's tokens of the trainer's version, if there are enough of them.

        Raises:
            WeightSyncError: if the engines computed with other weights.
        """
        enough = metrics.get("staleness/tokens_0", 0) >= ENOUGH_TOKENS
        if enough and self._comparable and "gap/mean" in metrics:
            self.weight_sync.sampled(self._progress.step, metrics["gap/mean"])

    async def offload_engines(self) -> None:
        """Put engines that share devices with the policy to sleep.

        Their requests continue at other engines, or wait.
        """
        phases = self._phases
        if self.colocation is not None:
            began_s = phases.now()
            with phases.timed("sleep"):
                async with phases.limited("sleep of the engines"):
                    await self.colocation.give_devices_to_policy()
            self._sleep_s = phases.now() - began_s

    async def wake_engines(self) -> None:
        """Give hybrid engines the policy's devices and the newest weights.

        They have the devices until ``offload_engines``.
        """
        assert self.colocation is not None, "a plan with hybrid engines has a Colocation"
        phases = self._phases
        began_s = phases.now()
        with phases.timed("wake"):
            async with phases.limited("wake-up of the engines"):
                await self.colocation.wake()
        self._wake_s = phases.now() - began_s

    def check_awake(self, plan: str) -> None:
        """Raise UserError if a plan generates between a training step and its weight sync."""
        if self.colocation is not None and not self.colocation.engines_are_awake:
            raise UserError(
                f"{plan} generates after training without a weight sync in between, when "
                f"trainer.placement.colocate_all=true has put the engines to sleep: sync first, or set "
                f"trainer.placement.colocate_all=false"
            )
