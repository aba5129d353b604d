"""Policy and engines on the same devices: they take turns, and only one of them fills the memory.

Invariant: while the engines are awake, the policy (weights, moments, the reference model) is in host memory; while it
is on the devices, the engines sleep. At no time does a device hold the policy and a cache.

    loading    policy loads ─▶ to the host ─▶ engines load, those of one device after each other
    training   engines sleep ─▶ policy to the devices ─▶ updates
    sync       weights published ─▶ policy to the host ─▶ engines' weights wake ─▶ update ─▶ caches wake
    in parts   engines' weights wake ─▶ part after part ─▶ policy to the host ─▶ caches wake

In parts (``cuda_ipc``) the engines read from the policy's own devices, which then hold both models and one part, but no
cache. Where that fails in between, engines that live put together what they have, and sleep again.

``source`` and ``destination`` are what a ``WeightSync`` is made of. The probe is scored by the policy before it leaves:
a verification, which comes when the engines are awake, is told what was found then.

An engine that is started in a dead one's place takes memory, so it is started in the engines' turn, which does not end
before it is there (``for_engines``): the policy's turn waits for it. Of workers that have died nothing is left on the
devices; others load the policy there while the engines sleep (``policy_is_lost``, ``restart``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol

from skyasync.utils.task_group import afterwards
from skyasync.weight_sync.sync import Destination, Source
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


class DeviceTurns:
    """Args: probe: what a verification will ask the policy to score."""

    def __init__(self, policy: Policy, engines: Engines, probe: Sequences = ()) -> None:
        self._policy, self._engines, self._probe = policy, engines, [list(sequence) for sequence in probe]
        self._scores: list[list[float]] | None = None  # of the probe, by the weights that are on the host
        self._policy_is_here = True
        self._awake, self._changing = asyncio.Event(), asyncio.Lock()
        self.source: Source = _PolicyInTurn(self)
        self.destination: Destination = _EnginesInTurn(self)

    async def start(self, total_steps: int = 0) -> None:
        """Load the models, one side after the other; the engines come up awake."""
        await self._policy.start(total_steps)
        await self._make_way_for_engines()
        await self._engines.start()
        self._awake.set()

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

    async def _make_way_for_engines(self) -> None:
        self._scores = await self._policy.score(self._probe) if self._probe else []
        await self._policy.offload()
        self._policy_is_here = False

    async def publish(self, version: int) -> WeightUpdate:
        await self.make_way_for_policy()
        update = await self._policy.publish_weights(version)
        if update.backend != CUDA_IPC:
            await self._make_way_for_engines()
        return update

    async def load_engines(self, update: WeightUpdate) -> Sequence[str] | None:
        await self._engines.wake("weights")
        if update.backend == CUDA_IPC:
            unproven = await self._load_in_parts(update)
            await self._make_way_for_engines()
        else:
            unproven = await self._engines.update_weights(update)
        await self._engines.wake("cache")
        self._awake.set()
        return unproven

    async def _load_in_parts(self, update: WeightUpdate) -> Sequence[str] | None:
        policy: Any = self._policy  # one that sends parts
        unproven: Sequence[str] | None = None
        try:
            async with afterwards(policy.end_parts):
                part = await policy.next_part(update)
                while part is not None:
                    unproven = await self._engines.update_weights(part)
                    part = await policy.next_part(part)
        except BaseException as error:
            try:
                async with asyncio.timeout(GRACE_S):
                    await self._engines.update_weights(replace(update, info=BROKEN_OFF))
                    await self._engines.sleep()
            except Exception as another:
                error.add_note(f"and then, while the engines were put to sleep: {another!r}")
            raise
        return unproven

    async def publish_whole(self, update: WeightUpdate, *, fell_back: bool) -> WeightUpdate:
        """For an engine that comes late. What was sent in parts is read from the policy, while it is in host memory.

        Raises:
            WeightsMovedError: if it is not there.
        """
        policy: Any = self._policy
        if update.backend != CUDA_IPC:  # the kept copy is in host memory: nobody has to make way
            whole: WeightUpdate = await policy.publish_whole(update, fell_back=fell_back)
            return whole
        async with self.for_engines() as ours:
            if not ours:
                raise WeightsMovedError("the policy is on its devices, and may be training")
            whole = await policy.publish_whole(update, fell_back=fell_back)
            return whole

    async def score_by_policy(self, sequences: Sequences) -> list[list[float]]:
        """Of anything but the probe: the policy comes back for it, beside engines that are awake if there is room."""
        if self._policy_is_here:
            return await self._policy.score(sequences)
        if self._scores is not None and [list(sequence) for sequence in sequences] == self._probe:
            return self._scores
        await self._policy.onload()
        try:
            return await self._policy.score(sequences)
        finally:
            await self._policy.offload()


class _PolicyInTurn:
    def __init__(self, turns: DeviceTurns) -> None:
        self._turns = turns

    async def publish_weights(self, version: int) -> WeightUpdate:
        return await self._turns.publish(version)

    async def send_weights(self, update: WeightUpdate) -> None:
        await self._turns._policy.send_weights(update)

    async def release_weights(self, update: WeightUpdate) -> None:
        await self._turns._policy.release_weights(update)

    async def publish_whole(self, update: WeightUpdate, *, fell_back: bool) -> WeightUpdate:
        return await self._turns.publish_whole(update, fell_back=fell_back)

    async def score(self, sequences: Sequences) -> list[list[float]]:
        return await self._turns.score_by_policy(sequences)


class _EnginesInTurn:
    def __init__(self, turns: DeviceTurns) -> None:
        self._turns = turns

    async def update_weights(self, update: WeightUpdate) -> Sequence[str] | None:
        return await self._turns.load_engines(update)

    async def score(self, sequences: Sequences) -> list[list[list[float]]]:
        return await self._turns._engines.score(sequences)
