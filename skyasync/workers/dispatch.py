"""The policy's and the reference's ranks as Ray actors, behind one object.

Invariant: a batch is cut into one shard per rank, and whatever comes back is in the batch's order; how the ranks are
called, and fail, is in ``skyasync.workers.ranks``.

    trainer ──▶ dispatch ──▶ one shard of the batch per rank (object store, once) ──▶ actors
                   ▲                                                                    │
                   └───────────── results in the batch's order ◀────────────────────────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.registry import user_parts
from skyasync.weight_sync.update import WeightUpdate
from skyasync.workers.batch import TokenBatch, UpdateBatch
from skyasync.workers.broadcast import Broadcast
from skyasync.workers.ranks import RankGroup, WorkerPlacement, joined, split_for_ranks


class RayWorkerDispatch:
    """Implements :class:`skyasync.workers.protocol.WorkerDispatch`.

    Making it starts the ranks' processes and waits for nothing; :meth:`start` loads the models.

    Args:
        reference: None if nothing asks for the reference model.
        weight_sync_backend: how the engines expect the weights, ``shared_memory`` or ``nccl``.
    """

    def __init__(
        self,
        cfg: Config,
        policy: WorkerPlacement,
        reference: WorkerPlacement | None = None,
        weight_sync_backend: str = "shared_memory",
    ) -> None:
        self._cfg = cfg
        self._policy = RankGroup("skyasync.workers.policy:PolicyWorker", policy)
        self._reference = RankGroup("skyasync.workers.reference:ReferenceWorker", reference) if reference else None
        workers = cfg.generator.num_inference_engines * cfg.generator.inference_engine_tensor_parallel_size
        self._broadcast = Broadcast(self._policy, workers) if weight_sync_backend == "nccl" else None

    def set_threads(self, threads: int) -> None:
        """CPU threads of each policy rank; call before ``start``."""
        trainer = self._cfg.trainer
        trainer = replace(trainer, policy=replace(trainer.policy, threads=threads))
        self._cfg = replace(self._cfg, trainer=trainer)

    async def start(self, total_steps: int = 0) -> None:
        """Load the models. ``cfg.trainer.policy.model.path`` is a folder or hub name.

        Args:
            total_steps: optimizer steps of the run, for learning rates that decay.
        """
        loading = [self._policy.start(self._cfg, total_steps=total_steps, parts=user_parts())]
        if self._reference is not None:
            loading.append(self._reference.start(self._cfg))
        try:
            async with asyncio.timeout(self._cfg.trainer.step_timeout_s):
                await asyncio.gather(*loading)
        except BaseException:
            await self.shutdown()
            raise

    async def policy_logprobs(self, batch: TokenBatch) -> Tensor:
        return await self._policy.logprobs(batch)

    async def reference_logprobs(self, batch: TokenBatch) -> Tensor:
        if self._reference is None:
            raise RuntimeError("no reference model was started: nothing in the configuration asked for one")
        return await self._reference.logprobs(batch)

    async def forward_backward(self, batch: UpdateBatch) -> None:
        shards = split_for_ranks(batch, self._policy.ranks)
        pieces = await self._policy.call_each("forward_backward", [batch.select(rows).trim() for rows in shards])
        if batch.proximal_logprobs is None:
            batch.proximal_logprobs = joined(batch, shards, pieces)

    async def optimizer_step(self, schedule_step: int | None = None, scale: float = 1.0) -> dict[str, float]:
        return (await self._policy.call("optimizer_step", schedule_step, scale))[0]

    async def publish_weights(self, version: int) -> WeightUpdate:
        if self._broadcast is not None:
            return await self._broadcast.publish(version)
        path = (await self._policy.call("publish"))[0]
        return WeightUpdate(version=version, backend="shared_memory", info={"path": path})

    async def send_weights(self, update: WeightUpdate) -> None:
        if self._broadcast is not None:
            await self._broadcast.send()

    async def release_weights(self, update: WeightUpdate) -> None:
        if self._broadcast is None:
            await self._policy.call_first("release", update.info["path"])

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return (await self._policy.call("score", sequences))[0]

    async def offload(self) -> None:
        """Weights and moments to host memory, and the reference model's if it is on the same devices.

        Until ``onload`` nothing can be asked of them but ``save`` and ``load``.
        """
        await asyncio.gather(*(model.call("offload") for model in self._on_the_policys_devices()))

    async def onload(self) -> None:
        """Undo ``offload``, bit for bit."""
        await asyncio.gather(*(model.call("onload") for model in self._on_the_policys_devices()))

    def _on_the_policys_devices(self) -> list[RankGroup]:
        shared = self._reference if self._cfg.trainer.placement.colocate_policy_ref else None
        return [model for model in (self._policy, shared) if model is not None]

    async def save(self, folder: Path) -> None:
        await self._policy.call("save", str(folder))
        _check_arrived(folder)

    async def load(self, folder: Path) -> None:
        await self._policy.call("load", str(folder))

    async def export(self, folder: Path) -> None:
        await self._policy.call("export", str(folder))

    async def stats(self) -> dict[str, Any]:
        return {"busy_s": self._policy.busy_s, "reference_busy_s": self._reference.busy_s if self._reference else 0.0}

    async def shutdown(self) -> None:
        """Kill the actors; safe to call twice."""
        self._policy.kill()
        if self._reference is not None:
            self._reference.kill()


def _check_arrived(folder: Path) -> None:
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            f"the policy's processes wrote {folder} on another machine, where this one cannot see it: "
            f"trainer.ckpt_path must be a folder that all nodes share"
        )
