"""From other frameworks' names of reductions, value losses and KL to our functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyasync.algorithms import LOSS_REDUCTIONS
from skyasync.algorithms.kl import kl_estimate
from skyasync.algorithms.masked import masked_mean, segment_mean
from skyasync.algorithms.values import clipped_value_loss
from tests.algorithms.golden_case import Case, Results, adapter

REDUCTIONS = {
    "token-mean": "token_mean", "token_mean_global": "token_mean", "token-sum": "token_sum",
    "seq-mean-token-mean": "sequence_mean", "seq-mean-token-sum": "sequence_token_sum",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}  # fmt: skip
COUNT_EMPTY = {"skyrl", "trl"}  # a row without loss tokens is still a sequence
ESTIMATORS = {
    "kl": "k1",
    "mse": "k2",
    "low_var_kl": "k3",
    "k1+": "k1_straight_through",
    "k3+": "k3_straight_through",
}


def weights(case: Case, mask: Tensor, name: str | None = None, count_empty: bool = False) -> Tensor:
    """Loss weights by the case's aggregation. Global denominators are those of the whole batch that is described."""
    p = case.params
    name = name or p.get("aggregation") or p["mode"]
    if (
        name == "token_mean_legacy"
    ):  # the mean of micro-batch means: a mean over unequal denominators, unlike ours
        parts = mask.split(p["micro_batch_size"])
        return torch.cat([weights(case, part, "token_mean") / len(parts) for part in parts])
    name = REDUCTIONS.get(name, name)
    groups = torch.arange(len(mask))
    for prompt, (start, end) in enumerate(p.get("prompt_boundaries", [])):
        groups[start:end] = prompt
    settings: dict[str, Any] = {}
    if name in ("sequence_mean", "sequence_token_sum", "seq_mean_token_sum_norm"):
        settings["count_empty"] = (
            count_empty
            or case.peer in COUNT_EMPTY
            or (case.peer == "roll" and case.name.startswith("aggregate"))
        )
    if name == "seq_mean_token_sum_norm":
        constants = ("max_seq_len", "max_completion_length", "loss_scale_factor")
        settings["max_seq_len"] = next((p[c] for c in constants if c in p), 0)
    if "batch_num_tokens" in p:  # our weights see the whole batch: complete it to the given counts
        whole = _complete(mask, p["batch_num_tokens"], p["global_batch_size"])
        share = LOSS_REDUCTIONS[name](whole, torch.arange(len(whole)), **settings)
        return share[: len(mask), : mask.shape[1]] * p["dp_size"]
    if "num_items_in_batch" in p:
        whole = _complete(mask, p["num_items_in_batch"], len(mask) + 1)
        share = LOSS_REDUCTIONS[name](whole, torch.arange(len(whole)))
        return share[: len(mask), : mask.shape[1]] * p["num_processes"]
    return LOSS_REDUCTIONS[name](mask, groups, **settings)


def _complete(mask: Tensor, tokens: int, rows: int) -> Tensor:
    """The mask of a batch of so many tokens and rows that begins with ``mask``."""
    extra, count = tokens - int(mask.sum()), rows - len(mask)
    width = max(mask.shape[1], extra)
    whole = torch.zeros(rows, width, dtype=torch.bool)
    whole[: len(mask), : mask.shape[1]] = mask
    whole[len(mask) : rows - 1, 0] = True
    whole[rows - 1, : extra - (count - 1)] = True
    return whole


def reduced(case: Case, token_loss: Any, mask: Tensor | None = None, name: str | None = None,
            factor: Any = 1.0, count_empty: bool = False) -> Results:  # fmt: skip
    """The case's number from a token loss (with or without statistics)."""
    loss, statistics = token_loss if isinstance(token_loss, tuple) else (token_loss, {})
    mask = case.mask if mask is None else mask
    total = (weights(case, mask, name, count_empty) * torch.where(mask, loss * factor, 0)).sum()
    return {"loss": total} | {
        name: masked_mean(s.double(), case.mask) for name, s in statistics.items()
    }


@adapter("value_clip")
def _value(case: Case) -> Results:
    loss, statistics = clipped_value_loss(
        case["values"], case["old_values"], case["returns"], clip=case.params["clip"]
    )
    out = reduced(case, loss)
    return out | {
        "clip_fraction": masked_mean(statistics["value_clip_fraction"].double(), case.mask)
    }


@adapter("kl")
def _kl(case: Case) -> Results:
    p = case.params
    name = ESTIMATORS.get(p["estimator"], p["estimator"])
    clamps_all = case.peer == "openrlhf" or p.get("clamp")
    bound = (
        10.0
        if clamps_all or (case.peer in ("skyrl", "verl", "roll") and name.startswith("k3"))
        else 0.0
    )
    kl = kl_estimate(case["log_probs"], case["ref_log_probs"], name, bound=bound)
    return {"kl": kl if case.mask is None else torch.where(case.mask, kl, 0)}


@adapter("aggregate")
def _aggregate(case: Case) -> Results:
    weight = weights(case, case.mask)
    samples = case["weights"].unsqueeze(1) if case["weights"] is not None else 1.0
    loss = (weight * samples * torch.where(case.mask, case["loss_matrix"], 0)).sum()
    return {"loss": loss, "weights": weight}


@adapter("segment_masked_mean")
def _segments(case: Case) -> Results:
    return {"result": segment_mean(case["values"], case.mask)}
