"""Sums of what becomes a metric, over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Totals:
    """Sums over micro-batches, in float64, of what becomes a metric."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, loss: Tensor, mask: Tensor, maps: dict[str, Tensor]) -> None:
        values = {"loss": loss, "tokens": mask.sum()}
        values.update({name: per_token.where(mask, 0.0).sum(dtype=torch.float64) for name, per_token in maps.items()})
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value.detach().double()

    def reduce(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Global loss and token count; the rest as global means over tokens."""
        names = list(self.sums)
        totals = dict(zip(names, sum_over_ranks(torch.stack([self.sums[n] for n in names])).tolist(), strict=True))
        tokens = max(1.0, totals["tokens"])
        return {name: value if name in ("loss", "tokens") else value / tokens for name, value in totals.items()}
