"""The components of a simulated run, in the place of models and environments.

Invariant: the plan's classes run unchanged. Replaced are the components that they get, and
``prepare``, ``forward_backward`` and ``optimizer_step``, the tensor part of a training step. A
trajectory's length depends on its identity alone, so all plans see the same lengths.
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

_MIX = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: multiplicative hashing
_PROMPT = Segment("prompt", ints([0]))


class VirtualGenerator(TrajectoryGenerator):
    """Generates trajectories of random lengths.

    Args:
        lengths: the distribution's samples, int64.
        prompt_length: tokens per prompt.

    Attributes:
        generated: response tokens so far.
    """

    def __init__(self, client: VirtualClient, lengths: np.ndarray, prompt_length: int) -> None:
        self._client = client
        self._lengths = lengths
        self._prompt_length = prompt_length
        self.generated = 0

    def length(self, identity: TrajectoryId) -> int:
        """Response tokens of a trajectory."""
        mixed = (hash(identity) * _MIX) & 0xFFFFFFFFFFFFFFFF
        # The high bits depend on all bits of the hash.
        return int(self._lengths[(mixed >> 40) % len(self._lengths)])

    async def roll_out(self, input_batch: GeneratorInput) -> list[Trajectory]:
        ids = input_batch["trajectory_ids"]
        sequences = []
        for identity in ids:
            sequences.append(self._client.submit(self._prompt_length, self.length(identity)))
        await asyncio.gather(*(sequence.done for sequence in sequences))
        self.generated += sum(sequence.tokens.total() for sequence in sequences)
        trajectories = []
        for identity, sequence in zip(ids, sequences, strict=True):
            # One token stands for all tokens of a version; its id is their number.
            versions = sorted(sequence.tokens)
            counts = ints([sequence.tokens[version] for version in versions])
            action = Segment("action", counts, np.zeros(len(versions), np.float32), ints(versions))
            trajectories.append(Trajectory(identity, [_PROMPT, action]))
        return trajectories


class VirtualWorkers:
    """The trainer's dispatch: training takes ``seconds_per_token`` for each response token."""

    def __init__(self, seconds_per_token: float) -> None:
        self._seconds_per_token = seconds_per_token
        self.busy_s = 0.0

    async def train(self, tokens: int) -> None:
        """Take the time of a forward and backward pass."""
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
        """Divide the groups as ``TrainingBatch.mini_batches`` does."""
        groups = self.tokens
        count = len(groups)
        if size:
            count = size if first is None else first
        while groups:
            yield VirtualBatch(groups[:count]), len(groups[:count])
            groups = groups[count:]
            count = size


class VirtualSync:
    """A weight sync that takes ``seconds``.

    Attributes:
        colocation: wakes the engines after a sync; None if they do not sleep.
    """

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
    """The changes of devices between engines and the policy; each takes ``simulate.switch_s``.

    Args:
        engines: the indices of the engines that share devices with the policy.
    """

    def __init__(
        self, client: VirtualClient, engines: Collection[int], settings: SimulateConfig
    ) -> None:
        self._client = client
        self._engines = engines
        self._settings = settings
        self._hybrid = len(engines) < len(client.engines)
        self._engines_are_awake = False

    async def give_devices_to_policy(self) -> None:
        if not self._engines_are_awake:
            return
        self._engines_are_awake = False
        if self._hybrid:
            await self._client.sleep(self._engines)
        else:
            await self._client.cut()
        await asyncio.sleep(self._settings.switch_s)

    async def wake(self) -> None:
        if self._hybrid:
            # Between two syncs they also get the newest weights.
            await asyncio.sleep(self._settings.switch_s + self._settings.sync_s)
            await self._client.wake(self._engines)
        else:
            await asyncio.sleep(self._settings.switch_s)
            await self._client.resume()
        self._engines_are_awake = True


class Simulated(RayPPOTrainer):
    """A mixin before a plan: training takes simulated time.

    Attributes:
        staleness: trained tokens by their staleness, since the previous step's end.
    """

    staleness: Counter[int]

    async def prepare(self, groups: list[Group]) -> TrainingBatch:
        group_tokens = []
        for group in groups:
            total = 0
            for trajectory in group.trajectories:
                (action,) = trajectory.actions
                counts = action.tokens.tolist()
                for version, count in zip(action.versions.tolist(), counts, strict=True):
                    self.staleness[self.global_step - version] += count
                    total += count
            group_tokens.append(total)
        return cast("TrainingBatch", VirtualBatch(group_tokens))

    async def forward_backward(self, part: TrainingBatch, *, complete: bool = True) -> None:
        batch = cast(VirtualBatch, part)
        workers = cast(VirtualWorkers, self.dispatch)
        await workers.train(sum(batch.tokens))

    async def optimizer_step(self) -> dict[str, float]:
        return {}


class NoTracker:
    """Drops all metrics: a simulation reports at its end."""

    def log(self, metrics: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...
