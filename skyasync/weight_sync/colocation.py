"""Policy and engines on the same devices: they take turns, and only one of them fills the memory.

Invariant: while the engines are awake, the policy (weights, optimizer state, the reference model)
is in host memory; while it is on the devices, the engines sleep. At no time does a device have the
policy and a KV cache.

    loading    policy loads ─▶ to the host ─▶ engines load, those of one device after each other
    training   engines sleep ─▶ policy to the devices ─▶ updates
    sync       weights published ─▶ policy to the host ─▶ engines' weights wake ─▶ update ─▶ caches wake
    in parts   engines' weights wake ─▶ part after part ─▶ policy to the host ─▶ caches wake
    hybrid     policy to the host ─▶ engines' weights wake ─▶ the weights of the last sync ─▶ caches wake

Hybrid engines are on the policy's devices while others have their own. They are awake between
``wake`` and the next training step. A weight sync finds them asleep: it is one of separate devices,
and they get its weights when they wake.

In parts (``cuda_ipc``) the engines read from the policy's own devices, which then have both models
and one part, but no cache. If that fails in between, engines that are alive put together what they
have, and sleep again.

``source`` and ``destination`` are what a ``WeightSync`` is made of. The policy scores the
verification prompts before it leaves the devices: a verification, which comes when the engines are
awake, gets the result of then.

A replacement engine takes memory, so it starts in the engines' turn, which does not end before it
is there (``for_engines``): the policy's turn waits for it. Of workers that have failed nothing is
left on the devices; others load the policy there while the engines sleep (``policy_is_lost``,
``restart``).
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
from skyasync.weight_sync.update import (
    BROKEN_OFF,
    CUDA_IPC,
    WakePart,
    WeightsMovedError,
    WeightUpdate,
)

Sequences = Sequence[Sequence[int]]
GRACE_S = 30.0  # for engines to fall asleep after an error, which is then raised in any case


class Policy(Source, Protocol):
    """The dispatch to the workers."""

    async def start(self, total_steps: int = 0) -> None: ...
    async def offload(self) -> None: ...
    async def onload(self) -> None: ...


class ColocatedClient(Destination, Protocol):
    """The inference client."""

    async def start(self) -> None: ...
    async def update_weights(
        self, update: WeightUpdate, *engines: Collection[int]
    ) -> Sequence[str] | None: ...
    async def sleep(self, *engines: Collection[int]) -> None: ...
    async def wake(self, part: WakePart, *engines: Collection[int]) -> None: ...


class Colocation:
    """Policy and engines take turns on the devices.

    Args:
        probe: the verification prompts that the policy will score.
        hybrid: the engines that share its devices, if others have their own.

    Attributes:
        weights: what hybrid engines get their weights from, when they wake.
    """

    weights: WeightSync

    def __init__(
        self,
        policy: Policy,
        engines: ColocatedClient,
        probe: Sequences = (),
        hybrid: Collection[int] = (),
    ) -> None:
        self.policy = policy
        self.engines = engines
        self.probe = list(probe)
        self.hybrid = frozenset(hybrid)
        # Arguments of ``engines.sleep``: without any, all engines sleep.
        self._sleepers = (self.hybrid,) if hybrid else ()
        # Of the verification prompts, by the weights that are in host memory.
        self.scores: list[list[float]] | None = None
        self.policy_on_devices = True
        self.awake = asyncio.Event()
        self._changing = asyncio.Lock()
        self.destination: Destination = engines if hybrid else ColocatedEngines(self)

    async def start(self, total_steps: int = 0) -> None:
        """Load the models, one side after the other; the engines come up awake."""
        await self.policy.start(total_steps)
        await self.give_devices_to_engines()
        await self.engines.start()
        self.awake.set()
        if self.hybrid:
            await self.give_devices_to_policy()

    @property
    def source(self) -> Source:
        """The source of the weights that are synced."""
        if self.hybrid:
            return self.policy
        return ColocatedPolicy(self)

    @property
    def engines_are_awake(self) -> bool:
        return self.awake.is_set()

    async def wait_for_engines(self) -> None:
        """Wait until the engines get the devices. They may have lost them when this returns."""
        await self.awake.wait()

    @asynccontextmanager
    async def for_engines(self) -> AsyncIterator[bool]:
        """Whether the engines have the devices, which stays so inside the context."""
        async with self._changing:
            yield self.engines_are_awake

    async def give_devices_to_policy(self) -> None:
        """Put the engines to sleep, and bring the policy back; nothing if it is there."""
        async with self._changing:
            await self._put_engines_to_sleep()
            if not self.policy_on_devices:
                await self.policy.onload()
                self.policy_on_devices = True
                self.scores = None

    async def wake(self) -> None:
        """Give hybrid engines the devices, and the weights that the others have."""
        async with self.weights.between_syncs() as update, self._changing:
            await self.policy.offload()
            self.policy_on_devices = False
            # The cache takes the rest of the memory, some of which loading needs: it comes last.
            await self.engines.wake("weights", self.hybrid)
            await self.engines.update_weights(update, self.hybrid)
            await self.engines.wake("cache", self.hybrid)
            self.awake.set()

    async def policy_is_lost(self) -> None:
        """The policy's processes have ended: the engines sleep while other processes load it."""
        async with self._changing:
            await self._put_engines_to_sleep()

    async def _put_engines_to_sleep(self) -> None:
        if self.engines_are_awake:
            await self.engines.sleep(*self._sleepers)
            self.awake.clear()

    def restart(self, policy: Policy) -> None:
        """Other processes have loaded the policy onto the devices; the next sync wakes engines."""
        self.policy = policy
        self.policy_on_devices = True
        self.scores = None

    async def give_devices_to_engines(self) -> None:
        # A verification comes when the engines are awake: the policy scores before it leaves.
        # With hybrid engines ``source`` is the policy itself, which stays able to score.
        if self.probe and not self.hybrid:
            self.scores = await self.policy.score(self.probe)
        else:
            self.scores = []
        await self.policy.offload()
        self.policy_on_devices = False


class ColocatedPolicy(WeightTransfer):
    """The policy's transfer, which takes the devices and gives them to the engines.

    Updates in parts are published only: the engines load them while they have the devices.
    """

    def __init__(self, colocation: Colocation) -> None:
        self._colocation = colocation

    @property
    def transfer(self) -> WeightTransfer:
        transfer = self._policy_transfer
        transfer.expects_late_engines = self.expects_late_engines
        self.proves_content = transfer.proves_content
        return self

    @property
    def _policy_transfer(self) -> WeightTransfer:
        # Read at each use: a failed policy is replaced by another one.
        return self._colocation.policy.transfer

    async def score(self, sequences: Sequences) -> list[list[float]]:
        """Log-probabilities of prompts, those of the verification prompts from before.

        For other prompts the policy comes back, next to engines that are awake if there is enough
        memory.
        """
        colocation = self._colocation
        if colocation.policy_on_devices:
            return await colocation.policy.score(sequences)
        # Compared as lists, because prompts may be tuples or arrays.
        is_probe = list(map(list, sequences)) == list(map(list, colocation.probe))
        if colocation.scores is not None and is_probe:
            return colocation.scores
        await colocation.policy.onload()
        try:
            return await colocation.policy.score(sequences)
        finally:
            await colocation.policy.offload()

    async def publish(self, version: int) -> WeightUpdate:
        await self._colocation.give_devices_to_policy()
        update = await self._policy_transfer.publish(version)
        if update.backend != CUDA_IPC:
            await self._colocation.give_devices_to_engines()
        return update

    async def publish_whole(self, update: WeightUpdate) -> WeightUpdate:
        return await self._policy_transfer.publish_whole(update)

    async def send(self, update: WeightUpdate) -> None:
        await self._policy_transfer.send(update)

    async def release(self, update: WeightUpdate) -> None:
        await self._policy_transfer.release(update)

    async def release_retained(self) -> None:
        await self._policy_transfer.release_retained()

    async def for_late_engine(self, version: int) -> WeightUpdate:
        """All weights, of an update in parts from the policy while it is in host memory.

        Raises:
            WeightsMovedError: if the policy is on its devices.
        """
        transfer = self._policy_transfer
        if transfer.proves_content:  # it has a copy in host memory: the policy need not be there
            return await transfer.for_late_engine(version)
        async with self._colocation.for_engines() as engines_awake:
            if not engines_awake:
                raise WeightsMovedError("the policy is on its devices, and may be training")
            return await transfer.for_late_engine(version)


class ColocatedEngines:
    """The engines as a sync's destination: an update wakes them."""

    def __init__(self, colocation: Colocation) -> None:
        self._colocation = colocation
        self.score = colocation.engines.score

    @property
    def proves_weights(self) -> bool:
        return self._colocation.engines.proves_weights

    async def update_weights(self, update: WeightUpdate) -> Sequence[str] | None:
        colocation = self._colocation
        engines = self._colocation.engines
        unproven: Sequence[str] | None = None
        await engines.wake("weights")
        if update.backend == CUDA_IPC:
            try:
                components = colocation.policy.transfer.parts(update)
                async with afterwards(components.aclose):
                    async for component in components:
                        unproven = await engines.update_weights(component)
            except BaseException as error:
                # The engines must not stay awake with incomplete weights next to the policy. What
                # fails in that is a note: the first error is the cause.
                try:
                    async with asyncio.timeout(GRACE_S):
                        await engines.update_weights(replace(update, info=BROKEN_OFF))
                        await engines.sleep()
                except Exception as another:
                    error.add_note(f"and then, while the engines were put to sleep: {another!r}")
                raise
            await colocation.give_devices_to_engines()
        else:
            unproven = await engines.update_weights(update)
        await engines.wake("cache")
        colocation.awake.set()
        return unproven
