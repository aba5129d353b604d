"""The trainer's side of a weight hand-over by CUDA IPC; see ``skyasync.weight_sync.cuda_ipc`` for both ends.

Invariant: the ranks pack a part when every engine that lives has answered for the one before. Who shares whose GPU
follows from the places alone (``colocated_rank``); the engines compare the GPUs' own names.

An engine that comes late finds the policy in host memory, as it was sent: the weights are gathered there and lent to it
by host memory, for as long as it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from skyasync.inference.settings import colocated_rank
from skyasync.weight_sync.cuda_ipc import message
from skyasync.weight_sync.update import CUDA_IPC, WeightUpdate


class Policy(Protocol):
    """The policy's ranks; see ``RankGroup``."""

    async def call(self, method: str, *args: object) -> list[Any]: ...
    async def call_first(self, method: str, *args: object) -> object: ...


class Parts:
    """Hands parts from the policy's ranks to engines on their GPUs.

    Args:
        living: the engines that take part in the next sync, by their places.
    """

    def __init__(self, policy: Policy, ranks: int, living: Callable[[], Sequence[int]]) -> None:
        self._policy, self._ranks, self._living = policy, ranks, living

    async def begin(self, version: int) -> WeightUpdate:
        """The update that the parts will be of; nothing is packed yet."""
        return WeightUpdate(version, CUDA_IPC, {"in_parts": True})

    async def next(self, update: WeightUpdate) -> WeightUpdate | None:
        """A part for all engines, which have loaded the one before; None behind the last."""
        if "part" not in update.info:
            living = self._living()
            beside = [[e for e in living if colocated_rank(e, self._ranks) == rank] for rank in range(self._ranks)]
            await self._policy.call("begin_parts", beside)
        elif update.info["last"]:
            return None
        return replace(update, info=message(await self._policy.call("pack_part")))

    async def end(self) -> None:
        await self._policy.call("end_parts")

    async def alone(self, version: int) -> WeightUpdate:
        """All weights, for one engine that comes late; the policy is in host memory."""
        info = (await self._policy.call("lend"))[0]
        await self._policy.call_first("prove_lent")
        return WeightUpdate(version, "shared_memory", info | {"late": True})

    async def forget(self, update: WeightUpdate) -> None:
        """``alone`` has been read, or will not be."""
        if update.backend != CUDA_IPC:
            await self._policy.call_first("forget_lent")
