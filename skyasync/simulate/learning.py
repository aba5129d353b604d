"""How fast a task is learned, and what staleness takes from a step: a law fitted on pilot runs.

After n steps of staleness s_1 ... s_n the policy has made the progress p and earns the reward R(p):

    p    = sum over i of 1 / (1 + (cost * s_i) ** power)
    R(p) = ceiling - (ceiling - start) * exp(-rate * p)

The first line with ``power`` 1: the linear term of gradient descent with delayed gradients converges as exp(-n / delay)
(Arjevani, Shamir and Srebro 2020, "A tight convergence analysis for stochastic gradient descent with delayed updates").
At a constant learning rate the measured loss is steeper, so the power is fitted (Hill's function) if runs of three
levels of staleness tell it. The second line: rewards saturate. Khatri et al. 2025, "The art of scaling reinforcement
learning compute for LLMs", fit a sigmoid of compute; for the part of it that a short run shows, an exponential is
enough. The run does not show the ceiling, which is therefore given.

Invariant: pure; least squares from the best point of a grid, so a fit always has the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, log

import numpy as np
from numpy.typing import NDArray

from skyasync.errors import UserError
from skyasync.observability.jsonl import Row

Array = NDArray[np.float64]
LEAST_STEPS = 8  # of a pilot run with its metric
LEAST_DIFFERENCE = 0.5  # versions between the mean staleness of runs that tell its cost
BLOCK = 5  # steps whose residuals stay together when they are drawn again: neighbours are alike
_POINTS = 17, 9, 7  # of the grid, by rate, cost and power
_STEPS, _DIFFERENCE = 200, 1e-6  # of the refinement, and of its derivatives
_RATE, _COST, _POWER = (0.02, 20.0), (1e-3, 10.0), (1.0, 8.0)  # _RATE: divided by the longest run's steps


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
    """``rate``: the share of what is missing to the ceiling that a step on policy gains, if it is small.

    With rate 0 the reward does not rise.
    """

    start: float
    ceiling: float
    rate: float
    cost: float
    power: float = 1.0

    def reward(self, progress: Array) -> Array:
        rewards: Array = self.ceiling - (self.ceiling - self.start) * np.exp(-self.rate * progress)
        return rewards

    def steps_to(self, target: float, staleness: float) -> float:
        """Steps of that staleness until the policy earns the target, below the ceiling; inf if it never does."""
        if target <= self.start:
            return 0.0
        if not self.rate:
            return inf
        progress = log((self.ceiling - self.start) / (self.ceiling - target)) / self.rate
        return progress * (1 + (self.cost * staleness) ** self.power)


def read_pilot(rows: Sequence[Row], metric: str, name: str) -> Pilot:
    """A run's rows of ``metrics.jsonl``.

    An evaluation is of the weights after its step; a step's rollouts, of those that sampled their tokens.

    Raises:
        UserError: if too few steps have the metric.
    """
    staleness = {row["step"]: float(row["staleness/mean"]) for row in rows if row.get("staleness/mean") is not None}
    measured = {row["step"]: float(row[metric]) for row in rows if row.get(metric) is not None}
    if min(len(measured), len(staleness)) < LEAST_STEPS:
        raise UserError(
            f"{name}: {len(measured)} steps have {metric} and {len(staleness)} have staleness/mean; a pilot run needs "
            f"{LEAST_STEPS} of both"
        )
    steps = np.arange(1, max(staleness) + 1)
    by_step = np.interp(steps, list(staleness), list(staleness.values()))
    versions = np.array(list(measured), dtype=float)
    if not metric.startswith("eval/"):
        versions = versions - 1 - np.interp(versions, steps, by_step)
    return Pilot(by_step, np.clip(versions, 0, len(steps)), np.array(list(measured.values())))


def tells_power(pilots: Sequence[Pilot]) -> bool:
    """Whether there are two levels of staleness besides 0."""
    stale = [pilot.mean_staleness for pilot in pilots if pilot.mean_staleness >= LEAST_DIFFERENCE]
    return bool(stale) and max(stale) >= 1.5 * min(stale)


def fit(pilots: Sequence[Pilot], ceiling: float, power: float | None = None) -> LearningLaw:
    """The law with the least squared error on all rewards.

    Args:
        power: the law's, if it is not to be fitted.

    Raises:
        UserError: if all runs have the same staleness, or the reward does not rise.
    """
    levels = sorted(pilot.mean_staleness for pilot in pilots)
    if levels[-1] - levels[0] < LEAST_DIFFERENCE:
        raise UserError(
            f"the pilot runs have the mean staleness {', '.join(f'{level:.2g}' for level in levels)}: its cost needs "
            f"two that differ by {LEAST_DIFFERENCE} at least, such as trainer.plan=sync and trainer.plan=fully_async"
        )
    slowest, fastest = np.divide(_RATE, max(len(pilot.staleness) for pilot in pilots))
    limits = np.log([(slowest, fastest), _COST, _POWER if power is None else (power, power)])
    missing = ceiling - np.concatenate([pilot.rewards for pilot in pilots])

    def residuals(points: Array) -> tuple[Array, Array]:
        """``[points, rewards]``, and the best ``ceiling - start`` of each: logarithms of rate, cost and power."""
        rate, costs, powers = np.exp(points).T
        left = np.exp(-rate[:, None] * np.concatenate([_progress(pilot, costs, powers) for pilot in pilots], axis=1))
        gain = left @ missing / (left**2).sum(1)
        return gain[:, None] * left - missing, gain

    values = [np.unique(np.linspace(low, high, points)) for (low, high), points in zip(limits, _POINTS, strict=True)]
    grid = np.stack([axis.ravel() for axis in np.meshgrid(*values, indexing="ij")], axis=1)
    point = grid[(residuals(grid)[0] ** 2).sum(1).argmin()]
    damping = 1e-3
    for _ in range(_STEPS):  # Levenberg-Marquardt, along the limits where it would leave them
        around, _ = residuals(np.concatenate([point[None], point + _DIFFERENCE * np.eye(3)]))
        slopes = (around[1:] - around[0]) / _DIFFERENCE
        downhill = -slopes @ around[0]
        free = np.where(downhill < 0, point > limits[:, 0], point < limits[:, 1])
        curvature = slopes[free] @ slopes[free].T
        step = np.zeros(3)
        step[free] = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature) + 1e-12), downhill[free])
        tried = np.clip(point + step, *limits.T)
        if abs(tried - point).max() < _DIFFERENCE:
            break
        better = (residuals(tried[None])[0] ** 2).sum() < (around[0] ** 2).sum()
        point, damping = (tried, damping / 5) if better else (point, damping * 5)
    rate, cost, power = map(float, np.exp(point))
    if rate < 1.01 * slowest:
        raise UserError("the reward does not rise in the pilot runs: there is nothing to extrapolate")
    return LearningLaw(float(ceiling - residuals(point[None])[1][0]), ceiling, rate, cost, power)


def resampled(pilots: Sequence[Pilot], law: LearningLaw, count: int) -> list[LearningLaw]:
    """Laws of pilots whose residuals are drawn again in blocks (moving-block bootstrap, Künsch 1989).

    They show what the noise of these runs leaves open, and the power if the runs do not tell it; not how another seed
    would learn. A draw in which the reward does not rise gives a law with rate 0.
    """
    random, laws, known = np.random.default_rng(0), list[LearningLaw](), tells_power(pilots)
    for _ in range(count):
        drawn = []
        for pilot in pilots:
            expected = law.reward(_progress(pilot, np.array([law.cost]), np.array([law.power]))[0])
            residuals = pilot.rewards - expected
            starts = random.integers(0, len(residuals) - BLOCK + 1, -(-len(residuals) // BLOCK))
            noise = np.concatenate([residuals[start : start + BLOCK] for start in starts])[: len(residuals)]
            drawn.append(Pilot(pilot.staleness, pilot.versions, expected + noise))
        power = None if known else float(np.exp(random.uniform(*np.log(_POWER))))
        try:
            laws.append(fit(drawn, law.ceiling, power))
        except UserError:
            laws.append(replace(law, rate=0.0))
    return laws


def _progress(pilot: Pilot, cost: Array, power: Array) -> Array:
    """``[laws, rewards]``: the progress that each reward was earned with."""
    each = 1.0 / (1.0 + (cost[:, None] * pilot.staleness) ** power[:, None])
    total = np.concatenate([np.zeros((len(cost), 1)), each.cumsum(1)], axis=1)
    below = np.minimum(pilot.versions.astype(int), len(pilot.staleness) - 1)
    return total[:, below] + (pilot.versions - below) * each[:, below]
