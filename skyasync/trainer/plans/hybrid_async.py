"""The plan ``hybrid_async``: ``fully_async``, with engines on the policy's devices while the policy waits."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from skyasync.trainer import Rollout
from skyasync.trainer.plans import PLANS
from skyasync.trainer.plans.fully_async import FullyAsyncRayPPOTrainer


@PLANS.register("hybrid_async")
class HybridAsyncRayPPOTrainer(FullyAsyncRayPPOTrainer):
    """Fully asynchronous, with hybrid engines: the policy's devices generate until its next batch is complete.

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

    The hybrid engines wake if too few prompts are finished, requests wait for an engine, and the policy has waited as
    long as the last change of the devices took: so short waits are not made longer. They get the weights of the last
    sync, proven as for a replacement engine. A weight sync finds them asleep.
    """

    shares_devices = "hybrid"
    reads = (*FullyAsyncRayPPOTrainer.reads, "generator.hybrid_engines")

    async def _next_rollout(self) -> Rollout:
        with suppress(TimeoutError):
            async with asyncio.timeout(self.weight_updates.switch_s):
                return await super()._next_rollout()
        too_few = self.admission.finished < self.cfg.trainer.train_batch_size  # else it waits for one slow prompt
        if too_few and await self.context.client.waiting():
            await self.weight_updates.wake_engines()
        return await super()._next_rollout()
