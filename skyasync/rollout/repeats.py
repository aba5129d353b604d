"""Do the samples of a group repeat each other more often than their own probabilities allow?

Invariant: exact, not a rule of thumb. Say the samples of a group are drawn one after the other, and sample j repeats
one before it with probability q_j: the sum of the probabilities of the different samples before it, which the engine
has reported (its behaviour log-probabilities). For every bet b > 0 the product over all samples of
``(1 + b * repeated) / (1 + b * q_j)`` then has an expected value of 1 if they were drawn independently, so that it
exceeds 1/p with a probability of at most p (Markov's inequality), for any model, length and number of samples.

Engines that share a random stream give repeats of probability 1e-20, and the product explodes; a policy that has
collapsed onto one answer repeats it with probability near 1, and the product stays where it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from skyasync.rollout.types import Group, Trajectory

BETS = (1.0, 1e2, 1e4, 1e8, 1e12, 1e16)  # their products are averaged: for many likely repeats, or one unlikely
FALSE_ALARM = 1e-9  # probability per step


class Repeats(NamedTuple):
    """``found`` repeats among ``samples``, where ``expected`` would be by the engine's own probabilities.

    ``surprise`` is the logarithm (base 10) of how unlikely that is: 9 is at most one case in 10**9.
    """

    samples: int = 0
    found: int = 0
    expected: float = 0.0
    surprise: float = 0.0

    @property
    def impossible(self) -> bool:
        return self.surprise > -math.log10(FALSE_ALARM)


def count_repeats(groups: Iterable[Sequence[tuple[bytes, float]]]) -> Repeats:
    """From each group's samples: what was drawn, and the log-probability of drawing it. Those with NaN are left out."""
    samples = found = 0
    expected = 0.0
    logs = np.zeros(len(BETS))
    bets = np.array(BETS)
    for group in groups:
        seen: dict[bytes, float] = {}
        for drawn, logprob in group:
            if math.isnan(logprob):
                continue
            again = min(math.fsum(seen.values()), 1.0)
            samples, found, expected = samples + 1, found + (drawn in seen), expected + again
            logs += np.log1p(bets * (drawn in seen)) - np.log1p(bets * again)
            seen[drawn] = math.exp(min(logprob, 0.0))
    evidence = (np.logaddexp.reduce(logs) - math.log(len(BETS))) / math.log(10)
    return Repeats(samples, found, expected, float(evidence) if samples else 0.0)


def repeats_of(groups: Sequence[Group]) -> Repeats:
    """Over the trajectories that have a response. Greedy sampling, which is not by the probabilities, is an alarm."""
    return count_repeats([[_drawn(t) for t in group.trajectories if t.actions] for group in groups])


def repeat_metrics(repeats: Repeats) -> dict[str, float]:
    """The share of samples that repeat one of their group, and what it was expected to be."""
    if not repeats.samples:
        return {}
    return {
        "response/repeated": repeats.found / repeats.samples,
        "response/repeated_expected": repeats.expected / repeats.samples,
        **({"warnings/repeated_samples": 1.0} if repeats.impossible else {}),
    }


def repeat_warning(repeats: Repeats) -> str:
    """Empty where nothing is wrong."""
    if not repeats.impossible:
        return ""
    return (
        f"{repeats.found} of {repeats.samples} samples repeat another of their group token for token, where the "
        f"engine's own probabilities expect {repeats.expected:.2g}: the samples are not independent, and a group "
        f"carries less than its size says (do engines draw from the same random numbers, or do requests set a "
        f"temperature of 0 or a seed?)"
    )


def _drawn(trajectory: Trajectory) -> tuple[bytes, float]:
    """All that was read and written, with its borders, and the log-probability of having drawn what was drawn.

    Two that began alike are alike in the end if the environment said the same too, which is less likely still.
    """
    segments = [segment for sequence in trajectory.sequences for segment in sequence]
    tokens = b"|".join(np.asarray(segment.tokens, dtype=np.int64).tobytes() for segment in segments)
    return tokens, math.fsum(float(np.sum(action.logprobs)) for action in trajectory.actions)
