"""The parts that a simulated run hands to a plan in place of models and environments.

Invariant: the plan's classes run as they are; what is replaced is what they are handed, and
``prepare``, ``forward_backward`` and ``optimizer_step``, the tensor part of a training step. A
trajectory's length depends on its identity alone, so all plans see the same.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from skyasync.arrays import ints
from skyasync.rollout.generator_api import TrajectoryGenerator
from skyasync.rollout.types import GeneratorInput, Group, Segment, Trajectory, TrajectoryId
from skyasync.simulate.engines import VirtualClient
from skyasync.simulate.settings import SimulateConfig
from skyasync.trainer import RayPPOTrainer

if TYPE_CHECKING:  # a simulation does without torch
    from skyasync.models.batch import TrainingBatch
    from skyasync.weight_sync.sync import Paused

_MIX = 0x9E3779B97F4A7C15
_PROMPT = Segment("prompt", ints([0]))


class VirtualGenerator(TrajectoryGenerator):
    """Plays trajectories whose lengths are drawn; ``generated`` counts their tokens."""

    def __init__(self, client: VirtualClient, lengths: np.ndarray, prompt_length: int) -> None:
        self._client = client
        self._lengths = lengths
        self._prompt_length = prompt_length
        self.generated = 0

    def length(self, identity: TrajectoryId) -> int:
        mixed = (hash(identity) * _MIX) & 0xFFFFFFFFFFFFFFFF
        return int(self._lengths[(mixed >> 40) % len(self._lengths)])

    async def roll_out(self, input_batch: GeneratorInput) -> list[Trajectory]:
        ids = input_batch["trajectory_ids"]
        sequences = [
            self._client.submit(self._prompt_length, self.length(identity)) for identity in ids
        ]
        await asyncio.gather(*(sequence.done for sequence in sequences))
        self.generated += sum(sequence.tokens.total() for sequence in sequences)
        trajectories = []
        for identity, sequence in zip(ids, sequences, strict=True):
            # One token stands for all of its version; its id is how many they are.
            versions = sorted(sequence.tokens)
            counts = ints([sequence.tokens[version] for version in versions])
            action = Segment("action", counts, np.zeros(len(versions), np.float32), ints(versions))
            trajectories.append(Trajectory(identity, [_PROMPT, action]))
        return trajectories


class VirtualWorkers:
    """Training that takes ``seconds_per_token`` of each response token. Is the trainer's
    dispatch."""

    def __init__(self, seconds_per_token: float) -> None:
        self._seconds_per_token = seconds_per_token
        self.busy_s = 0.0

    async def train(self, tokens: int) -> None:
        seconds = tokens * self._seconds_per_token
        await asyncio.sleep(seconds)
        self.busy_s += seconds

    async def stats(self) -> dict[str, float]:
        return {"busy_s": self.busy_s}


@dataclass(frozen=True)
class VirtualBatch:
    """In place of a ``TrainingBatch``: the response tokens of each group."""

    tokens: list[int]

    def mini_batches(
        self, size: int, first: int | None = None
    ) -> Iterator[tuple[VirtualBatch, int]]:
        left = self.tokens
        if size:
            count = size if first is None else first
        else:
            count = len(left)
        while left:
            yield VirtualBatch(left[:count]), len(left[:count])
            left = left[count:]
            count = size


class VirtualSync:
    """A weight sync that takes its time and then is true of all engines; ``colocation``: it wakes
    them."""

    def __init__(self, client: VirtualClient, seconds: float) -> None:
        self._client = client
        self._seconds = seconds
        self.colocation: VirtualColocation | None = None

    async def sync(self, version: int, paused: Paused = nullcontext) -> dict[str, float]:
        async with paused():
            await asyncio.sleep(self._seconds)
            self._client.set_version(version)
        if self.colocation is not None:
            await self.colocation.wake()
        return {}

    async def verify(self, version: int) -> dict[str, float]:
        return {}

    def sampled(self, version: int, gap: float) -> None: ...


class VirtualColocation:
    """The changes of the devices on which these engines and the policy compute; each takes
    ``simulate.switch_s``."""

    def __init__(
        self, client: VirtualClient, engines: Collection[int], settings: SimulateConfig
    ) -> None:
        self._client = client
        self._engines = engines
        self._settings = settings
        self._hybrid = len(engines) < len(client.engines)
        self._awake = False

    async def give_devices_to_policy(self) -> None:
        if self._awake:
            self._awake = False
            await (self._client.sleep(self._engines) if self._hybrid else self._client.cut())
            await asyncio.sleep(self._settings.switch_s)

    async def wake(self) -> None:
        await asyncio.sleep(self._settings.switch_s + self._hybrid * self._settings.sync_s)
        await (self._client.wake(self._engines) if self._hybrid else self._client.resume())
        self._awake = True


class Simulated(RayPPOTrainer):
    """Mixed in before a plan: training takes virtual time, and the staleness of every token is
    counted."""

    staleness: Counter[int]

    async def prepare(self, groups: list[Group]) -> TrainingBatch:
        totals = [0] * len(groups)  # the response tokens of each group
        for index, group in enumerate(groups):
            for trajectory in group.trajectories:
                (action,) = trajectory.actions
                for version, count in zip(
                    action.versions.tolist(), action.tokens.tolist(), strict=True
                ):
                    self.staleness[self.global_step - version] += count
                    totals[index] += count
        return cast("TrainingBatch", VirtualBatch(totals))

    async def forward_backward(self, part: TrainingBatch, *, complete: bool = True) -> None:
        await cast(VirtualWorkers, self.dispatch).train(sum(cast(VirtualBatch, part).tokens))

    async def optimizer_step(self) -> dict[str, float]:
        return {}


class NoTracker:
    """Keeps nothing: a simulation reports at its end."""

    def log(self, metrics: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...
