"""The plan ``colocated_async``: policy and engines use the same devices in turn, and rollouts span training steps."""

from __future__ import annotations

from skyasync.trainer.plans import PLANS
from skyasync.trainer.plans.fully_async import FullyAsyncRayPPOTrainer

_NOT_READ = ("trainer.partial_rollout",)  # the cache is freed: requests continue from their tokens


@PLANS.register("colocated_async")
class ColocatedAsyncRayPPOTrainer(FullyAsyncRayPPOTrainer):
    """Colocated and asynchronous: training begins when a batch is complete, not when all rollouts have ended.

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

    Requests in flight when the policy takes the devices keep their tokens. They wait in the client, and continue as
    partial rollouts under the new weights. So no device waits for the longest response of a batch: while fewer
    sequences of old prompts are left than the engines can compute, those of newer prompts fill them. ``admission``
    limits how many, and bounds the staleness as in ``fully_async``; the proof there does not depend on time.
    """

    shares_devices = "all"
    reads = tuple(key for key in FullyAsyncRayPPOTrainer.reads if key not in _NOT_READ)

    async def async_sync_policy_weights_to_inference_engines(self) -> None:
        """The engines sleep: no request must be paused."""
        await self.sync_policy_weights_to_inference_engines()
