"""Rewards of one batch compared with each other: the baseline and the scale behind most advantage estimators.

Invariant: statistics are computed in float64; a group whose rewards are all equal gets exactly 0, whatever rounding
and epsilon do. A reward of NaN is no reward: it enters no statistic and its own result is 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyasync.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


def normalize(
    scores: Tensor,
    group_ids: Tensor,
    *,
    mean: str = "group",
    std: str = "group",
    leave_one_out: bool = False,
    unbiased: bool = True,
    eps: float = 1e-6,
    raw_std: bool = False,
    singleton_raw: bool = False,
) -> Tensor:
    """``(score - mean) / (std + eps)``, each over the group, the batch or not at all; ``[batch]``.

    Args:
        scores: ``[batch]``; NaN is a sample without a reward.
        mean, std: "group", "batch" or "none".
        leave_one_out: the mean of the *others* (RLOO).
        unbiased: the standard deviation divides by n - 1.
        raw_std: the spread of the scores (TRL, ROLL), not of the centred ones (AReaL). They differ for
            ``mean="group", std="batch"`` and with ``leave_one_out``. Either is taken about its own pool's mean.
        singleton_raw: a group of one keeps its score as its advantage (SkyRL, verl); otherwise it gets 0, having
            nothing to be compared with.
    """
    values = scores.double()
    known = ~values.isnan()
    values = torch.where(known, values, 0)
    groups = Pools(group_ids, known)
    pools = {"group": groups, "batch": Pools(torch.zeros_like(group_ids), known)}
    centred = values if mean == "none" else _centre(values, pools[mean], leave_one_out)
    result = centred
    if std != "none":
        pool = pools[std]
        deviation = pool.deviation(values if raw_std else centred, unbiased=unbiased)
        result = centred / (torch.where(pool.sizes > 1, deviation, 1.0) + eps)
    if mean == "group":
        alone = values / (1 + eps if std == "group" else 1) if singleton_raw else torch.zeros_like(values)
        result = torch.where(groups.sizes == 1, alone, result)
    return torch.where(known, result, 0).to(scores.dtype)


def _centre(values: Tensor, pool: Pools, leave_one_out: bool) -> Tensor:
    centred = values - pool.mean(values)
    if leave_one_out:
        centred = centred * pool.sizes / (pool.sizes - 1).clamp(min=1)
    return torch.where(pool.constant(values), 0, centred)


class Pools:
    """Statistics of the known members of each pool, handed back to every sample (``[batch]``, float64)."""

    def __init__(self, ids: Tensor, known: Tensor) -> None:
        unique, self.index = torch.unique(ids, return_inverse=True)
        self.count, self.known = len(unique), known
        self.sizes = self.sum(torch.ones_like(known, dtype=torch.float64))

    def sum(self, values: Tensor) -> Tensor:
        totals = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        return totals.index_add(0, self.index, torch.where(self.known, values, 0))[self.index]

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.sizes.clamp(min=1)

    def deviation(self, values: Tensor, *, unbiased: bool = True) -> Tensor:
        """Of the known values of the sample's pool, about their mean."""
        centred = values - self.mean(values)
        return (self.sum(centred.square()) / (self.sizes - int(unbiased)).clamp(min=1)).sqrt()

    def constant(self, values: Tensor) -> Tensor:
        """Bool ``[batch]``: all known values of the sample's pool are the same number."""
        return self.extreme(values, "amax") == self.extreme(values, "amin")

    def extreme(self, values: Tensor, which: str) -> Tensor:
        """The largest ("amax") or smallest ("amin") known value of the sample's pool."""
        fill = -torch.inf if which == "amax" else torch.inf
        totals = torch.full((self.count,), fill, dtype=torch.float64, device=values.device)
        values = torch.where(self.known, values, fill)
        return totals.scatter_reduce(0, self.index, values, which)[self.index]
