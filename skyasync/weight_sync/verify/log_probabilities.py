"""How far an engine's log-probabilities are from the trainer's, and how far rounding alone may
bring them.

Invariant: anything missing or not a number is an infinite difference, so a broken engine never
passes.

Two programs that compute the same model round differently. How much depends on the model, the
kernels and the dtype and is measured: the *floor* is the mean absolute difference per token of the
verification prompts at start-up, when both have the weights of one file. It moves little in a run,
and a limit of ``TIMES`` the floor is never reached by rounding; the largest difference of a token,
in contrast, is from a heavy tail. What other weights do is more: see ``skyasync.weight_sync.sync``.
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
        least: a mean difference that is always allowed: a floor may be zero by luck, if both run
            the same kernels.
        most: a floor above it is not rounding: the engine computes another model from the same
            file.
    """

    least: float
    most: float

    def limit(self, floor: float) -> float:
        """The largest mean difference that rounding explains if ``floor`` was measured at
        start-up."""
        return min(max(TIMES * floor, self.least), self.most)


FLOAT32 = Rounding(least=2e-5, most=1e-3)
BFLOAT16 = Rounding(least=2e-2, most=0.5)


@dataclass(frozen=True)
class Gap:
    """The mean and the largest absolute difference of a token's log-probabilities, of one engine,
    in nats."""

    mean: float
    largest: float


def gap(expected: Scores, actual: Scores) -> Gap:
    """Infinite if anything is NaN, infinite or missing."""
    if [len(e) for e in expected] != [len(a) for a in actual]:
        return Gap(math.inf, math.inf)
    gaps = [
        abs(x - y) for e, a in zip(expected, actual, strict=True) for x, y in zip(e, a, strict=True)
    ]
    if not all(map(math.isfinite, gaps)):
        return Gap(math.inf, math.inf)
    return Gap(math.fsum(gaps) / max(len(gaps), 1), max(gaps, default=0.0))


def choose_probe(
    prompts: Iterable[list[int]], tokens: int, *, cuts: bool = True
) -> list[list[int]]:
    """The first prompts, whole, that have no more than ``tokens`` together; of the first one at
    most as many.

    Args:
        cuts: the first one may be cut; images cannot be.
    """
    chosen: list[list[int]] = []
    for prompt in prompts:
        if chosen and len(prompt) > tokens:
            break
        chosen.append(prompt[:tokens] if cuts and len(prompt) > tokens else prompt)
        tokens -= len(prompt)
    return chosen


class TokenVerifier:
    """Verifies a weight sync by the tokens that were sampled after it, which cost nothing.

    Invariant: tokens count only once they have been as close as the verification prompts after the
    same sync. If they are not, they are sampled in a way that the prompts do not show (by the
    environment), and they never count.

    Tokens that are sampled have a floor of their own, above that of the prompts, since unlikely
    ones differ more: with SmolLM2 in bfloat16 0.04 nats, and 0.01 of the prompts. It is the largest
    difference after syncs that the prompts verified.

    Attributes:
        last_verified: the last sync that tokens have verified.
    """

    def __init__(self) -> None:
        self.last_verified = -1
        self._floor = 0.0
        self._comparable: bool | None = None  # not known yet

    def verify(
        self,
        version: int,
        gap: float,
        limit: float,
        most: float,
        *,
        sync: int,
        engines: int,
        scored: bool,
    ) -> None:
        """Note the difference of the tokens that were sampled after a sync.

        Args:
            gap: mean over the tokens of all engines; if one of them is off, only its share counts.
            limit: of the verification prompts.
            most: that is allowed in any case.
            scored: the verification prompts were within the limit after this sync.

        Raises:
            WeightSyncError: for a difference beyond the limit, if tokens have been within it
                before.
        """
        within = gap <= limit / engines
        if scored:
            self._comparable = within and self._comparable is not False
        if not self._comparable:
            return
        if scored:
            self._floor = max(self._floor, gap)
        allowed = min(max(limit, TIMES * self._floor), most)
        if not gap <= allowed:
            raise WeightSyncError(
                f"what the engines sampled by version {version} and the trainer differ by {gap:.3g} in log-probability "
                f"(mean over the batch's tokens of this version); after verified syncs they differed by "
                f"{self._floor:.3g}, and allowed is {allowed:.3g} (generator.weight_sync_tolerance)"
            )
        if within:
            self.last_verified = sync
