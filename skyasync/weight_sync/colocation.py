"""Policy and engines on the same devices: they take turns, and only one of them fills the memory.

Invariant: while the engines are awake, the policy (weights, optimizer state, the reference model) is in host memory;
while it is on the devices, the engines sleep. At no time does a device have the policy and a KV cache.

    loading    policy loads ─▶ to the host ─▶ engines load, those of one device after each other
    training   engines sleep ─▶ policy to the devices ─▶ updates
    sync       weights published ─▶ policy to the host ─▶ engines' weights wake ─▶ update ─▶ caches wake
    in parts   engines' weights wake ─▶ part after part ─▶ policy to the host ─▶ caches wake
    hybrid     policy to the host ─▶ engines' weights wake ─▶ the weights of the last sync ─▶ caches wake

Hybrid engines are on the policy's devices while others have their own. They are awake between ``wake`` and the next
training step. A weight sync finds them asleep: it is one of separate devices, and they get its weights when they wake.

In parts (``cuda_ipc``) the engines read from the policy's own devices, which then have both models and one part, but no
cache. If that fails in between, engines that are alive put together what they have, and sleep again.

``source`` and ``destination`` are what a ``WeightSync`` is made of. The policy scores the verification prompts before
it leaves the devices: a verification, which comes when the engines are awake, gets the result of then.

A replacement engine takes memory, so it starts in the engines' turn, which does not end before it is there
(``for_engines``): the policy's turn waits for it. Of workers that have failed nothing is left on the devices; others
load the policy there while the engines sleep (``policy_is_lost``, ``restart``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Protocol

from skyasync.utils.task_group import afterwards
from skyasync.weight_sync.sync import Destination, Source, WeightSync
from skyasync.weight_sync.transfers.base import WeightTransfer
from skyasync.weight_sync.update import BROKEN_OFF, CUDA_IPC, WakePart, WeightsMovedError, WeightUpdate

Sequences = Sequence[Sequence[int]]
GRACE_S = 30.0  # for engines to fall asleep after an error


class Policy(Source, Protocol):
    """The dispatch to the workers."""

    async def start(self, total_steps: int = 0) -> None: ...
    async def offload(self) -> None: ...
    async def onload(self) -> None: ...


class ColocatedClient(Destination, Protocol):
    """The inference client."""

    async def start(self) -> None: ...
    async def update_weights(self, update: WeightUpdate, *engines: Collection[int]) -> Sequence[str] | None: ...
    async def sleep(self, *engines: Collection[int]) -> None: ...
    async def wake(self, part: WakePart, *engines: Collection[int]) -> None: ...


class Colocation:
    """Policy and engines take turns.

    Args:
        probe: the verification prompts that the policy will score.
        hybrid: the engines that share its devices, if others have their own.

    Attributes:
        weights: what hybrid engines get their weights from, when they wake.
    """

    weights: WeightSync

    def __init__(
        self, policy: Policy, engines: ColocatedClient, probe: Sequences = (), hybrid: Collection[int] = ()
    ) -> None:
        self.policy, self.engines, self.probe = policy, engines, list(probe)
        self.hybrid = frozenset(hybrid)
        self._only = (self.hybrid,) if hybrid else ()  # the engines that sleep; all of them
        self.scores: list[list[float]] | None = None  # of the prompts, by the weights that are on the host
        self.policy_is_here = True  # on the devices
        self.awake, self._changing = asyncio.Event(), asyncio.Lock()
        self.destination: Destination = engines if hybrid else ColocatedEngines(self)

    async def start(self, total_steps: int = 0) -> None:
        """Load the models, one side after the other; the engines come up awake."""
        await self.policy.start(total_steps)
        await self.make_way_for_engines()
        await self.engines.start()
        self.awake.set()
        if self.hybrid:
            await self.make_way_for_policy()

    @property
    def source(self) -> Source:
        """Of the weights that are synced."""
        return self.policy if self.hybrid else ColocatedPolicy(self)

    @property
    def engines_are_awake(self) -> bool:
        return self.awake.is_set()

    async def engines_turn(self) -> None:
        """Wait for it; it may be over when this returns."""
        await self.awake.wait()

    @asynccontextmanager
    async def for_engines(self) -> AsyncIterator[bool]:
        """The turn does not change inside; whether it is the engines'."""
        async with self._changing:
            yield self.engines_are_awake

    async def make_way_for_policy(self) -> None:
        """Put the engines to sleep, and bring the policy back; nothing if it is there."""
        async with self._changing:
            if self.engines_are_awake:
                await self.engines.sleep(*self._only)
                self.awake.clear()
            if not self.policy_is_here:
                await self.policy.onload()
                self.policy_is_here, self.scores = True, None

    async def wake(self) -> None:
        """Give hybrid engines the devices, and the weights that the others have."""
        async with self.weights.between_syncs() as update, self._changing:
            await self.policy.offload()
            self.policy_is_here = False
            await self.engines.wake("weights", self.hybrid)
            await self.engines.update_weights(update, self.hybrid)
            await self.engines.wake("cache", self.hybrid)
            self.awake.set()

    async def policy_is_lost(self) -> None:
        """Its processes have ended: the engines sleep while others load it."""
        async with self._changing:
            if self.engines_are_awake:
                await self.engines.sleep(*self._only)
                self.awake.clear()

    def restart(self, policy: Policy) -> None:
        """Other processes have loaded the policy, and have it on the devices; the next sync wakes the engines."""
        self.policy, self.policy_is_here, self.scores = policy, True, None

    async def make_way_for_engines(self) -> None:
        self.scores = await self.policy.score(self.probe) if self.probe and not self.hybrid else []
        await self.policy.offload()
        self.policy_is_here = False


class ColocatedPolicy(WeightTransfer):
    """The policy's transfer, in its turn. Parts are loaded in the engines' turn."""

    def __init__(self, turns: Colocation) -> None:
        self._turns = turns

    @property
    def transfer(self) -> WeightTransfer:
        transfer = self._turns.policy.transfer
        transfer.expects_late_engines, self.proves_content = self.expects_late_engines, transfer.proves_content
        return self

    async def score(self, sequences: Sequences) -> list[list[float]]:
        """For other prompts the policy comes back, next to engines that are awake if there is enough memory."""
        turns = self._turns
        if turns.policy_is_here:
            return await turns.policy.score(sequences)
        if turns.scores is not None and list(map(list, sequences)) == list(map(list, turns.probe)):
            return turns.scores
        await turns.policy.onload()
        try:
            return await turns.policy.score(sequences)
        finally:
            await turns.policy.offload()

    async def publish(self, version: int) -> WeightUpdate:
        await self._turns.make_way_for_policy()
        update = await self._turns.policy.transfer.publish(version)
        if update.backend != CUDA_IPC:
            await self._turns.make_way_for_engines()
        return update

    async def publish_whole(self, update: WeightUpdate) -> WeightUpdate:
        return await self._turns.policy.transfer.publish_whole(update)

    async def send(self, update: WeightUpdate) -> None:
        await self._turns.policy.transfer.send(update)

    async def release(self, update: WeightUpdate) -> None:
        await self._turns.policy.transfer.release(update)

    async def release_retained(self) -> None:
        await self._turns.policy.transfer.release_retained()

    async def for_late_engine(self, version: int) -> WeightUpdate:
        """What was sent in parts is read from the policy, while it is in host memory.

        Raises:
            WeightsMovedError: if it is not there.
        """
        transfer = self._turns.policy.transfer
        if transfer.proves_content:  # it has a copy in host memory: the policy need not be there
            return await transfer.for_late_engine(version)
        async with self._turns.for_engines() as ours:
            if not ours:
                raise WeightsMovedError("the policy is on its devices, and may be training")
            return await transfer.for_late_engine(version)


class ColocatedEngines:
    def __init__(self, turns: Colocation) -> None:
        self._turns = turns
        self.score = turns.engines.score

    @property
    def proves_weights(self) -> bool:
        return self._turns.engines.proves_weights

    async def update_weights(self, update: WeightUpdate) -> Sequence[str] | None:
        turns, engines = self._turns, self._turns.engines
        unproven: Sequence[str] | None = None
        await engines.wake("weights")
        if update.backend == CUDA_IPC:
            try:
                parts = turns.policy.transfer.parts(update)
                async with afterwards(parts.aclose):
                    async for part in parts:
                        unproven = await engines.update_weights(part)
            except BaseException as error:
                try:
                    async with asyncio.timeout(GRACE_S):
                        await engines.update_weights(replace(update, info=BROKEN_OFF))
                        await engines.sleep()
                except Exception as another:
                    error.add_note(f"and then, while the engines were put to sleep: {another!r}")
                raise
            await turns.make_way_for_engines()
        else:
            unproven = await engines.update_weights(update)
        await engines.wake("cache")
        turns.awake.set()
        return unproven
