"""ROLL's keys that depend on each other."""

from __future__ import annotations

import re

from skyasync.config.values import Value
from skyasync.interop.conversion import BATCH, Conversion, ConversionContext, N, NoCounterpartError
from skyasync.interop.draft import MINI, PLACEMENT, PLAN, A, Draft

_ESTIMATOR = f"{A}advantage_estimator"


def _count(value: Value, context: ConversionContext) -> list[Value]:
    """How many devices ``list(range(0,8))`` are."""
    if isinstance(value, list):
        return [len(value)]
    match = re.fullmatch(r"list\(range\((?:(\d+),)?(\d+)\)\)", str(value).replace(" ", ""))
    if not match:
        raise NoCounterpartError("")
    return [int(match[2]) - int(match[1] or 0)]


def _engines(value: Value, context: ConversionContext) -> list[Value]:
    """Devices over the size of an engine."""
    [devices] = _count(value, context)
    return [int(devices) // int(context.number("generator.inference_engine_tensor_parallel_size"))]  # type: ignore[arg-type]


def _proportions(value: Value, context: ConversionContext) -> list[Value]:
    if not isinstance(value, dict):
        raise NoCounterpartError("")
    return [{domain: {"proportion": share} for domain, share in value.items()}]


CONVERSIONS: dict[str, Conversion] = {"count": _count, "engines": _engines, "proportions": _proportions}


def finish(draft: Draft) -> None:
    """Which KL is meant, rewards' norms, the ratio's staleness, updates per batch, batches of agents."""
    group = "train_env_manager.group_size"
    if any(name.startswith(("train_env_manager", "val_env_manager")) for name in draft.given):
        draft.put(N, draft.given.get(group, 1), group)
        draft.set_prompts(BATCH, int(draft.theirs("rollout_batch_size")), "rollout_batch_size")  # type: ignore[arg-type]
    in_loss, in_reward = bool(draft.theirs("use_kl_loss")), bool(draft.theirs("add_token_level_kl"))
    name = "kl_loss_coef" if in_loss else "init_kl_coef"
    coefficient = draft.theirs(name) if in_loss or in_reward else 0
    coefficient = coefficient if isinstance(coefficient, int | float) else 0
    if coefficient:
        draft.put(f"{A}kl_loss_coef", coefficient, name)
    draft.set_kl(in_loss, coefficient)
    weight = "train_infer_correction.is_weight."
    bounds: list[Value] = [0, draft.theirs(f"{weight}upper_bound")]
    enabled = bool(draft.theirs(f"{weight}enabled"))
    draft.set_correction(enabled, bounds, f"{weight}weight_type", f"{weight}upper_bound")
    norms = ("norm_mean_type", "norm_std_type", "reward_normalization.method", "reward_normalization.grouping")
    if any(draft.given.get(name) not in (None, "identity") for name in norms):
        draft.put(_ESTIMATOR, "normalized", *draft.named(*norms))
        _without_norms(draft, *norms[:2])
    if draft.value(N) == 1 and draft.value(_ESTIMATOR) == "grpo":
        # Its estimator alone compares nothing: groups are compared by the norms of rewards.
        draft.put(_ESTIMATOR, "normalized", *draft.named("adv_estimator"))
        _without_norms(draft)
    if not draft.theirs("whiten_advantages"):  # as these estimators do here by themselves
        if draft.value(_ESTIMATOR) == "gae":
            draft.put(f"{A}gae_whiten", False)
        elif draft.value(_ESTIMATOR) == "reinforce++" and draft.number(f"{A}gamma") == 1 and not in_reward:
            draft.put(_ESTIMATOR, "normalized", *draft.named("adv_estimator"))
            _without_norms(draft)
    if not draft.theirs("use_pg_clip_range"):
        for end in ("low", "high"):
            draft.set_one_of(f"{A}eps_clip_{end}", "pg_clip")
    draft.set_staleness("async_generation_ratio")
    if draft.value(PLAN) == "fully_async":
        draft.put("trainer.eval_mode", "pause")  # as its validation does
    size, accumulation = (
        f"actor_train.training_args.{name}" for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    per_device, steps = draft.theirs(size), draft.given.get(accumulation)
    if isinstance(per_device, int) and isinstance(steps, int):
        ranks = draft.number(f"{PLACEMENT}policy_num_gpus_per_node")
        draft.set_prompts(MINI, int(per_device * steps * ranks), size, accumulation)


def _without_norms(draft: Draft, *names: str) -> None:
    """Rewards are not normalised by what no key asks for; ``names`` are their keys for mean and standard deviation."""
    for at, end in enumerate(("mean", "std")):
        if f"{A}reward_norm_{end}" not in draft.ours:
            draft.put(f"{A}reward_norm_{end}", "none", *draft.named(*names[at : at + 1]))
