"""The right values where another framework is wrong, computed in plain loops, independent of the library.

Invariant: nothing of the library is used. If another framework computed the right value on the same inputs, the case is
compared with that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tests.algorithms.golden_case import Case

Pin = Callable[[Case], dict[str, Any]]


def right_value(case: Case, cases: dict[str, Case]) -> dict[str, Any]:
    """The right value of the case; empty if it is unknown."""
    if (case.name, case.peer) in _PINS:
        return _PINS[case.name, case.peer](case)
    correct = cases.get(case.raw.get("correct_case") or "")
    if correct is None or correct.inputs != case.inputs:
        return {}
    return correct.expected | ({} if correct.grad is None else {"grad": correct.grad})


def _rows(case: Case, *names: str) -> list[list[tuple[float, ...]]]:
    """For each row, the values of the named inputs on its loss tokens."""
    columns = [case.inputs[name] for name in ("mask", *names)]
    return [
        [values for kept, *values in zip(*(column[i] for column in columns), strict=True) if kept]
        for i in range(len(columns[0]))
    ]


def _ppo(case: Case, current: float, old: float, advantage: float) -> float:
    p, ratio = case.params, math.exp(current - old)
    return -min(ratio * advantage, min(max(ratio, 1 - p["eps_low"]), 1 + p["eps_high"]) * advantage)


def _ppo_with_weights(
    case: Case, weight: Callable[[list, int], float], shrink: bool = False
) -> dict[str, Any]:
    """Weighted PPO, reduced over tokens or sequences; ``weight(row, t)`` from the row's (..., old, rollout) values."""
    rows = _rows(case, "log_probs", "old_log_probs", "advantages", "rollout_log_probs")
    losses, kept = [], 0
    for row in rows:
        weights = [weight(row, t) for t in range(len(row))]
        kept += sum(w != 0 for w in weights)
        losses.append([w * _ppo(case, *token[:3]) for w, token in zip(weights, row, strict=True)])
    if case.params["aggregation"] == "sequence_mean":
        means = [sum(loss) / len(loss) for loss in losses if loss]
        return {"loss": sum(means) / len(means)}
    return {"loss": sum(map(sum, losses)) / (kept if shrink else sum(map(len, losses)))}


def _log_ratios(row: list) -> list[float]:
    return [old - rollout for _, old, _, rollout in row]


def _inside(value: float, low: float, high: float) -> float:
    return float(low <= value <= high)


def _sequence_mask_tis(case: Case) -> dict[str, Any]:
    low, high = case.params["low"], case.params["high"]

    def weight(row: list, t: int) -> float:
        x = _log_ratios(row)
        return _inside(math.exp(sum(x) / len(x)), low, high) * min(math.exp(x[t]), high)

    return _ppo_with_weights(case, weight)


def _filtered(case: Case) -> dict[str, Any]:
    """ROLL's filters, with an effect: dropped tokens are not in the numerator, the denominator stays."""
    p = case.params

    def weight(row: list, t: int) -> float:
        x = _log_ratios(row)
        if "diff_low" in p:
            return _inside(math.exp(row[t][1]) - math.exp(row[t][3]), p["diff_low"], p["diff_high"])
        value = min(math.exp(x[t]), p["cap"]) if p.get("weight_type") == "token" else 1.0
        for level, low, high in p.get("filters") or [[p.get("agg", "token"), p["low"], p["high"]]]:
            stat = {"token": x[t], "geometric": sum(x) / len(x), "sequence": sum(x)}[level]
            value *= _inside(math.exp(stat), low, high)
        return value

    return _ppo_with_weights(case, weight)


def _recomputed(case: Case) -> dict[str, Any]:
    """Only kept tokens, in numerator and denominator; the framework's gradient is right."""
    low, high = case.params["low"], case.params["high"]
    value = _ppo_with_weights(
        case, lambda row, t: _inside(math.exp(_log_ratios(row)[t]), low, high), shrink=True
    )
    return value | {"grad": case.grad}


def _kimi15_filtered(case: Case) -> dict[str, Any]:
    rows = _rows(case, "final_mask", "log_probs", "old_log_probs", "advantages")
    kept = [token[1:] for row in rows for token in row if token[0]]
    tau = case.params["tau"]
    return {"loss": sum(-a * new + tau / 2 * (new - old) ** 2 for new, old, a in kept) / len(kept)}


def _divided_by_batch(case: Case) -> dict[str, Any]:
    """The framework does not divide by the number of sequences."""
    rows = (
        len(case.inputs["mask"])
        if case.name.startswith("aggregate")
        else sum(any(m) for m in case.inputs["mask"])
    )
    out: dict[str, Any] = {"loss": case.expected["loss"] / rows}
    return (
        out if case.grad is None else out | {"grad": [[g / rows for g in row] for row in case.grad]}
    )


def _token_mean(case: Case) -> dict[str, Any]:
    values = [value for row in _rows(case, "loss_matrix") for (value,) in row]
    return {"loss": sum(values) / len(values)}


def _whitened(case: Case) -> dict[str, Any]:
    valid = [value for row in _rows(case, "advantages") for (value,) in row]
    mean = sum(valid) / len(valid)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in valid) / len(valid))
    return {
        "advantages": [[(v - mean) / deviation for v in row] for row in case.inputs["advantages"]]
    }


def _constant_groups_are_zero(case: Case) -> dict[str, Any]:
    advantages, size = [list(row) for row in case.expected["advantages"]], case.params["group_size"]
    for start in range(0, len(advantages), size):
        if len(set(case.inputs["rewards"][start : start + size])) == 1:
            advantages[start : start + size] = [
                [0.0] * len(row) for row in advantages[start : start + size]
            ]
    return {"advantages": advantages}


_PINS: dict[tuple[str, str], Pin] = {
    ("correction.seq_mask_tis.ppo.token_mean", "openrlhf"): _sequence_mask_tis,
    ("correction.seq_mask_tis.ppo.sequence_mean", "openrlhf"): _sequence_mask_tis,
    ("grpo.zero_variance", "openrlhf"): _constant_groups_are_zero,
    ("advantage_whiten", "skyrl"): _whitened,
    ("ppo_clip.seq_mean_token_sum_norm", "roll"): _divided_by_batch,
    ("dual_clip.seq_mean_token_sum_norm", "roll"): _divided_by_batch,
    ("aggregate.seq_mean_token_sum_norm", "roll"): _divided_by_batch,
    ("aggregate.token_mean", "roll"): _token_mean,
    ("kimi15.sample_filter.token_mean", "roll"): _kimi15_filtered,
    ("correction.token_filter.ppo.token_mean", "roll"): _filtered,
    ("correction.geometric_filter.ppo.token_mean", "roll"): _filtered,
    ("correction.diff_filter.ppo.token_mean", "roll"): _filtered,
    ("correction.tis_plus_filters.ppo.token_mean", "roll"): _filtered,
    ("correction.token_filter.ppo_recompute_path.token_mean", "roll"): _recomputed,
}
