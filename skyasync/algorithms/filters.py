"""Which groups are worth training on.

Invariant: a filter looks at the rewards of one group (a sequence of floats) and answers yes or no; it imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from skyasync.algorithms.binding import setting


def mean_inside(rewards: Sequence[float], low: float = 0.0, high: float = 1.0) -> bool:
    """``low < mean < high``, both strict: neither solved by all nor by none.

    Source: DAPO's dynamic sampling; OpenRLHF ``dynamic_filtering``, ROLL ``mean_filter`` and ``difficulty_mask``. A
    group of equal partial scores passes: use ``has_variance`` to drop it.
    """
    return low < fmean(rewards) < high


def cannot_be_inside(
    rewards: Sequence[float], samples: int, *, low: float, high: float, least: float, most: float
) -> bool:
    """Whether ``mean_inside`` will say no, whatever the rest of ``samples``, each from ``least`` to ``most``, earn."""
    total, left = sum(rewards), samples - len(rewards)
    return (total + left * most) / samples <= low or (total + left * least) / samples >= high


def has_variance(rewards: Sequence[float], tolerance: float = 0.0, keep_singletons: bool = True) -> bool:
    """Some reward differs from another by more than ``tolerance``: the group has a gradient.

    Args:
        keep_singletons: a group of one passes, there being nothing to compare (verl; SkyRL's zero-variance filter).

    Source: DAPO; SkyRL and verl ask for a standard deviation above 0, which is the same for ``tolerance=0``.
    """
    if len(rewards) <= 1:
        return keep_singletons
    return max(rewards) - min(rewards) > tolerance


def group_filter(cfg: object) -> Callable[[Sequence[float]], bool]:
    """The filter that ``dynamic_sampling`` in the configuration asks for: rewards of a group -> keep it?"""
    kind = setting(cfg, "dynamic_sampling.type", "none")
    if kind == "mean":
        low, high = setting(cfg, "dynamic_sampling.low", 0.0), setting(cfg, "dynamic_sampling.high", 1.0)
        return lambda rewards: mean_inside(rewards, low, high)
    if kind == "variance":
        tolerance = setting(cfg, "dynamic_sampling.tolerance", 0.0)
        return lambda rewards: has_variance(rewards, tolerance)
    return lambda rewards: True
