"""Simulated ranks of a policy, and the disk that they save to.

Invariant: as in ``simulated_processes``. The weights are a digest of those before and of all that was trained since, in
its order. Next to them stands the number of optimizer steps, so weights that belong to another step are an error at
once.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence
from pathlib import Path

from skyasync.utils import manifest
from skyasync.utils.manifest import Sums
from skyasync.weight_sync.transfers.base import WeightTransfer
from skyasync.weight_sync.update import WeightUpdate
from tests.chaos.simulated_processes import SILENCE_S, SimulatedProcess, digest

TRAIN_S, PUBLISH_S, SAVE_S, START_S, MOVE_S = 2.0, 0.5, 1.0, 15.0, 0.5


class RanksFailedError(RuntimeError):
    """In place of Ray's error."""


class Ranks(WeightTransfer):
    """In place of the trainer's dispatch.

    Attributes:
        steps: of the optimizer, which made the weights.
        gradients: what has been trained since.
    """

    def __init__(self, disk: Disk) -> None:
        self.process, self._disk = SimulatedProcess(RanksFailedError, "the policy"), disk
        self.steps, self.weights, self.gradients, self.offloaded = 0, "initial", list[str](), False
        self.flip, self.busy_s = False, 0.0
        self._failure: BaseException | None = None
        self._pending_save = (Path(), "", 0.0)

    @property
    def lost(self) -> tuple[str, BaseException] | None:
        return ("policy", self._failure) if self._failure is not None else None

    async def start(self, total_steps: int = 0) -> None:
        await self._call(START_S)

    async def offload(self) -> None:
        await self._call(MOVE_S)
        self.offloaded = True

    async def onload(self) -> None:
        await self._call(MOVE_S)
        self.offloaded = False

    async def shutdown(self) -> None:
        self.process.kill()

    async def _call(self, seconds: float) -> None:
        """As ``RankGroup``: a rank that sends no heartbeat for too long counts as failed."""
        try:
            async with asyncio.timeout(seconds + SILENCE_S) as timer:
                await self.process.spend(seconds)
        except RanksFailedError as error:
            self._failure = error
            raise
        except TimeoutError as error:
            if not timer.expired():
                raise
            self.process.kill()
            self._failure = RanksFailedError("a rank sent no heartbeat")
            raise self._failure from error
        self.busy_s += seconds

    async def train(self, part: str) -> None:
        assert not self.offloaded
        await self._call(TRAIN_S)
        self.gradients.append(part)

    async def step(self, number: int) -> None:
        """Optimizer step ``number`` of the run."""
        await self._call(TRAIN_S / 4)
        assert self.steps == number - 1, f"step {number} uses weights of {self.steps} steps"
        self.steps, self.weights, self.gradients = number, digest(self.weights, self.gradients), []

    proves_content = True

    @property
    def transfer(self) -> WeightTransfer:
        return self

    async def publish(self, version: int) -> WeightUpdate:
        await self._call(PUBLISH_S)
        assert self.steps == version, (
            f"the weights of {self.steps} steps are published as version {version}"
        )
        sound, self.flip = not self.flip, False
        return WeightUpdate(version, "shared_memory", {"sound": sound, "weights": self.weights})

    async def release(self, update: WeightUpdate) -> None:
        self._last = update

    async def for_late_engine(self, version: int) -> WeightUpdate:
        return self._last

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        await self._call(0.1)
        return [[-0.5] * (len(each) - 1) for each in sequences]

    async def save(self, folder: Path) -> None:
        state = f"{self.steps} {self.weights}"
        await self._call(SAVE_S)
        self._disk.write(folder / "weights", state)

    async def begin_save(self, folder: Path) -> None:
        await self._call(0.1)
        state = f"{self.steps} {self.weights}"
        self._pending_save = (folder, state, asyncio.get_running_loop().time() + 3 * SAVE_S)

    async def saved(self) -> Sums | None:
        await self._call(0.1)
        folder, state, end = self._pending_save
        if asyncio.get_running_loop().time() < end:
            return None
        self._disk.write(folder / "weights", state)
        return {}

    async def verify(self, folder: Path, sums: Sums) -> list[str]:
        return list(manifest.damage(folder, sums))

    async def load(self, folder: Path) -> None:
        await self._call(SAVE_S)
        steps, self.weights = (folder / "weights").read_text().split()
        self.steps, self.gradients = int(steps), []

    async def stats(self) -> dict[str, float]:
        return {"busy_s": self.busy_s}


class Disk:
    """It may be full until a given time."""

    def __init__(self) -> None:
        self.full_until = 0.0

    def write(self, file: Path, text: str) -> None:
        if asyncio.get_running_loop().time() < self.full_until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        file.write_text(text)
