"""The trainer's side of a weight hand-over by NCCL; see ``skyasync.weight_sync.nccl`` for both ends.

Invariant: ``send`` runs while the engines take the update, so both ends meet inside NCCL. A group has the engines that
live when the update is published: others, or other policy ranks, form a new one, with a rendezvous of its own. Who
dies inside leaves the others waiting there, which nothing but their end ends: whoever runs both gives them up.

An engine that comes late meets the ranks alone, while the weights are those that were sent last: optimizer steps wait
for that, and where one has been made the latecomer waits for the next sync.

| who waits                    | for what                            | woken by                                  |
|------------------------------|-------------------------------------|-------------------------------------------|
| ``send``                     | the engines' ``update_weights``     | NCCL; ``give_up``, which ends the ranks   |
| ``changing``                 | a latecomer's weights to be sent    | ``settle``                                |
| ``settle``                   | the end of what was sent alone      | the ranks; ``SETTLE_S``, then ``give_up`` |
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol, cast

from skyasync.weight_sync.nccl import Rendezvous
from skyasync.weight_sync.update import WeightsMovedError, WeightUpdate

SETTLE_S = 60.0


class Policy(Protocol):
    """The policy's ranks; see ``RankGroup``."""

    async def call(self, method: str, *args: object) -> list[Any]: ...
    async def call_first(self, method: str, *args: object) -> object: ...
    def give_up(self, reason: str, cause: BaseException | None = None) -> None: ...


class Broadcast:
    """Sends from the policy's ranks to engines.

    Args:
        workers: GPUs of an engine.
        living: the engines that take part in the next sync, by their places.
    """

    def __init__(self, policy: Policy, workers: int, living: Callable[[], Sequence[int]]) -> None:
        self._policy, self._workers, self._living = policy, workers, living
        self._members: list[int] | None = None  # of the group that is there; None: there is none, or a latecomer's
        self._moved = False  # the weights are not those that were sent last
        self._resting = asyncio.Lock()  # while nobody may change them
        self._alone: asyncio.Task[Any] | None = None  # sends to a latecomer

    async def publish(self, version: int) -> WeightUpdate:
        """The message for the engines; nothing is sent yet."""
        members = list(self._living())
        if members != self._members:
            await self._form(len(members))
            self._members = members
        self._moved = False
        return await self._announce(version, members)

    async def send(self) -> None:
        """Ends when every engine has them."""
        if self._members:
            await self._policy.call("broadcast")

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """Around what changes the weights."""
        async with self._resting:
            self._moved = True
            yield

    async def publish_alone(self, version: int) -> WeightUpdate:
        """The message for one engine, which comes late; from here on they are sent, until ``settle``.

        Raises:
            WeightsMovedError: if they have changed since they were sent to the others.
        """
        await self._resting.acquire()
        try:
            if self._moved:
                raise WeightsMovedError("the weights are not those that the other engines have any more")
            self._members = None
            await self._form(1)
            update = await self._announce(version, None)
        except BaseException:
            self._resting.release()
            raise
        self._alone = asyncio.ensure_future(self._policy.call("broadcast"))
        return update

    async def settle(self) -> None:
        """The latecomer has them, or has failed; then the ranks may be waiting for it, and are given up."""
        sending, self._alone = self._alone, None
        if sending is None:
            return
        try:
            await asyncio.wait({sending}, timeout=SETTLE_S)
            if not sending.done():
                self.give_up("an engine that came late has not met them in its weight sync")
            elif error := sending.exception():
                self.give_up("the weights could not be sent to an engine that came late", error)
        finally:
            sending.cancel()
            self._resting.release()

    def give_up(self, reason: str, cause: BaseException | None = None) -> None:
        """The ranks are, or may be, waiting inside NCCL: what they hold is lost."""
        self._members = None
        self._policy.give_up(reason, cause)

    async def _form(self, engines: int) -> None:
        address, port = cast(tuple[str, int], await self._policy.call_first("free_address"))
        await self._policy.call("open_broadcast", Rendezvous(address, port, engines * self._workers))

    async def _announce(self, version: int, members: list[int] | None) -> WeightUpdate:
        update = cast(WeightUpdate, await self._policy.call_first("announce", version))
        return replace(update, info={**update.info, "members": members})
