"""Log-probability differences of engine and trainer, and the limits that rounding explains.

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

# The limit, in floors. Rounding moves a mean difference by less in a run; other weights move it by
# more (``skyasync.weight_sync.sync`` has measurements).
TIMES = 4.0


@dataclass(frozen=True)
class Rounding:
    """The differences of log-probabilities by rounding, in nats.

    Args:
        lowest_limit: a mean difference that is always allowed: a floor may be zero by luck, if
            both run the same kernels.
        highest_limit: a floor above it is not rounding: the engine computes another model from
            the same file.
    """

    lowest_limit: float
    highest_limit: float

    def limit(self, floor: float) -> float:
        """The largest mean difference that rounding explains.

        Args:
            floor: the mean difference that was measured at start-up.
        """
        return min(max(TIMES * floor, self.lowest_limit), self.highest_limit)


# Root mean squares that were measured (``skyasync.weight_sync.sync``): float32 rounding 1e-5, one
# stale layer 1.5e-4; bfloat16 rounding 0.1, two swapped tensors 2.3.
FLOAT32 = Rounding(lowest_limit=2e-5, highest_limit=1e-3)
BFLOAT16 = Rounding(lowest_limit=2e-2, highest_limit=0.5)


@dataclass(frozen=True)
class Gap:
    """Absolute differences of one engine's log-probabilities per token, in nats."""

    mean: float
    largest: float


def gap(expected: Scores, actual: Scores) -> Gap:
    """The difference of two lists of scores; infinite if a score is missing or not finite."""
    if list(map(len, expected)) != list(map(len, actual)):
        return Gap(math.inf, math.inf)
    differences = []
    for expected_row, actual_row in zip(expected, actual, strict=True):
        differences += [abs(a - b) for a, b in zip(expected_row, actual_row, strict=True)]
    if not all(map(math.isfinite, differences)):
        return Gap(math.inf, math.inf)
    mean = math.fsum(differences) / max(len(differences), 1)
    return Gap(mean, max(differences, default=0.0))


def choose_probe(
    prompts: Iterable[list[int]], tokens: int, *, cuts: bool = True
) -> list[list[int]]:
    """Choose the first prompts that have no more than ``tokens`` together.

    Args:
        cuts: the first one is cut if it is longer; images cannot be cut.
    """
    probe: list[list[int]] = []
    for prompt in prompts:
        if probe and len(prompt) > tokens:
            break
        probe.append(prompt[:tokens] if cuts else prompt)
        tokens -= len(prompt)
    return probe


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
        highest_limit: float,
        *,
        sync: int,
        engines: int,
        scored: bool,
    ) -> None:
        """Compare the difference of the tokens that were sampled after a sync with the limit.

        Args:
            gap: mean over the tokens of all engines; if one of them is off, only its share counts.
            limit: of the verification prompts.
            most: that is allowed in any case.
            scored: the verification prompts were within the limit after this sync.

        Raises:
            WeightSyncError: for a difference beyond the limit, if tokens have been within it
                before.
        """
        # The mean is over all engines' tokens: one engine at the limit moves it by its share alone.
        is_within = gap <= limit / engines
        if scored:
            # Once they were not as close as the prompts, they never count.
            self._comparable = is_within and self._comparable is not False
        if not self._comparable:
            return
        if scored:
            self._floor = max(self._floor, gap)
        allowed_gap = min(max(limit, TIMES * self._floor), highest_limit)
        if not gap <= allowed_gap:  # so that NaN is an error
            raise WeightSyncError(
                f"what the engines sampled by version {version} and the trainer differ by {gap:.3g} in log-probability "
                f"(mean over the batch's tokens of this version); after verified syncs they differed by "
                f"{self._floor:.3g}, and allowed is {allowed_gap:.3g} (generator.weight_sync_tolerance)"
            )
        if is_within:
            self.last_verified = sync
