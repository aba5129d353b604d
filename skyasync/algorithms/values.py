"""How well a critic foresaw what came."""

from __future__ import annotations

from torch import Tensor

from skyasync.algorithms.masked import masked_mean


def value_metrics(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, float]:
    """Means over the tokens of ``mask``, and the share of the returns' variance that the values explain.

    ``1 - Var(R - V) / Var(R)``: 1 is foreseen exactly, 0 no better than a constant, less is worse than one. 0 where the
    returns do not differ.
    """
    variance = _variance(returns, mask)
    explained = 1.0 - _variance(returns - values, mask) / variance if variance > 0 else 0.0
    return {
        "explained_variance": explained,
        "values_mean": float(masked_mean(values, mask)),
        "returns_mean": float(masked_mean(returns, mask)),
    }


def _variance(values: Tensor, mask: Tensor) -> float:
    return float(masked_mean((values.double() - masked_mean(values.double(), mask)).square(), mask))
