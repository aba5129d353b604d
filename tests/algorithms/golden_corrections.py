"""From other frameworks' names of corrections to our functions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from skyasync.algorithms import corrections as c
from skyasync.algorithms.kl import bernoulli_kl
from skyasync.algorithms.losses.selective import small_second_moment
from skyasync.algorithms.masked import masked_mean
from skyasync.algorithms.off_policy import approximate_proximal, effective_sample_size
from tests.algorithms.golden_case import Case, Results, adapter

INF = float("inf")
AGGREGATES = {"sum": "sequence", "mean": "geometric", "max": "max"}


def correction_weights(case: Case) -> Tensor:
    """The factor of the policy loss, in the case's framework; ``[batch, length]``."""
    proximal = case["old_log_probs"].detach()
    return _DIALECTS[case.peer](case, proximal, case["rollout_log_probs"], case.mask)


def _openrlhf(case: Case, proximal: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    low, high = case.params["low"], case.params["high"]
    if "seq_mask_tis" in case.name:
        return c.sequence_mask_tis(proximal, behaviour, mask, low=low, high=high, cap=high)
    function = c.icepop if "icepop" in case.name else c.token_tis
    return function(proximal, behaviour, mask, low=low, high=high)


def _skyrl(case: Case, proximal: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    p, args = case.params, (proximal, behaviour, mask)
    weight = torch.ones_like(proximal)
    if p.get("tis_ratio_type") == "token":
        weight = weight * c.token_tis(*args, high=p["token_tis_ratio_clip_high"])
    if p.get("tis_ratio_type") == "sequence":
        weight = weight * c.sequence_tis(*args, high=p["sequence_tis_ratio_clip_high"])
    if p.get("sequence_mask_metric") == "geometric":
        weight = weight * c.geometric_mask(*args, low=p["geo_mask_low"], high=p["geo_mask_high"])
    if "token_mask_is_threshold_low" in p:
        bounds = {
            "low": p["token_mask_is_threshold_low"],
            "high": p["token_mask_is_threshold_high"],
        }
        weight = weight * c.token_mask(*args, **bounds)
    return weight


def _areal(case: Case, proximal: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    return c.token_tis(proximal, behaviour, mask, low=0.0, high=case.params["behave_cap"])


def _roll(case: Case, proximal: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    return roll_weight(case, proximal, behaviour, mask) * roll_keep(case, proximal, behaviour, mask)


def roll_weight(case: Case, proximal: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    level = case.params.get("weight_type")
    if level is None:
        return torch.ones_like(proximal)
    functions = {
        "token": c.token_tis, "sequence": c.sequence_tis, "geometric": c.geometric_tis, "segment": c.segment_tis,
    }  # fmt: skip
    return functions[level](proximal, behaviour, mask, low=0.0, high=case.params["cap"])


def roll_keep(case: Case, proximal: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    p, args = case.params, (proximal, behaviour, mask)
    if "diff_low" in p:
        return c.difference_mask(*args, low=p["diff_low"], high=p["diff_high"])
    filters = p.get("filters") or (
        [[p.get("agg", "token"), p["low"], p["high"]]] if "low" in p else []
    )
    functions = {"token": c.token_mask, "sequence": c.sequence_mask, "geometric": c.geometric_mask}
    keep = torch.ones_like(proximal)
    for level, low, high in filters:
        keep = keep * functions[level](*args, low=low, high=high)
    return keep


def _trl(case: Case, proximal: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    p, args = case.params, (proximal, behaviour, mask)
    if "opsm" in case.name:
        return c.negative_mask(
            case["log_probs"].detach(),
            behaviour,
            _columns(case["advantages"]),
            mask,
            threshold=p["threshold"],
        )
    functions = {
        "token_truncate": c.token_tis, "token_mask": c.icepop,
        "sequence_truncate": c.sequence_tis, "sequence_mask": c.sequence_icepop,
    }  # fmt: skip
    return functions[p["mode"]](*args, low=p["low"] or 0.0, high=p["high"])


def _verl(case: Case, proximal: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    p, args, level = case.params, (proximal, behaviour, mask), case.params.get("level", "token")
    bounds = [float(v) for v in str(p["threshold"]).split("_")]
    if len(bounds) == 2:
        function = c.icepop if level == "token" else c.sequence_icepop
        return function(*args, low=bounds[0], high=bounds[1])
    return (c.token_tis if level == "token" else c.sequence_tis)(*args, low=0.0, high=bounds[0])


_DIALECTS = {
    "openrlhf": _openrlhf,
    "skyrl": _skyrl,
    "areal": _areal,
    "roll": _roll,
    "trl": _trl,
    "verl": _verl,
}


def areal_weights(proximal: Tensor, behaviour: Tensor, mask: Tensor, *, metric: str, level: str, upper: float,
                  lower: float | None, agg: str = "mean", action: str = "mask") -> Tensor:  # fmt: skip
    """AReaL's rejection: the ratio itself is bounded, or its KL estimate decides which tokens keep their ratio."""
    scale = "token" if level == "token" else AGGREGATES[agg]
    bounds = {"low": -INF if lower is None else lower, "high": upper}
    if metric == "ratio":  # in both cases a sequence's weight is the geometric mean
        weight = c.importance_weights(
            proximal, behaviour, mask, "token" if level == "token" else "geometric"
        )
        if action == "clamp":
            return c.truncate(weight, lower or 0.0, upper)
        return weight * c.inside(c.importance_weights(proximal, behaviour, mask, scale), **bounds)
    # The other direction: KL(proximal || behaviour), so the two policies change places.
    keep = c.kl_mask(
        behaviour, proximal, mask, estimator=metric.removeprefix("kl_"), level=scale, **bounds
    )
    return keep * c.importance_weights(proximal, behaviour, mask)


@adapter("correction")
def _weights_alone(case: Case) -> Results:
    args = case["old_log_probs"], case["rollout_log_probs"], case.mask
    if case.peer == "roll":
        return {"weights": roll_weight(case, *args), "keep": roll_keep(case, *args)}
    if case.peer == "skyrl":
        return _skyrl_alone(case, *args)
    if case.name == "correction.opsm":
        keep = c.negative_mask(
            case["log_probs"].detach(), case["rollout_log_probs"], _columns(case["advantages"]), case.mask,
            threshold=case.params["threshold"],
        )  # fmt: skip
        return {"keep": keep}
    weight = correction_weights(case)
    out: dict[str, Any] = {"ess": effective_sample_size(weight, case.mask)}
    if case.params.get("batch_normalize"):
        weight = c.normalize_weights(
            weight, case.mask, per_sequence=case.params["level"] == "sequence"
        )
    return out | {"weights": weight}


def _skyrl_alone(case: Case, *args: Tensor) -> Results:
    p, name = case.params, case.name.removeprefix("correction.")
    if name == "token_tis":
        return {"weights": c.token_tis(*args, high=p["cap"])}
    if name == "sequence_tis":
        return {"weights": c.sequence_tis(*args, high=p["cap"])}
    functions = {
        "seq_mask_geometric": c.geometric_mask, "seq_mask_product": c.sequence_mask, "token_mask": c.token_mask,
        "outlier_seq_mask": c.outlier_mask,
    }  # fmt: skip
    keep = functions[name](*args, low=p["low"], high=p["high"])
    dropped = masked_mean(1 - keep, case.mask) if name == "token_mask" else (1 - keep[:, 0]).mean()
    return {"keep": keep, "masked_fraction": dropped}


@adapter("correction.reject")
def _verl_rejection(case: Case) -> Results:
    keep = torch.ones_like(case["old_log_probs"])
    levels = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric", "seq_max": "max"}
    for option, bound in zip(
        case.params["options"].split(","), case.params["thresholds"].split(","), strict=True
    ):
        level, _, estimator = option.rpartition("_")
        values = [float(v) for v in bound.split("_")]
        low, high = (math.log(v) for v in values) if estimator == "k1" else (-INF, values[0])
        args = case["old_log_probs"], case["rollout_log_probs"], case.mask
        keep = keep * c.kl_mask(*args, estimator=estimator, level=levels[level], low=low, high=high)
    return {"mask": keep}


@adapter("correction.areal_reject")
def _areal_rejection(case: Case) -> Results:
    weight = areal_weights(
        case["old_log_probs"], case["rollout_log_probs"], case.mask, **case.params
    )
    return {
        "weights": weight,
        "mask": weight > 0,
        "filtered_fraction": masked_mean((weight == 0).double(), case.mask),
    }


@adapter("correction.binary_kl")
def _binary_kl(case: Case) -> Results:
    return {
        "kl": bernoulli_kl(case["old_log_probs"], case["rollout_log_probs"], case.params["eps"])
    }


@adapter("m2po_mask")
def _m2po_mask(case: Case) -> Results:
    args = case["old_log_probs"], case["rollout_log_probs"], case.mask
    return {"mask": small_second_moment(*args, threshold=case.params["m2_threshold"])}


@adapter("prox_approx")
def _proximal(case: Case) -> Results:
    args = (
        case["log_probs"],
        case["rollout_log_probs"],
        case["versions"].long(),
        case.params["current_version"],
    )
    return {
        method: approximate_proximal(*args, method=method)
        for method in ("loglinear", "linear", "rollout")
    }


def _columns(advantages: Tensor) -> Tensor:
    return advantages if advantages.dim() == 2 else advantages.unsqueeze(1)
