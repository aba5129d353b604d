"""The policy in this process: no cluster, no actors.

Invariant: the same worker classes do the same work as behind Ray, one call at a time in one thread, so the event
loop goes on meanwhile. For experiments that start many short runs, and for tests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from skyasync.config.schema import Config
from skyasync.weight_sync.update import WeightUpdate
from skyasync.workers.batch import TokenBatch, UpdateBatch
from skyasync.workers.policy import PolicyWorker
from skyasync.workers.reference import ReferenceWorker

T = TypeVar("T")


class LocalDispatch:
    """Implements ``WorkerDispatch`` with one rank.

    Args:
        with_reference: also hold the reference model.
        total_steps: optimizer steps of the run, for learning rates that decay.
    """

    def __init__(self, cfg: Config, *, with_reference: bool = False, total_steps: int = 0) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="policy")
        self._policy = PolicyWorker(cfg, threads=cfg.trainer.policy.threads, total_steps=total_steps)
        self._policy.setup()
        self._reference = ReferenceWorker(cfg) if with_reference else None
        if self._reference is not None:
            self._reference.setup()
        self._busy_s = 0.0

    async def policy_logprobs(self, batch: TokenBatch) -> Tensor:
        return await self._run(lambda: self._policy.logprobs(batch))

    async def reference_logprobs(self, batch: TokenBatch) -> Tensor:
        reference = self._reference
        if reference is None:
            raise RuntimeError("no reference model was loaded")
        return await self._run(lambda: reference.logprobs(batch))

    async def forward_backward(self, batch: UpdateBatch) -> None:
        found = await self._run(lambda: self._policy.forward_backward(batch))
        if batch.proximal_logprobs is None:
            batch.proximal_logprobs = found

    async def optimizer_step(self, schedule_step: int | None = None, scale: float = 1.0) -> dict[str, float]:
        return await self._run(lambda: self._policy.optimizer_step(schedule_step, scale))

    async def publish_weights(self, version: int) -> WeightUpdate:
        return WeightUpdate(version, "shared_memory", {"path": await self._run(self._policy.publish)})

    async def send_weights(self, update: WeightUpdate) -> None:
        """Nothing: engines fetch the file."""

    async def release_weights(self, update: WeightUpdate) -> None:
        await self._run(lambda: self._policy.release(update.info["path"]))

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return await self._run(lambda: self._policy.score(sequences))

    async def offload(self) -> None:
        for worker in filter(None, (self._policy, self._reference)):
            await self._run(worker.offload)

    async def onload(self) -> None:
        for worker in filter(None, (self._policy, self._reference)):
            await self._run(worker.onload)

    async def save(self, folder: Path) -> None:
        await self._run(lambda: self._policy.save(str(folder)))

    async def load(self, folder: Path) -> None:
        await self._run(lambda: self._policy.load(str(folder)))

    async def export(self, folder: Path) -> None:
        await self._run(lambda: self._policy.export(str(folder)))

    async def stats(self) -> dict[str, Any]:
        return {"busy_s": self._busy_s, "reference_busy_s": 0.0}

    async def shutdown(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], T]) -> T:
        def timed() -> T:
            start = time.monotonic()
            try:
                return work()
            finally:
                self._busy_s += time.monotonic() - start

        return await asyncio.get_running_loop().run_in_executor(self._thread, timed)
