"""From other frameworks' names of policy losses to our functions."""

from __future__ import annotations

import math
from typing import Any

import torch

from skyasync.algorithms.corrections import kl_mask
from skyasync.algorithms.kl import kl_estimate
from skyasync.algorithms.losses import clipped, gradient, selective
from skyasync.algorithms.masked import log_ratio, masked_mean
from skyasync.algorithms.off_policy import approximate_proximal
from skyasync.algorithms.shaping import high_entropy_mask
from tests.algorithms.golden_case import Case, Results, adapter
from tests.algorithms.golden_corrections import areal_weights, correction_weights
from tests.algorithms.golden_reductions import reduced


def clip(case: Case) -> dict[str, float]:
    return {"eps_low": case.params["eps_low"], "eps_high": case.params["eps_high"]}


def base_ppo(case: Case, anchor: str = "old_log_probs") -> Any:
    bound = case.params.get("dual_clip") or case.params.get("delta")
    if bound:
        return clipped.dual_clip(
            case["log_probs"], case[anchor], case["advantages"], dual_clip=bound, **clip(case)
        )
    return clipped.ppo(case["log_probs"], case[anchor], case["advantages"], **clip(case))


@adapter("ppo_clip", "dual_clip", "two_sided_clip")
def _ppo(case: Case) -> Results:
    out = reduced(case, base_ppo(case), mask=case["final_mask"])
    return out | {"approx_kl": masked_mean(case["old_log_probs"] - case["log_probs"], case.mask)}


@adapter("ppo_clip.kl_loss", "ppo_clip.kl_loss_bias_corrected")
def _ppo_with_kl(case: Case) -> Results:
    p, current = case.params, case["log_probs"]
    ratio = (
        log_ratio(current, case["old_log_probs"]).exp() if "bias_corrected" in case.name else None
    )
    kl = kl_estimate(
        current,
        case["ref_log_probs"],
        "k3",
        bound=10.0 if case.peer == "roll" else 0.0,
        weight=ratio,
    )
    policy, _ = base_ppo(case)
    out = reduced(
        case, policy + p.get("kl_coef", p.get("beta")) * kl, factor=p.get("rl_loss_coef", 1.0)
    )
    return out | {"kl": masked_mean(kl, case.mask), "kl_loss": masked_mean(kl, case.mask)}


@adapter("ppo_clip.top_entropy")
def _ppo_on_high_entropy(case: Case) -> Results:
    keep = high_entropy_mask(case["entropies"], case.mask, 1 - case.params["top_entropy_quantile"])
    return reduced(case, base_ppo(case), factor=keep)


@adapter("correction.token_tis.ppo", "correction.token_tis.dual_clip_ppo", "correction.token_tis_two_sided.ppo",
         "correction.icepop.ppo", "correction.token_mask_upper.ppo", "correction.sequence_tis.ppo",
         "correction.sequence_mask.ppo", "correction.seq_geo_mask.ppo", "correction.seq_tis.ppo",
         "correction.seq_mask_tis.ppo", "correction.geometric_tis.ppo", "correction.segment_tis.ppo",
         "correction.token_filter.ppo", "correction.geometric_filter.ppo", "correction.diff_filter.ppo",
         "correction.tis_plus_filters.ppo", "correction.opsm.ppo")  # fmt: skip
def _corrected_ppo(case: Case) -> Results:
    weight = correction_weights(case)
    if case.peer == "roll" and case.params["aggregation"] == "sequence_mean":
        # Filtered tokens are not in each sequence's mean, but the sequences are counted before the filter.
        out = reduced(
            case, base_ppo(case), mask=case.mask & (weight > 0), factor=weight, count_empty=True
        )
    else:
        out = reduced(case, base_ppo(case), factor=weight)
    kl = masked_mean(case["rollout_log_probs"] - case["old_log_probs"], case.mask)
    return out | {"keep": weight, "rollout_kl": kl}


@adapter("correction.token_filter.ppo_recompute_path")
def _filtered_ppo(case: Case) -> Results:
    return reduced(case, base_ppo(case), mask=case.mask & correction_weights(case).bool())


@adapter("gspo", "luspo", "rloo_sequence_loss")
def _gspo(case: Case) -> Results:
    anchor = case["rollout_log_probs"] if "rollout_anchored" in case.name else case["old_log_probs"]
    loss = clipped.gspo(
        case["log_probs"], anchor, case["advantages"], case.mask, **clip(case),
        token_gradient=case.peer in ("skyrl", "verl") or "gspotoken" in case.id,
        mean_advantage=case.peer == "areal", product=case.name == "rloo_sequence_loss",
    )  # fmt: skip
    names = {"luspo": "sequence_token_sum", "rloo_sequence_loss": "sequence_mean"}
    out = reduced(case, loss, name=names.get(case.name))
    return out | {"approx_kl": masked_mean(case["old_log_probs"] - case["log_probs"], case.mask)}


@adapter("gmpo")
def _gmpo(case: Case) -> Results:
    args = case["log_probs"], case["old_log_probs"], case["advantages"], case.mask
    return reduced(case, clipped.gmpo(*args, **clip(case)), name="sequence_mean")


@adapter("vespo")
def _vespo(case: Case) -> Results:
    settings = {k: case.params[k] for k in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")}
    args = case["log_probs"], case["old_log_probs"], case["advantages"], case.mask
    return reduced(case, clipped.vespo(*args, **settings))


@adapter("cispo")
def _cispo(case: Case) -> Results:
    p, factor = case.params, 1.0
    eps = {"eps_low": p.get("eps_low", 1.0), "eps_high": p["eps_high"]}
    if "upper_only_absolute" in case.name:
        eps = {"eps_low": 1.0, "eps_high": p["eps_high"] - 1.0}
    anchor = case["rollout_log_probs"] if "rollout_anchor" in case.name else case["old_log_probs"]
    loss, statistics = gradient.cispo(
        case["log_probs"],
        anchor,
        case["advantages"],
        unified_mask="unified_mask" in case.name,
        **eps,
    )
    if case.name == "cispo.decoupled":
        factor = correction_weights(case)
    if "upper_only_absolute" in case.name:  # TRL reports the clips of positive advantages only
        statistics = {"clip_fraction": statistics["clip_fraction"] & (case["advantages"] > 0)}
    ratio = log_ratio(case["log_probs"], anchor).exp()
    valid = ratio[case.mask]
    out = reduced(case, (loss, statistics), factor=factor)
    return out | {"ratio_mean": valid.mean(), "ratio_max": valid.max(), "ratio_min": valid.min()}


@adapter("sapo")
def _sapo(case: Case) -> Results:
    taus = {name: case.params[name] for name in ("tau_pos", "tau_neg")}
    if case.peer == "trl":  # rounds both to float32
        taus = {name: torch.tensor(tau, dtype=torch.float32).item() for name, tau in taus.items()}
    args = case["log_probs"], case["old_log_probs"], case["advantages"], case.mask
    return reduced(
        case, clipped.sapo(*args, sequence_level=case.params.get("level") == "sequence", **taus)
    )


@adapter("vanilla_pg", "tis_pg", "kimi15", "dro", "topr", "importance_sampling", "rollout_is")
def _policy_gradient(case: Case) -> Results:
    p, family = case.params, case.name.split(".")[0]
    current, old, advantages = case["log_probs"], case["old_log_probs"], case["advantages"]
    if family == "vanilla_pg":
        loss: Any = gradient.vanilla(current, advantages)
    elif family == "tis_pg":
        loss = gradient.tis(current, old, advantages, low=p["low"], high=p["high"])
    elif family == "topr":
        sides = {k: p[k] for k in ("positive_weight", "negative_weight")}
        loss = gradient.topr(
            current, old, advantages, positive=(case["scores"] > 0).unsqueeze(1), **sides
        )
    elif family == "rollout_is":
        loss = gradient.rollout_is(current, case["rollout_log_probs"], advantages, **clip(case))
    elif family == "importance_sampling":
        loss = clipped.importance_sampling(current, old, advantages)
    else:
        loss = gradient.kimi15(current, old, advantages, tau=p.get("tau", p.get("beta")))
    out = reduced(case, loss, mask=case["final_mask"])
    return out | {"ratio_mean": masked_mean((current - old).exp(), case.mask)}


@adapter("dppo")
def _dppo(case: Case) -> Results:
    p = case.params
    behaviour = case["rollout_log_probs"] if case.peer == "skyrl" else case["old_log_probs"]
    loss = clipped.dppo(
        case["log_probs"], behaviour, case["advantages"], divergence=case.name.removeprefix("dppo.binary_"),
        delta_low=p["delta_low"], delta_high=p["delta_high"], ratio_cap=p.get("ratio_cap"),
    )  # fmt: skip
    return reduced(case, loss)


@adapter("clip_cov", "kl_cov")
def _covariance(case: Case) -> Results:
    p, current, old, advantages = (
        case.params,
        case["log_probs"],
        case["old_log_probs"],
        case["advantages"],
    )
    if case.name.startswith("kl_cov"):
        chosen = selective.top_covariance(
            current.detach(), advantages, case.mask, share=p["kl_cov_frac"]
        )
        return reduced(case, selective.kl_cov(current, old, advantages, chosen, coef=p["kl_coef"]))
    _, statistics = base_ppo(case)
    chosen = selective.mid_covariance(
        current.detach(), advantages, case.mask, share=p["clip_ratio"], low=p["cov_lb"], high=p["cov_ub"],
        eligible=~statistics["clip_fraction"],
    )  # fmt: skip
    return reduced(case, selective.clip_cov(current, old, advantages, chosen, **clip(case)))


@adapter("decoupled_ppo", "decoupled_gspo")
def _decoupled(case: Case) -> Results:
    p, current, behaviour = case.params, case["log_probs"], case["rollout_log_probs"]
    rejection = p.get("rejection", {})
    if case.name == "decoupled_ppo.token_cap_mask":
        args = current, case["old_log_probs"], behaviour, case["advantages"]
        loss, statistics = clipped.decoupled_ppo(*args, cap=rejection["upper"], **clip(case))
        return reduced(case, loss) | {"weights": statistics["correction_weight"]}
    if case.name == "decoupled_ppo.loglinear_prox":
        proximal = approximate_proximal(
            current, behaviour, case["versions"].long(), p["current_version"]
        )
        args = current, proximal, behaviour, case["advantages"]
        return reduced(
            case, clipped.decoupled_ppo(*args, cap=p["behave_cap"], truncated=True, **clip(case))
        )
    weight = areal_weights(case["old_log_probs"], behaviour, case.mask, **rejection)
    if case.name.startswith("decoupled_gspo"):
        kept = case.mask & (weight > 0)
        args = current, case["old_log_probs"], case["advantages"], kept
        return reduced(case, clipped.gspo(*args, mean_advantage=True, **clip(case)), factor=weight)
    return reduced(case, base_ppo(case), factor=weight) | {"weights": weight}


@adapter("m2po")
def _m2po(case: Case) -> Results:
    old, behaviour = case["old_log_probs"], case["rollout_log_probs"]
    keep = selective.small_second_moment(
        old, behaviour, case.mask, threshold=case.params["m2_threshold"]
    )
    loss = selective.m2po(case["log_probs"], old, case["advantages"], keep, **clip(case))
    return reduced(case, loss, mask=case.mask & keep) | {"mask": keep}


@adapter("bypass")
def _bypass(case: Case) -> Results:
    p, current, behaviour = case.params, case["log_probs"], case["rollout_log_probs"]
    low, high = (math.log(float(v)) for v in p["rollout_rs_threshold"].split("_"))
    keep = kl_mask(current, behaviour, case.mask, estimator="k1", level="token", low=low, high=high)
    if p["loss_type"] == "reinforce":
        loss: Any = gradient.tis(
            current, behaviour, case["advantages"], low=0.0, high=p["rollout_is_threshold"]
        )
    else:
        loss = base_ppo(case, anchor="rollout_log_probs")
    return reduced(case, loss, mask=case.mask & keep.bool())
