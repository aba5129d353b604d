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

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Protocol

from skyasync.cleanup import afterwards
from skyasync.config.sampling import samples_as_scored
from skyasync.config.schema import Config
from skyasync.engines.protocol import PauseMode
from skyasync.errors import UserError
from skyasync.rollout.gate import Gate
from skyasync.training.phases import Phases
from skyasync.training.progress import Progress
from skyasync.weight_sync.colocation import Colocation
from skyasync.weight_sync.sync import Paused

ENOUGH_TOKENS = 256  # as the probe has at most; a few may be off by chance


class WeightSyncing(Protocol):
    """The way of the weights; see ``skyasync.weight_sync.sync.WeightSync``."""

    async def sync(self, version: int, paused: Paused = nullcontext) -> object: ...
    async def verify(self, version: int) -> dict[str, float]: ...


class Client(Protocol):
    """What is asked of the engines while weights are on their way to them."""

    async def cut(self) -> None: ...
    async def pause(self, mode: PauseMode) -> None: ...
    async def resume(self) -> None: ...


class HandOver:
    """The way of the weights from the trained model to the engines.

    Attributes:
        weight_sync: ``sync(version)`` and ``verify(version)``; set when the models are up.
        turns: whose turn it is on devices that engines and policy share; None where they have their own.
    """

    def __init__(self, cfg: Config, client: Client, progress: Progress, phases: Phases) -> None:
        self.weight_sync: WeightSyncing
        self.turns: Colocation | None = None
        self._cfg, self._client, self._progress, self._phases = cfg.trainer, client, progress, phases
        self._gate = Gate()  # where rollouts for training can be kept out of the engines
        self._comparable = samples_as_scored(cfg.generator.sampling_params)
        self._announced = False  # the engines have got weights at all

    def due(self, last: bool) -> bool:
        """Whether weights are handed over now: first of all, every ``trainer.sync_interval`` steps, and in the end."""
        step = self._progress.step
        return last or not self._announced or step % self._cfg.sync_interval == 0

    @asynccontextmanager
    async def engines_paused(self) -> AsyncIterator[None]:
        """Around a swap under the requests in flight: they go on, or (``partial_rollout=recompute``) in a new piece."""
        client = self._client
        self._comparable = self._comparable and self._cfg.partial_rollout == "recompute"  # caches of older weights
        await (client.cut() if self._cfg.partial_rollout == "recompute" else client.pause("keep"))
        async with afterwards(client.resume):
            yield

    def look_at_tokens(self, metrics: Mapping[str, float]) -> None:
        """What a batch's tokens of the trainer's own version say of the sync that brought it; few say nothing.

        Raises:
            WeightSyncError: that the engines computed with something else.
        """
        judge = getattr(self.weight_sync, "sampled", None)
        enough = metrics.get("staleness/tokens_0", 0) >= ENOUGH_TOKENS
        if judge and enough and self._comparable and "gap/mean" in metrics:
            judge(self._progress.step, metrics["gap/mean"])

    @asynccontextmanager
    async def syncing(self) -> AsyncIterator[None]:
        """Around a hand-over of weights; behind it, when the engines compute again, it is verified."""
        with self._phases.timed("sync"):
            async with self._phases.limited("weight sync"):
                yield
                self._progress.handed_over()
                self._announced = True
                self._phases.metrics |= await self.weight_sync.verify(self._progress.version)

    async def make_way_for_training(self) -> None:
        """Give devices that the policy shares with the engines to it; the next sync wakes them. They must be idle."""
        if self.turns is not None:
            with self._phases.timed("sleep"):
                async with self._phases.limited("sleep of the engines"):
                    await self.turns.make_way_for_policy()

    def check_awake(self, plan: str) -> None:
        """Raises UserError where a plan would generate between a training step and the sync that follows it."""
        if self.turns is not None and not self.turns.engines_are_awake:
            raise UserError(
                f"{plan} generates after training without a weight sync in between, when "
                f"trainer.placement.colocate_all=true has put the engines to sleep: sync first, or set "
                f"trainer.placement.colocate_all=false"
            )

    @asynccontextmanager
    async def rollout(self) -> AsyncIterator[None]:
        """Around the rollouts of a training step, which ``without_rollouts`` keeps out."""
        async with self._gate.entered():
            yield

    @asynccontextmanager
    async def without_rollouts(self) -> AsyncIterator[None]:
        """Let rollouts in flight end and none begin, for as long as the block takes."""
        async with AsyncExitStack() as stack:
            await self._phases.waiting("rollouts", stack.enter_async_context(self._gate.closed()))
            yield
