"""How far an engine's log-probabilities are from the trainer's, and how far rounding alone may bring them.

Invariant: anything missing or not a number is the largest gap there is, so a broken engine never passes.

Two programs that compute the same model round differently. How much depends on the model, the kernels and the dtype
and is measured: the *floor* is the mean absolute gap per token of the probe at start-up, when both have the weights of
one file. It moves little in a run, and a limit of ``TIMES`` the floor is never reached by rounding; the largest gap of
a token, in contrast, is one of a heavy tail. What other weights do is more: see ``skyasync.weight_sync.sync``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from skyasync.weight_sync.update import WeightSyncError

Scores = Sequence[Sequence[float]]

TIMES = 4.0  # the limit, in floors


@dataclass(frozen=True)
class Rounding:
    """What rounding can do to a log-probability, in nats.

    Args:
        least: a mean gap that is always allowed: a floor may be zero by luck, where both run the same kernels.
        most: a floor above it is no rounding: the engine computes another model from the same file.
    """

    least: float
    most: float

    def limit(self, floor: float) -> float:
        """The largest mean gap that it explains where so much was measured at start-up."""
        return min(max(TIMES * floor, self.least), self.most)


FLOAT32 = Rounding(least=2e-5, most=1e-3)
BFLOAT16 = Rounding(least=2e-2, most=0.5)


@dataclass(frozen=True)
class Gap:
    """Of one engine's probe, in nats: the mean and the largest absolute difference of a token's log-probabilities."""

    mean: float
    largest: float


def gap(expected: Scores, found: Scores) -> Gap:
    """Infinite where anything is NaN, infinite or missing."""
    if [len(e) for e in expected] != [len(f) for f in found]:
        return Gap(math.inf, math.inf)
    gaps = [abs(a - b) for e, f in zip(expected, found, strict=True) for a, b in zip(e, f, strict=True)]
    if not all(map(math.isfinite, gaps)):
        return Gap(math.inf, math.inf)
    return Gap(math.fsum(gaps) / max(len(gaps), 1), max(gaps, default=0.0))


def choose_probe(prompts: Iterable[list[int]], tokens: int) -> list[list[int]]:
    """The first prompts, whole, that have no more than ``tokens`` together; of the first one at most as many."""
    chosen: list[list[int]] = []
    for prompt in prompts:
        if chosen and len(prompt) > tokens:
            break
        chosen.append(prompt[:tokens])
        tokens -= len(prompt)
    return chosen


class ByTokens:
    """A weight sync verified by the tokens that were sampled after it, which cost nothing.

    Invariant: tokens count only once they have been as close as the verification prompts after the same sync. If they
    are not, something is done to them that the prompts do not show (a sampling of the environment's own), and they
    never count.

    Attributes:
        shown: the last sync that tokens have verified.
    """

    def __init__(self) -> None:
        self.shown = -1
        self._comparable: bool | None = None  # not known yet

    def judge(
        self, version: int, gap: float, *, floor: float, limit: float, sync: int, engines: int, probed: bool
    ) -> None:
        """Note what they say.

        Args:
            gap: mean over the tokens of all engines; where one of them is off, its share alone counts.
            probed: the probe has found nothing after this sync.

        Raises:
            WeightSyncError: for a gap beyond the limit, where tokens have been within it before.
        """
        within = gap <= limit / engines
        if probed:
            self._comparable = within and self._comparable is not False
        if not self._comparable:
            return
        if not gap <= limit:
            raise WeightSyncError(
                f"what the engines sampled by version {version} and the trainer differ by {gap:.3g} in log-probability "
                f"(mean over the batch's tokens of this version); at start-up they differed by {floor:.3g}, and "
                f"allowed is {limit:.3g} (generator.weight_sync_tolerance)"
            )
        if within:
            self.shown = sync
