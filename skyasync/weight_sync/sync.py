"""Gets the policy's weights into every engine, and proves that they arrived.

Invariant: after ``sync(version)`` every engine computes with the trainer's weights and stamps ``version``;
``verify(version)`` proves it: if the log-probabilities of the probe differ by more than the tolerance, that is an
error, never a log line.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from skyasync.cleanup import GRACE_S, afterwards
from skyasync.together import run_together
from skyasync.weight_sync.update import WeightUpdate


class Source(Protocol):
    """What has the weights (the dispatch to the workers)."""

    async def publish_weights(self, version: int) -> WeightUpdate: ...
    async def send_weights(self, update: WeightUpdate) -> None: ...
    async def release_weights(self, update: WeightUpdate) -> None: ...
    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]: ...


class Destination(Protocol):
    """What needs them (the inference client)."""

    async def update_weights(self, update: WeightUpdate) -> None: ...
    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]: ...


class WeightSyncError(RuntimeError):
    """The engines do not compute what the trainer computes."""


@dataclass
class WeightSync:
    """Synchronises engines with the policy.

    Args:
        probe: token sequences whose log-probabilities are compared; empty compares nothing.
        tolerance: the largest difference of log-probabilities allowed, in nats.
    """

    source: Source
    destination: Destination
    probe: Sequence[Sequence[int]]
    tolerance: float

    async def sync(self, version: int) -> None:
        """Hand over the weights as ``version``; the engines are idle or paused.

        Sender and engines may wait for each other (NCCL), so the first failure of either is raised at once.
        """
        update = await self._published(version)
        async with afterwards(self.source.release_weights, update):
            await run_together(self.source.send_weights(update), self.destination.update_weights(update))

    async def _published(self, version: int) -> WeightUpdate:
        """Cancelled meanwhile, it waits for what is being published and releases it: nobody else knows of it."""
        publishing = asyncio.ensure_future(self.source.publish_weights(version))
        try:
            return await asyncio.shield(publishing)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):  # it was cancelled, whatever becomes of this
                async with asyncio.timeout(GRACE_S):
                    await self.source.release_weights(await publishing)
            raise

    async def verify(self, version: int) -> dict[str, float]:
        """Compare the probe's log-probabilities; the engines are not paused. Returns metrics.

        Raises:
            WeightSyncError: naming the engine and the gap.
        """
        if not self.probe:
            return {}
        expected = await self.source.score(self.probe)
        found = await self.destination.score(self.probe)
        gaps = [_largest_gap(expected, engine) for engine in found]
        worst = max(gaps, key=_badness)
        if not worst <= self.tolerance:
            raise WeightSyncError(
                f"after the weight sync to version {version} engine {gaps.index(worst)} and the trainer differ by "
                f"{worst:.3g} in log-probability; allowed is {self.tolerance:g} (generator.weight_sync_tolerance)"
            )
        return {"sync/logprob_gap": worst}


def _largest_gap(expected: list[list[float]], found: list[list[float]]) -> float:
    """NaN if anything is NaN or missing, so that a broken engine never passes."""
    if [len(e) for e in expected] != [len(f) for f in found]:
        return float("nan")
    gaps = [abs(a - b) for e, f in zip(expected, found, strict=True) for a, b in zip(e, f, strict=True)]
    return max(gaps, key=_badness, default=0.0)


def _badness(gap: float) -> float:
    """NaN is the worst; ``max`` alone would pass over it."""
    return math.inf if math.isnan(gap) else gap
