"""The trainer's side of a weight hand-over by NCCL; see ``skyasync.weight_sync.nccl`` for both ends.

Invariant: a broadcast is started before its message is handed to the engines and awaited after they have
answered, so both ends meet inside NCCL. If the engines failed, the ranks stay there: the wait for them has a limit,
and the run, which ends with the engines' error, kills them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from skyasync.weight_sync.nccl import Rendezvous
from skyasync.weight_sync.update import WeightUpdate

if TYPE_CHECKING:
    from skyasync.workers.dispatch import RankGroup

GRACE_S = 60.0


class Broadcast:
    """Sends from the policy's ranks to ``engine_workers`` GPUs of engines."""

    def __init__(self, policy: RankGroup, engine_workers: int) -> None:
        self._policy, self._engine_workers = policy, engine_workers
        self._sending: asyncio.Future[Any] | None = None
        self._open = False

    async def publish(self, version: int) -> WeightUpdate:
        if not self._open:
            address, port = await self._policy.call_first("free_address")
            await self._policy.call("open_broadcast", Rendezvous(address, port, self._engine_workers))
            self._open = True
        update: WeightUpdate = await self._policy.call_first("announce", version)
        self._sending = asyncio.ensure_future(self._policy.call("broadcast"))
        return update

    async def release(self) -> None:
        """Wait until the broadcast has ended.

        Raises:
            TimeoutError: if it does not end soon after the engines have answered.
        """
        sending, self._sending = self._sending, None
        if sending is not None:
            await asyncio.wait_for(sending, GRACE_S)
