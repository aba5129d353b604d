"""A dispatch whose ranks are processes without Ray, and which keeps the gradients."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from skyasync.config.schema import Config
from skyasync.models.batch import UpdateBatch
from skyasync.models.fsdp.backend import FSDPBackend
from skyasync.weight_sync.transfers.base import WeightTransfer
from skyasync.weight_sync.transfers.file import remove_weights
from skyasync.weight_sync.update import WeightUpdate
from skyasync.workers.policy import PolicyWorker
from skyasync.workers.ranks import joined, split_for_ranks
from tests.workers.processes import Rank, Ranks


class _DoubleBackend(FSDPBackend):
    def master_dtype(self) -> torch.dtype:
        return torch.float64


class DoubleWorker(PolicyWorker):
    """Computes everything in float64, and publishes weights in the float32 that an engine has."""

    def new_backend(self) -> FSDPBackend:
        return _DoubleBackend()

    def setup(self, *args: Any) -> None:
        super().setup(*args)
        self.backend.dtype = torch.float32


class RanksDispatch(WeightTransfer):
    """The part of ``Dispatch`` that a run with one policy calls.

    Attributes:
        rows: of every ``forward_backward``, the number of rows per rank.
    """

    def __init__(
        self, cfg: Config, ranks: Ranks, worker: type[PolicyWorker] = PolicyWorker
    ) -> None:
        self._ranks = ranks
        self.rows: list[list[int]] = []
        ranks.set_up(worker, cfg)
        ranks.call(_note_gradients)

    def gradients(self) -> list[Tensor]:
        """The gradients of every optimizer step, as it changed the weights."""
        return [torch.from_numpy(found) for found in self._ranks.call(_noted)[0]]

    async def start(self, total_steps: int = 0) -> None: ...

    async def forward_backward(self, batch: UpdateBatch, role: str = "policy") -> None:
        shards = split_for_ranks(batch, self._ranks.count)
        self.rows.append([len(rows) for rows in shards])
        letters = [pickle.dumps(batch.select(rows).trim()) for rows in shards]
        pieces = [pickle.loads(answer) for answer in await self._call(_forward_backward, letters)]
        if batch.proximal_logprobs is None:
            batch.proximal_logprobs = joined(batch, shards, pieces)

    async def optimizer_step(
        self,
        schedule_step: int | None = None,
        scale: float = 1.0,
        role: str = "policy",
        **changes: Any,
    ) -> dict[str, float]:
        return (await self._call(_method, "optimizer_step", schedule_step, scale))[0]

    proves_content = True

    @property
    def transfer(self) -> WeightTransfer:
        return self

    async def publish(self, version: int) -> WeightUpdate:
        written = (await self._call(_method, "transfer_weights", "file", "write"))[0]
        return WeightUpdate(version, "shared_memory", {"path": written[0]})

    async def release(self, update: WeightUpdate) -> None:
        remove_weights(update.info["path"])

    async def for_late_engine(self, version: int) -> WeightUpdate:
        raise NotImplementedError

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return (await self._call(_method, "score", sequences))[0]

    async def stats(self) -> dict[str, Any]:
        return {"busy_s": 0.0, "reference_busy_s": 0.0}

    async def shutdown(self) -> None: ...

    async def _call(self, *call: Any) -> list[Any]:
        return await asyncio.to_thread(self._ranks.call, *call)


def _forward_backward(rank: Rank, letters: list[bytes]) -> bytes:
    return pickle.dumps(rank.worker.forward_backward(pickle.loads(letters[rank.rank])))


def _method(rank: Rank, name: str, *args: Any) -> Any:
    return getattr(rank.worker, name)(*args)


def _note_gradients(rank: Rank) -> None:
    found, clip = rank.notes.setdefault("gradients", []), rank.worker.backend._clip

    def noted() -> float:
        found.append(
            torch.cat(
                [_whole(p.grad).flatten() for p in rank.worker.backend.model.parameters()]
            ).numpy()
        )
        return clip()

    rank.worker.backend._clip = noted


def _whole(gradient: Tensor) -> Tensor:
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()


def _noted(rank: Rank) -> list[Any]:
    return rank.notes["gradients"]
