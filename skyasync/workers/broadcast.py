"""The trainer's side of a weight hand-over by NCCL; see ``skyasync.weight_sync.nccl`` for both ends.

Invariant: ``send`` runs while the engines take the update, so both ends meet inside NCCL. If either fails, the other
stays there: whoever runs both waits for neither, and the run, which ends with the first error, kills them.
"""

from __future__ import annotations

from skyasync.weight_sync.nccl import Rendezvous
from skyasync.weight_sync.update import WeightUpdate
from skyasync.workers.ranks import RankGroup


class Broadcast:
    """Sends from the policy's ranks to ``engine_workers`` GPUs of engines."""

    def __init__(self, policy: RankGroup, engine_workers: int) -> None:
        self._policy, self._engine_workers = policy, engine_workers
        self._open = False

    async def publish(self, version: int) -> WeightUpdate:
        """The message for the engines; nothing is sent yet."""
        if not self._open:
            address, port = await self._policy.call_first("free_address")
            await self._policy.call("open_broadcast", Rendezvous(address, port, self._engine_workers))
            self._open = True
        return await self._policy.call_first("announce", version)

    async def send(self) -> None:
        """Ends when every engine has the weights."""
        await self._policy.call("broadcast")
