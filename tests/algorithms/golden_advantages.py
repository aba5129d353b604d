"""From other frameworks' names of advantages, reward shaping and filters to our functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyasync.algorithms import advantages as a
from skyasync.algorithms import shaping
from skyasync.algorithms.advantages import normalize
from skyasync.algorithms.kl import penalize_rewards
from skyasync.algorithms.masked import whiten
from skyasync.algorithms.shaping import has_variance, mean_inside
from skyasync.algorithms.values import discounted_returns, gae, turn_gae
from tests.algorithms.golden_case import Case, Results, adapter

EPS = {"openrlhf": 1e-9, "skyrl": 1e-6, "verl": 1e-6, "roll": 1e-6, "areal": 1e-5, "trl": 1e-4}
MATRIX = {  # name -> mean, std and the rest of the normalisation matrix
    "grpo.std": ("group", "group", {}),
    "grpo.unscorable": ("group", "group", {}),
    "grpo.zero_variance": ("group", "group", {}),
    "grpo.std_biased": ("group", "group", {"unbiased": False}),
    "grpo.batch_std": ("group", "batch", {}),
    "grpo.group_reward_norm_global_std": ("group", "batch", {}),
    "dr_grpo": ("group", "none", {}),
    "rloo": ("group", "none", {"leave_one_out": True}),
    "rloo.group_std": ("group", "group", {"leave_one_out": True}),
    "batch_norm_reward": ("batch", "batch", {}),
}


def rewards_of(case: Case) -> Tensor:
    return case["rewards"] if case["rewards"] is not None else a.scores(case["token_rewards"])


def matrix(case: Case, name: str, scores: Tensor) -> Tensor:
    mean, std, settings = MATRIX[name]
    settings = dict(settings, raw_std=case.peer in ("trl", "roll") and name == "grpo.batch_std")
    settings["singleton_raw"] = _keeps_alone(case, name)
    if case.peer == "trl" and std != "none":
        return trl_normalize(scores, case.group_ids, mean=mean, std=std, **settings)
    return normalize(scores, case.group_ids, mean=mean, std=std, eps=EPS[case.peer], **settings)


def _keeps_alone(case: Case, name: str) -> bool:
    """SkyRL and verl keep the reward of a group of one; for RLOO only verl's loop does so."""
    if name.startswith("rloo"):
        return case.peer == "verl" and "vectorized" not in case.id
    return case.peer in ("skyrl", "verl")


def trl_normalize(scores: Tensor, group_ids: Tensor, *, std: str, **settings: Any) -> Tensor:
    """As ``normalize``, with TRL's Bessel factor: it computes n / (n - 1) in float32, 3e-8 off for n = 4.

    So it takes the population deviation and its epsilon, and multiplies the result by the factor, pool by pool.
    """
    result, known = torch.zeros_like(scores), ~scores.isnan()
    for pool in group_ids.unique() if std == "group" else [None]:
        member = torch.ones_like(known) if pool is None else group_ids == pool
        n = (known & member).sum().float()
        factor = (n / (n - 1)).double().sqrt()
        some = (
            normalize(
                scores,
                group_ids,
                std=std,
                unbiased=False,
                eps=float(EPS["trl"] / factor),
                **settings,
            )
            / factor
        )
        result = torch.where(member, some, result)
    return result


def per_sample(case: Case, advantages: Tensor) -> Results:
    """One number per sample, and the same on its tokens if the case has tokens."""
    out: dict[str, Any] = {"advantages_per_sample": advantages}
    if case.mask is not None:
        out["advantages"], out["returns"] = a.broadcast(advantages, case.mask)
    return out


@adapter(*MATRIX)
def _matrix(case: Case) -> Results:
    name = case.name.removesuffix(".ragged_groups")
    return per_sample(case, matrix(case, name, rewards_of(case)))


@adapter("grpo.std.kl", "rloo.kl", "reinforce_pp_baseline.kl", "reinforce_pp_baseline.no_std")
def _with_token_kl(case: Case) -> Results:
    p = case.params
    if case.peer == "trl":
        clipped = rewards_of(case).clamp(*p["reward_clip"])
        penalty = torch.where(case.mask, case["old_log_probs"] - case["ref_log_probs"], 0).sum(1)
        return per_sample(case, matrix(case, "rloo", clipped - p["beta"] * penalty))
    name = {"grpo": "grpo.std", "rloo": "rloo"}.get(case.name.split(".")[0], "dr_grpo")
    kl = 0.0 if case["kl"] is None else torch.where(case.mask, case["kl"], 0)
    penalty = torch.zeros(case.mask.shape, dtype=torch.float64) - p["kl_coef"] * kl
    token_rewards = shaping.add_at_end(penalty, matrix(case, name, rewards_of(case)), case.mask)
    returns = discounted_returns(token_rewards, case.mask, gamma=p["gamma"])
    whitened = "reinforce_pp" in case.name
    advantages = (
        whiten(returns, case.mask, scale="no_std" not in case.name, unbiased=False)
        if whitened
        else returns
    )
    return {"advantages": advantages, "returns": returns}


@adapter("rloo.normalized")
def _rloo_normalized(case: Case) -> Results:
    advantages = matrix(case, "rloo", rewards_of(case))
    return per_sample(case, trl_normalize(advantages, case.group_ids, mean="batch", std="batch"))


@adapter("gdpo_like")
def _gdpo(case: Case) -> Results:
    columns = [
        trl_normalize(column, case.group_ids, mean="group", std="group")
        for column in case["rewards_per_func"].T
    ]
    total = (torch.stack(columns, 1) * case["weights"]).sum(1)
    return per_sample(case, trl_normalize(total, case.group_ids, mean="batch", std="batch"))


@adapter("maxrl", "opo", "gpg", "grpo_passk")
def _outcome(case: Case) -> Results:
    args = case["token_rewards"], case.mask, case.group_ids
    family = case.name.split(".")[0]
    if family in ("maxrl", "gpg"):
        return {"advantages": a.ADVANTAGE_ESTIMATORS[family](*args, singleton_raw=True)[0]}
    if family == "opo":
        return {"advantages": a.opo(*args, singleton_raw=True)[0]}
    return {"advantages": a.grpo_passk(*args, eps=case.params["eps"])[0]}


@adapter("remax")
def _remax(case: Case) -> Results:
    returns = discounted_returns(case["token_rewards"], case.mask)
    return {"advantages": returns - case["baseline"].unsqueeze(1), "returns": returns}


@adapter("reinforce", "reinforce_pp")
def _reinforce(case: Case) -> Results:
    p = case.params
    rewards = case["token_rewards"]
    if rewards is None:
        rewards = shaping.add_at_end(
            -p["kl_coef"] * case["kl"] * case.mask, case["rewards"], case.mask
        )
    if p.get("whiten", True):
        advantages, returns = a.reinforce_pp(
            rewards, case.mask, gamma=p["gamma"], unbiased=case.peer != "openrlhf"
        )
    else:
        advantages = returns = discounted_returns(rewards, case.mask, gamma=p["gamma"])
    clip = p.get("clip")
    return {"advantages": advantages.clamp(-clip, clip) if clip else advantages, "returns": returns}


@adapter("reinforce_pp_baseline")
def _reinforce_baseline(case: Case) -> Results:
    rewards = case["token_rewards"]
    if rewards is None:
        rewards = shaping.add_at_end(
            torch.zeros(case.mask.shape, dtype=torch.float64), case["rewards"], case.mask
        )
    args = rewards, case.mask, case.group_ids
    advantages, _ = a.reinforce_pp_baseline(
        *args, unbiased=case.peer != "openrlhf", singleton_raw=case.peer == "verl"
    )
    return {"advantages": advantages, "returns": a.dr_grpo(*args)[0]}


@adapter("gae")
def _gae(case: Case) -> Results:
    p = case.params
    args = case["token_rewards"], case["values"], case.mask
    if "turn_ids" in case.inputs:
        advantages, returns = turn_gae(*args, case["turn_ids"], gamma=p["gamma"], lambd=p["lam"])
    elif "no_eos" in case.inputs:
        end = case["values"][:, -1] * case["no_eos"]
        advantages, returns = gae(*args, gamma=p["gamma"], lambd=p["lam"], bootstrap=end)
    else:
        advantages, returns = a.generalized(
            *args, gamma=p["gamma"], lambd=p["lam"], whitened=p["whiten"]
        )
    return {"advantages": advantages, "returns": returns}


@adapter("advantage_whiten")
def _whiten(case: Case) -> Results:
    if case.peer == "areal":
        return {
            "advantages": whiten(
                case["advantages"], case.mask, eps=case.params["eps"], eps_on="deviation"
            )
        }
    return {"advantages": whiten(case["advantages"], case.mask, unbiased=False)}


@adapter("reward_kl_penalty")
def _reward_kl(case: Case) -> Results:
    p = case.params
    if case.peer == "openrlhf":
        bounds = p["reward_clip"]
        rewards = case["rewards"].clamp(*bounds) if bounds else case["rewards"]
        return {"token_rewards": shaping.add_at_end(-p["kl_coef"] * case["kl"], rewards, case.mask)}
    old, reference = case["old_log_probs"], case["ref_log_probs"]
    if case.peer == "roll":
        mask = case["response_mask"][:, 1:]
        rewards = shaping.add_at_end(torch.zeros_like(old), case["rewards"], mask)
    else:
        mask, rewards = case.mask, case["token_rewards"]
    estimator = p["estimator"]
    bound = 10.0 if estimator == "k3" else 0.0
    out, mean = penalize_rewards(
        rewards, old, reference, mask, coef=p["kl_coef"], estimator=estimator, bound=bound
    )
    return {"token_rewards": out, "avg_kl": mean}


@adapter("reward_pipeline")
def _reward_pipeline(case: Case) -> Results:
    p = case.params
    mask = case["loss_mask"].roll(-1, 1)  # position t predicts token t + 1
    policy = case["logprobs"].roll(-1, 1)
    zeros = torch.zeros_like(policy)
    penalty, _ = penalize_rewards(
        zeros, policy, case["ref_log_probs"], mask, coef=p["kl_coef"], estimator="k1"
    )
    score = shaping.scale_and_clip(
        case["rewards"], bias=p["bias"], scale=p["scaling"], clip=p["clip"]
    )
    token_rewards = shaping.add_at_end(penalty, score, mask)
    whole = torch.ones_like(mask)  # AReaL's return continues over the prompt
    advantages = torch.where(
        mask, discounted_returns(token_rewards, mask), discounted_returns(token_rewards, whole)
    )
    last = mask.int().argmax(1) + mask.sum(1) - 1
    after = torch.arange(mask.shape[1]) > last.unsqueeze(1)
    prompt = ~mask & ~after
    return {
        "advantages": torch.where(prompt, 0, advantages), "token_rewards": token_rewards, "kl_rewards": penalty,
        "shifted_mask": mask,
    }  # fmt: skip


@adapter("dynamic_filter", "difficulty_mask", "zero_variance_filter")
def _group_filter(case: Case) -> Results:
    p = case.params
    groups, members = _groups(case)
    if case.name == "dynamic_filter.mean_upper":
        kept = [not mean_inside(g, p["upper"], float("inf")) for g in groups]
    elif "threshold_down" in p or "low" in p:
        low, high = (
            (p["threshold_down"], p["threshold_up"])
            if "threshold_down" in p
            else (p["low"], p["high"])
        )
        kept = [mean_inside(g, low, high) for g in groups]
    else:
        alone = case.name != "dynamic_filter" or case.peer == "verl"
        kept = [has_variance(g, p.get("tol", 0.0), keep_singletons=alone) for g in groups]
    indices = sorted(i for keep, rows in zip(kept, members, strict=True) if keep for i in rows)
    return {
        "kept": kept,
        "kept_indices": indices,
        "keep": [float(i in indices) for i in range(sum(map(len, members)))],
    }


def _groups(case: Case) -> tuple[list[list[float]], list[list[int]]]:
    """Rewards of each group (of its live members, if the case names them) and its rows."""
    if "group_scores" in case.inputs:
        groups = case.inputs["group_scores"]
        return groups, [[] for _ in groups]
    labels = case.inputs["group"] if "group" in case.inputs else case.inputs["index"]
    rewards = case.inputs["rewards"] if "rewards" in case.inputs else case.inputs["scores"]
    live = (
        [sum(m) > 0 for m in case.inputs["loss_masks"]]
        if "loss_masks" in case.inputs
        else [True] * len(labels)
    )
    members = {
        label: [i for i, other in enumerate(labels) if other == label]
        for label in dict.fromkeys(labels)
    }
    return [[rewards[i] for i in rows if live[i]] for rows in members.values()], list(
        members.values()
    )


@adapter("overlong_penalty")
def _overlong(case: Case) -> Results:
    p = case.params
    capped = case.peer in ("openrlhf", "trl")
    penalty = shaping.overlong_penalty(
        case["lengths"], p["max_len"], p["buffer"], factor=p.get("factor", 1.0), capped=capped
    )
    return {
        "penalty": penalty,
        "rewards": penalty if case["rewards"] is None else case["rewards"] + penalty,
    }


@adapter("stop_properly_penalty")
def _stop_properly(case: Case) -> Results:
    return {
        "rewards": shaping.stop_properly_penalty(
            case["rewards"], case["truncated"].bool(), case.params["coef"]
        )
    }


@adapter("overlong_filter")
def _overlong_filter(case: Case) -> Results:
    rows, width = case.inputs["loss_masks"], max(map(len, case.inputs["loss_masks"]))
    padded = torch.tensor([row + [0] * (width - len(row)) for row in rows]).bool()
    kept = shaping.overlong_filter(padded, case.inputs["stop_reasons"]).int().tolist()
    return {"loss_masks": [new[: len(old)] for new, old in zip(kept, rows, strict=True)]}


@adapter("high_entropy_mask")
def _high_entropy(case: Case) -> Results:
    return {
        "keep": shaping.high_entropy_mask(case["entropies"], case.mask, case.params["quantile"])
    }
