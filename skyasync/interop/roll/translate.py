"""ROLL's keys that depend on each other."""

from __future__ import annotations

import re

from skyasync.config.values import Value
from skyasync.interop.conversion import BATCH, Conversion, ConversionContext, N, NoCounterpartError
from skyasync.interop.draft import MINI, PLACEMENT, PLAN, SAMPLING, A, Draft

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


CONVERSIONS: dict[str, Conversion] = {
    "count": _count,
    "engines": _engines,
    "proportions": _proportions,
}


def finish(draft: Draft) -> None:
    """Which KL is meant, rewards' norms, the ratio's staleness, updates per batch, batches of
    agents."""
    group = "train_env_manager.group_size"
    agents = any(name.startswith(("train_env_manager", "val_env_manager")) for name in draft.given)
    if agents:
        draft.put(N, draft.given.get(group, 1), group)
        draft.set_prompts(BATCH, int(draft.theirs("rollout_batch_size")), "rollout_batch_size")  # type: ignore[arg-type]
    else:
        _lengths(draft)
    _penalty(draft)
    weight = "train_infer_correction.is_weight."
    bounds: list[Value] = [0, draft.theirs(f"{weight}upper_bound")]
    enabled = bool(draft.theirs(f"{weight}enabled"))
    draft.set_correction(enabled, bounds, f"{weight}weight_type", f"{weight}upper_bound")
    _norms(draft, agents=agents)
    _whitening(draft)
    if not draft.theirs("use_pg_clip_range"):
        for end in ("low", "high"):
            draft.set_one_of(f"{A}eps_clip_{end}", "pg_clip")
    _variant(draft)
    clip = draft.theirs("pg_clip")
    if draft.value(f"{A}policy_loss_type") == "dual_clip" and isinstance(clip, int | float):
        draft.put(
            f"{A}clip_ratio_c", 1 + 2 * clip, "dual_clip_loss", "pg_clip", note="1 + 2 pg_clip"
        )
    if draft.value(f"{A}loss_reduction") == "seq_mean_token_sum_norm":
        draft.remarks.append(
            f"{A}loss_reduction: divided by the number of responses, too; there by the width alone"
        )
    draft.set_staleness("async_generation_ratio")
    if draft.value(PLAN) == "fully_async":
        draft.put("trainer.eval_mode", "pause")  # as its validation does
    if draft.theirs("adv_estimator") in ("step_reinforce", "agentic_reinforce"):
        draft.remarks.append(
            "an episode has one reward; there each step is a sample with its own discounted reward"
        )
    _updates(draft)
    _validation(draft)
    if draft.number(f"{SAMPLING}.temperature") != 1:
        draft.remarks.append(f"trained log-probabilities are at {SAMPLING}.temperature; there at 1")
    draft.remark_filters()
    draft.remark_kl_in_reward()
    for section in ("policy", "critic"):
        draft.remark_warm_up(section)


def _variant(draft: Draft) -> None:
    """A loss by name, which may be clipped twice, and which only some workers read."""
    path = f"{A}policy_loss_type"
    named = draft.named("actor_train.pg_variant", "pg_variant")
    if draft.theirs("dual_clip_loss") and draft.value(path) == "ppo":
        draft.put(path, "dual_clip", "dual_clip_loss", *named)
    if named and "pg_worker" not in str(draft.given.get("actor_train.worker_cls")):
        draft.remarks.append(
            f"{named[0]} counts; there with a worker_cls that reads it alone, such as ActorPGWorker"
        )
    if draft.value(path) == "topr":
        draft.remarks.append(
            f"{path}=topr: positive samples have a positive advantage, there a positive reward"
        )


def _lengths(draft: Draft) -> None:
    """A response is as long as a sequence is beyond its prompt, whatever the engine's own key
    says."""
    response = draft.theirs("response_length")
    whole = draft.theirs("sequence_length")
    prompt = draft.theirs("prompt_length")
    path = f"{SAMPLING}.max_generate_length"
    if isinstance(whole, int) and isinstance(prompt, int):
        draft.put(path, whole - prompt, "sequence_length", "prompt_length")
    elif isinstance(response, int):
        draft.put(path, response, "response_length")


def _penalty(draft: Draft) -> None:
    """The KL term: in the loss always k3, clamped; in the reward as ``kl_penalty`` says."""
    in_loss = bool(draft.theirs("use_kl_loss"))
    in_reward = bool(draft.theirs("add_token_level_kl"))
    name = "kl_loss_coef" if in_loss else "init_kl_coef"
    coefficient = draft.theirs(name) if in_loss or in_reward else 0
    if isinstance(coefficient, int | float):
        coefficient = coefficient
    else:
        coefficient = 0
    if coefficient:
        draft.put(f"{A}kl_loss_coef", coefficient, name)
    if in_loss:
        draft.put(f"{A}kl_estimator_type", "k3", "use_kl_loss")
    draft.set_kl(in_loss, coefficient)
    draft.set_kl_clamp("k3")
    if in_loss and in_reward:
        draft.remarks.append(
            "the KL term is in the loss alone; there it is in the reward, too: add_token_level_kl"
        )


def _norms(draft: Draft, *, agents: bool) -> None:
    """What rewards are compared with: their group with grpo, else what their norms say."""
    norm_types = ("norm_mean_type", "norm_std_type")
    if draft.theirs("adv_estimator") == "grpo" and not agents and draft.value(N) != 1:
        for end in ("mean", "std"):
            draft.drop(
                f"{A}reward_norm_{end}",
                "grpo compares a group's rewards by their mean and deviation",
            )
        if draft.value(_ESTIMATOR) == "normalized":
            draft.put(_ESTIMATOR, "grpo", "adv_estimator")
    else:
        _rewards_of_agents(draft)
        norms = (
            *norm_types,
            *(f"reward_normalization.{name}" for name in ("method", "grouping", *norm_types)),
        )
        has_norm = any(draft.given.get(name) not in (None, "identity") for name in norms)
        if has_norm or draft.value(_ESTIMATOR) == "grpo":
            draft.put(_ESTIMATOR, "normalized", *draft.named("adv_estimator", *norms))
            _without_norms(draft, *norm_types)
    mean, deviation = (draft.value(f"{A}reward_norm_{end}") for end in ("mean", "std"))
    if draft.value(_ESTIMATOR) == "normalized" and (mean, deviation) == ("group", "batch"):
        origin = draft.origin(f"{A}reward_norm_std")
        draft.put(
            f"{A}extra.raw_std", True, *origin, note="the deviation of the rewards themselves"
        )
    clip = draft.number(f"{A}reward_clip")
    if clip and (draft.value(_ESTIMATOR) in ("grpo", "normalized")):
        draft.remarks.append(
            f"{A}reward_clip={clip:g} bounds the rewards; there what their norms make of them"
        )


def _rewards_of_agents(draft: Draft) -> None:
    """``method`` and ``grouping`` stand for the norms that are not given themselves."""
    prefix = "reward_normalization."
    method, grouping = (f"{prefix}{name}" for name in ("method", "grouping"))
    if not draft.named(method, grouping):
        return
    pool = {"traj_group_id": "group", "batch": "batch"}.get(str(draft.given.get(grouping, "batch")))
    kind = draft.given.get(method, "identity")
    pools = {
        "mean": kind in ("mean", "mean_std", "asym_clip"),
        "std": kind in ("mean_std", "asym_clip"),
    }
    for end, normalized in pools.items():
        if draft.given.get(f"{prefix}norm_{end}_type") is None and pool:
            draft.put(f"{A}reward_norm_{end}", pool if normalized else "none", method, grouping)


def _whitening(draft: Draft) -> None:
    """Advantages are whitened only where they say so; some estimators do it here by themselves."""
    if draft.theirs("whiten_advantages"):
        return
    if draft.value(_ESTIMATOR) == "gae":
        draft.put(f"{A}gae_whiten", False)
    elif draft.value(_ESTIMATOR) == "reinforce++":
        if draft.number(f"{A}gamma") == 1 and not draft.value(f"{A}use_kl_in_reward"):
            draft.put(_ESTIMATOR, "normalized", *draft.named("adv_estimator"))
            _without_norms(draft)
        else:
            draft.put(f"{A}extra.scale", False, "adv_estimator")
            draft.remarks.append(
                f"{_ESTIMATOR}=reinforce++ subtracts the batch's mean advantage; there nothing does"
            )


def _updates(draft: Draft) -> None:
    """Prompts per optimizer step, from responses per device, accumulation and the ranks that divide
    the batch."""
    size, accumulation = (
        f"actor_train.training_args.{name}"
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    per_device = draft.theirs(size)
    steps = draft.given.get(accumulation, 1)
    if isinstance(per_device, int) and isinstance(steps, int):
        ranks = draft.number(f"{PLACEMENT}policy_num_gpus_per_node")
        for axis in ("tensor", "context", "pipeline"):
            ranks //= draft.number(f"trainer.parallel.{axis}")
        draft.set_prompts(MINI, int(per_device * steps * ranks), size, accumulation)


def _validation(draft: Draft) -> None:
    """A validation that is given has the usual defaults; without one nothing is evaluated."""
    prefix = "validation.generating_args."
    ours = "generator.eval_sampling_params."
    if not any(name.startswith(prefix) for name in draft.given):
        return
    for name, value in (("temperature", 0.95), ("top_p", 0.7), ("top_k", 50)):
        if f"{prefix}{name}" not in draft.given:
            draft.put(f"{ours}{name}", value, f"{prefix}{name}")


def _without_norms(draft: Draft, *names: str) -> None:
    """Rewards are not normalised by what no key asks for; ``names`` are their keys for mean and
    standard deviation."""
    for at, end in enumerate(("mean", "std")):
        if f"{A}reward_norm_{end}" not in draft.ours:
            draft.put(f"{A}reward_norm_{end}", "none", *draft.named(*names[at : at + 1]))
