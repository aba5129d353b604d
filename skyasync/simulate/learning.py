"""How fast a task is learned, and what staleness takes from a step: a law fitted on pilot runs.

After n steps of staleness s_1 ... s_n the policy has made the progress p and earns the reward R(p):

    p    = sum over i of 1 / (1 + (cost * s_i) ** power)
    R(p) = ceiling - (ceiling - start) * exp(-rate * p)

The first line: the linear term of gradient descent with delayed gradients converges as exp(-n / delay) (Arjevani, Shamir
and Srebro 2020, "A tight convergence analysis for stochastic gradient descent with delayed updates"), so a step counts
1 / (1 + cost * s) steps on policy, with ``power`` 1. At a constant learning rate the measured loss is steeper; with
three levels of staleness the power is fitted too (Hill's function). The second line: rewards saturate. Khatri et al. 2025,
"The art of scaling reinforcement learning compute for LLMs", fit a sigmoid of compute; a short run shows only a part of
one, for which an exponential has enough parameters. Nor does it show the ceiling, which is therefore given.

Invariant: pure; least squares on a grid that is refined, so a fit has no starting point and always the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import numpy as np
from numpy.typing import NDArray

from skyasync.errors import UserError
from skyasync.observability.jsonl import Row

Array = NDArray[np.float64]
LEAST_STEPS = 8  # of a pilot run with its metric
APART = 0.5  # versions between the mean staleness of runs that tell its cost
BLOCK = 5  # steps whose residuals stay together when they are drawn again: neighbours are alike
_POINTS, _LEVELS, _NARROWER = 7, 14, 0.6  # of the grid, and its width at each level beside the one before
_RATE, _COST, _POWER = (0.02, 20.0), (1e-3, 10.0), (0.5, 4.0)  # _RATE: divided by the longest run's steps


@dataclass(frozen=True)
class Pilot:
    """``staleness`` of the steps 1, 2, ...; ``rewards``, and the ``versions`` of the weights that earned them."""

    staleness: Array
    versions: Array
    rewards: Array

    @property
    def mean_staleness(self) -> float:
        return float(self.staleness.mean())


@dataclass(frozen=True)
class LearningLaw:
    """``rate``: the share of what is missing to the ceiling that a step on policy gains, if it is small."""

    start: float
    ceiling: float
    rate: float
    cost: float
    power: float = 1.0

    def reward(self, progress: Array) -> Array:
        rewards: Array = self.ceiling - (self.ceiling - self.start) * np.exp(-self.rate * progress)
        return rewards

    def steps_to(self, target: float, staleness: float) -> float:
        """Steps of that staleness until the policy earns the target, which is below the ceiling."""
        if target <= self.start:
            return 0.0
        progress = log((self.ceiling - self.start) / (self.ceiling - target)) / self.rate
        return progress * (1 + (self.cost * staleness) ** self.power)


def read_pilot(rows: Sequence[Row], metric: str, name: str) -> Pilot:
    """A run's rows of ``metrics.jsonl``.

    An evaluation is of the weights after its step; what was rolled out for a step, of those its tokens were sampled with.

    Raises:
        UserError: if too few steps have the metric.
    """
    staleness = {
        row["step"]: float(row.get("staleness/mean") or 0.0) for row in rows if row.get("reward/mean") is not None
    }
    measured = {row["step"]: float(row[metric]) for row in rows if row.get(metric) is not None}
    if len(measured) < LEAST_STEPS or not staleness:
        known = sorted({key for row in rows for key, value in row.items() if isinstance(value, float)})
        near = (
            f"; it has {', '.join(key for key in known if 'reward' in key or 'score' in key)}" if not measured else ""
        )
        raise UserError(f"{name}: {len(measured)} steps have {metric}; a pilot needs {LEAST_STEPS} at least{near}")
    steps = np.arange(1, max(staleness) + 1)
    by_step = np.interp(steps, list(staleness), list(staleness.values()))
    at = np.array(list(measured), dtype=float)
    if not metric.startswith("eval/"):
        at = at - 1 - np.interp(at, steps, by_step)
    return Pilot(by_step, np.clip(at, 0, len(steps)), np.array(list(measured.values())))


def fit(pilots: Sequence[Pilot], ceiling: float) -> LearningLaw:
    """The law with the least squared error on all rewards.

    Raises:
        UserError: if all runs have the same staleness, or the reward does not rise.
    """
    levels = sorted(pilot.mean_staleness for pilot in pilots)
    if levels[-1] - levels[0] < APART:
        raise UserError(
            f"the pilot runs have the mean staleness {', '.join(f'{level:.2g}' for level in levels)}: the cost of staleness "
            f"needs two runs that differ by {APART} at least (trainer.plan=sync, and fully_async with max_staleness=4)"
        )
    stale = [level for level in levels if level >= APART]
    steeper = len(stale) > 1 and stale[-1] >= 1.5 * stale[0]
    steps = max(len(pilot.staleness) for pilot in pilots)
    limits = np.log([np.divide(_RATE, steps), _COST, _POWER if steeper else (1.0, 1.0)])
    centre, width = limits.mean(1), np.diff(limits)[:, 0] / 2
    missing = ceiling - np.concatenate([pilot.rewards for pilot in pilots])
    for _ in range(_LEVELS):
        axes = [
            np.exp(np.unique(np.clip(middle + around * np.linspace(-1, 1, _POINTS), *limit)))
            for middle, around, limit in zip(centre, width, limits, strict=True)
        ]
        cost, power = (axis.ravel() for axis in np.meshgrid(*axes[1:], indexing="ij"))
        progress = np.concatenate([_progress(pilot, cost, power) for pilot in pilots], axis=1)
        left = np.exp(-axes[0][:, None, None] * progress)  # [rates, costs, rewards]
        gains = (left * missing).sum(2) / (left**2).sum(2)
        errors = ((gains[:, :, None] * left - missing) ** 2).sum(2)
        i, j = np.unravel_index(errors.argmin(), errors.shape)
        centre, width = np.log([axes[0][i], cost[j], power[j]]), width * _NARROWER
    rate = float(axes[0][i])
    if rate < 1.01 * _RATE[0] / steps:
        raise UserError("the reward does not rise in the pilot runs: there is nothing to extrapolate")
    return LearningLaw(float(ceiling - gains[i, j]), ceiling, rate, float(cost[j]), float(power[j]))


def resampled(pilots: Sequence[Pilot], law: LearningLaw, count: int, seed: int = 0) -> list[LearningLaw]:
    """Laws of pilots whose residuals are drawn again in blocks (moving-block bootstrap, Künsch 1989).

    They tell what the noise of these runs leaves open; not how another seed would learn.
    """
    rng, laws = np.random.default_rng(seed), list[LearningLaw]()
    while len(laws) < count:
        drawn = []
        for pilot in pilots:
            progress = _progress(pilot, np.array([law.cost]), np.array([law.power]))[0]
            expected = law.reward(progress)
            residuals = pilot.rewards - expected
            starts = rng.integers(0, len(residuals) - BLOCK + 1, -(-len(residuals) // BLOCK))
            noise = np.concatenate([residuals[start : start + BLOCK] for start in starts])[: len(residuals)]
            drawn.append(Pilot(pilot.staleness, pilot.versions, expected + noise - noise.mean()))
        laws.append(fit(drawn, law.ceiling))
    return laws


def _progress(pilot: Pilot, cost: Array, power: Array) -> Array:
    """``[laws, rewards]``: the progress that each reward was earned with."""
    each = 1.0 / (1.0 + (cost[:, None] * pilot.staleness) ** power[:, None])
    total = np.concatenate([np.zeros((len(cost), 1)), each.cumsum(1)], axis=1)
    below = np.minimum(pilot.versions.astype(int), len(pilot.staleness) - 1)
    return total[:, below] + (pilot.versions - below) * each[:, below]
