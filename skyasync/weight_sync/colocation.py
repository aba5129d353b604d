"""Policy and engines on the same devices: they take turns, and only one of them fills the memory.

Invariant: while the engines are awake, the policy (weights, optimizer state, the reference model) is in host memory;
while it is on the devices, the engines sleep. At no time does a device have the policy and a KV cache.

    loading    policy loads ─▶ to the host ─▶ engines load, those of one device after each other
    training   engines sleep ─▶ policy to the devices ─▶ updates
    sync       weights published ─▶ policy to the host ─▶ engines' weights wake ─▶ update ─▶ caches wake
    in parts   engines' weights wake ─▶ part after part ─▶ policy to the host ─▶ caches wake

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
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Protocol

from skyasync.utils.task_group import afterwards
from skyasync.weight_sync.sync import Destination, Source
from skyasync.weight_sync.transfers.base import WeightTransfer
from skyasync.weight_sync.update import BROKEN_OFF, CUDA_IPC, WakePart, WeightsMovedError, WeightUpdate

Sequences = Sequence[Sequence[int]]
GRACE_S = 30.0  # for engines to fall asleep after an error


class Policy(Source, Protocol):
    """The dispatch to the workers."""

    async def start(self, total_steps: int = 0) -> None: ...
    async def offload(self) -> None: ...
    async def onload(self) -> None: ...


class Engines(Destination, Protocol):
    """The inference client."""

    async def start(self) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self, part: WakePart) -> None: ...


class Colocation:
    """Args: probe: the verification prompts that the policy will be asked to score."""

    def __init__(self, policy: Policy, engines: Engines, probe: Sequences = ()) -> None:
        self._policy, self._engines, self._probe = policy, engines, [list(sequence) for sequence in probe]
        self._scores: list[list[float]] | None = None  # of the prompts, by the weights that are on the host
        self._policy_is_here = True
        self._awake, self._changing = asyncio.Event(), asyncio.Lock()
        self.source: Source = ColocatedPolicy(self)
        self.destination: Destination = ColocatedEngines(self)

    async def start(self, total_steps: int = 0) -> None:
        """Load the models, one side after the other; the engines come up awake."""
        await self._policy.start(total_steps)
        await self.make_way_for_engines()
        await self._engines.start()
        self._awake.set()

    @property
    def policy(self) -> Policy:
        return self._policy

    @property
    def engines_are_awake(self) -> bool:
        return self._awake.is_set()

    async def engines_turn(self) -> None:
        """Wait for it; it may be over when this returns."""
        await self._awake.wait()

    @asynccontextmanager
    async def for_engines(self) -> AsyncIterator[bool]:
        """The turn does not change inside; whether it is the engines'."""
        async with self._changing:
            yield self.engines_are_awake

    async def make_way_for_policy(self) -> None:
        """Put the engines, which must be idle, to sleep, and bring the policy back; nothing if it is there."""
        async with self._changing:
            await self._put_engines_to_sleep()
            if not self._policy_is_here:
                await self._policy.onload()
                self._policy_is_here, self._scores = True, None

    async def policy_is_lost(self) -> None:
        """Its processes have ended: the engines, which must be idle, sleep while others load it."""
        async with self._changing:
            await self._put_engines_to_sleep()

    def restart(self, policy: Policy) -> None:
        """Other processes have loaded the policy, and have it on the devices; the next sync wakes the engines."""
        self._policy, self._policy_is_here, self._scores = policy, True, None

    async def _put_engines_to_sleep(self) -> None:
        if self.engines_are_awake:
            await self._engines.sleep()
            self._awake.clear()

    async def make_way_for_engines(self) -> None:
        self._scores = await self._policy.score(self._probe) if self._probe else []
        await self._policy.offload()
        self._policy_is_here = False

    async def load_engines(self, update: WeightUpdate) -> Sequence[str] | None:
        await self._engines.wake("weights")
        if update.backend == CUDA_IPC:
            unproven = await self._load_in_parts(update)
            await self.make_way_for_engines()
        else:
            unproven = await self._engines.update_weights(update)
        await self._engines.wake("cache")
        self._awake.set()
        return unproven

    async def _load_in_parts(self, update: WeightUpdate) -> Sequence[str] | None:
        unproven: Sequence[str] | None = None
        try:
            parts = self._policy.transfer.parts(update)
            async with afterwards(parts.aclose):
                async for part in parts:
                    unproven = await self._engines.update_weights(part)
        except BaseException as error:
            try:
                async with asyncio.timeout(GRACE_S):
                    await self._engines.update_weights(replace(update, info=BROKEN_OFF))
                    await self._engines.sleep()
            except Exception as another:
                error.add_note(f"and then, while the engines were put to sleep: {another!r}")
            raise
        return unproven

    async def score_by_policy(self, sequences: Sequences) -> list[list[float]]:
        """Of other prompts the policy comes back for it, next to engines that are awake if there is room."""
        if self._policy_is_here:
            return await self._policy.score(sequences)
        if self._scores is not None and [list(sequence) for sequence in sequences] == self._probe:
            return self._scores
        await self._policy.onload()
        try:
            return await self._policy.score(sequences)
        finally:
            await self._policy.offload()

    async def score_by_engines(self, sequences: Sequences) -> list[list[list[float]]]:
        return await self._engines.score(sequences)


class ColocatedPolicy(WeightTransfer):
    """The policy's transfer, in its turn. Parts are taken in the engines' turn."""

    def __init__(self, turns: Colocation) -> None:
        self._turns = turns

    @property
    def transfer(self) -> WeightTransfer:
        transfer = self._turns.policy.transfer
        transfer.expects_late_engines, self.proves_content = self.expects_late_engines, transfer.proves_content
        return self

    async def score(self, sequences: Sequences) -> list[list[float]]:
        return await self._turns.score_by_policy(sequences)

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

    async def update_weights(self, update: WeightUpdate) -> Sequence[str] | None:
        return await self._turns.load_engines(update)

    async def score(self, sequences: Sequences) -> list[list[list[float]]]:
        return await self._turns.score_by_engines(sequences)
