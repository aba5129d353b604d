"""ROLL's keys that depend on each other."""

from __future__ import annotations

import re

from skyasync.config.values import Value
from skyasync.interop.conversion import BATCH, Conversion, ConversionContext, N, NoCounterpartError
from skyasync.interop.draft import (
    ENGINE_SIZE,
    ESTIMATOR,
    KL_COEFFICIENT,
    LOSS,
    MINI,
    PLAN,
    REDUCTION,
    RESPONSE_LENGTH,
    Draft,
)


def _count(value: Value, context: ConversionContext) -> list[Value]:
    """The number of devices in a list or in ``list(range(0,8))``."""
    if isinstance(value, list):
        return [len(value)]
    match = re.fullmatch(r"list\(range\((?:(\d+),)?(\d+)\)\)", str(value).replace(" ", ""))
    if not match:
        raise NoCounterpartError("")
    return [int(match[2]) - int(match[1] or 0)]  # range(begin, end), or range(end)


def _engines(value: Value, context: ConversionContext) -> list[Value]:
    """The number of engines: devices over the size of an engine."""
    [devices] = _count(value, context)
    return [int(devices) // int(context.number(ENGINE_SIZE))]  # type: ignore[arg-type]


def _proportions(value: Value, context: ConversionContext) -> list[Value]:
    """The fraction of prompts from each domain, as settings of the domains."""
    if not isinstance(value, dict):
        raise NoCounterpartError("")
    return [{domain: {"proportion": fraction} for domain, fraction in value.items()}]


CONVERSIONS: dict[str, Conversion] = {
    "count": _count,
    "engines": _engines,
    "proportions": _proportions,
}


_NORM_TYPES = ("norm_mean_type", "norm_std_type")
_NORMS = (
    "norm_mean_type",
    "norm_std_type",
    "reward_normalization.method",
    "reward_normalization.grouping",
    "reward_normalization.norm_mean_type",
    "reward_normalization.norm_std_type",
)


def finish(draft: Draft) -> None:
    """Apply the rules for keys that depend on each other."""
    agents = False
    for name in draft.source_keys:
        agents = agents or name.startswith(("train_env_manager", "val_env_manager"))
    if agents:
        # Batches of agents are counted in trajectories, and have groups of their own.
        group = "train_env_manager.group_size"
        draft.put(N, draft.source_keys.get(group, 1), group)
        responses = int(draft.source_value("rollout_batch_size"))  # type: ignore[arg-type]
        draft.set_prompts(BATCH, responses, "rollout_batch_size")
    else:
        _lengths(draft)
    _penalty(draft)
    weight = "train_infer_correction.is_weight."
    bounds: list[Value] = [0, draft.source_value(f"{weight}upper_bound")]
    enabled = bool(draft.source_value(f"{weight}enabled"))
    draft.set_correction(enabled, bounds, f"{weight}weight_type", f"{weight}upper_bound")
    _norms(draft, agents=agents)
    _whitening(draft)
    if not draft.source_value("use_pg_clip_range"):
        # Without this switch ROLL reads pg_clip, and not the two bounds.
        draft.set_one_of("trainer.algorithm.eps_clip_low", "pg_clip")
        draft.set_one_of("trainer.algorithm.eps_clip_high", "pg_clip")
    _variant(draft)
    clip = draft.source_value("pg_clip")
    if draft.value(LOSS) == "dual_clip" and isinstance(clip, int | float):
        # ROLL has no key for the second bound.
        note = "1 + 2 pg_clip"
        draft.put(
            "trainer.algorithm.clip_ratio_c", 1 + 2 * clip, "dual_clip_loss", "pg_clip", note=note
        )
    if draft.value(REDUCTION) == "seq_mean_token_sum_norm":
        draft.remarks.append(
            f"{REDUCTION}: divided by the number of responses, too; there by the width alone"
        )
    draft.set_staleness("async_generation_ratio")
    if draft.value(PLAN) == "fully_async":
        draft.put("trainer.eval_mode", "pause")  # ROLL's validation pauses the rollout, too
    if draft.source_value("adv_estimator") in ("step_reinforce", "agentic_reinforce"):
        draft.remarks.append(
            "an episode has one reward; there each step is a sample with its own discounted reward"
        )
    _updates(draft)
    _validation(draft)
    if draft.number("generator.sampling_params.temperature") != 1:
        draft.remarks.append(
            "trained log-probabilities are at generator.sampling_params.temperature; there at 1"
        )
    draft.remark_filters()
    draft.remark_kl_in_reward()
    draft.remark_warm_up("policy")
    draft.remark_warm_up("critic")


def _variant(draft: Draft) -> None:
    """A loss by its name. ROLL may clip it twice, and only some of its workers read the name."""
    names = draft.present_names("actor_train.pg_variant", "pg_variant")
    if draft.source_value("dual_clip_loss") and draft.value(LOSS) == "ppo":
        draft.put(LOSS, "dual_clip", "dual_clip_loss", *names)
    if names and "pg_worker" not in str(draft.source_keys.get("actor_train.worker_cls")):
        draft.remarks.append(
            f"{names[0]} counts; there with a worker_cls that reads it alone, such as ActorPGWorker"
        )
    if draft.value(LOSS) == "topr":
        draft.remarks.append(
            f"{LOSS}=topr: positive samples have a positive advantage, there a positive reward"
        )


def _lengths(draft: Draft) -> None:
    """The response length: the rest of a sequence after its prompt.

    It has precedence over ``response_length`` and over the engine's own key.
    """
    response = draft.source_value("response_length")
    sequence = draft.source_value("sequence_length")
    prompt = draft.source_value("prompt_length")
    if isinstance(sequence, int) and isinstance(prompt, int):
        draft.put(RESPONSE_LENGTH, sequence - prompt, "sequence_length", "prompt_length")
    elif isinstance(response, int):
        draft.put(RESPONSE_LENGTH, response, "response_length")


def _penalty(draft: Draft) -> None:
    """The KL term: in the loss always k3, clamped; in the reward as ``kl_penalty`` says."""
    in_loss = bool(draft.source_value("use_kl_loss"))
    in_reward = bool(draft.source_value("add_token_level_kl"))
    name = "kl_loss_coef" if in_loss else "init_kl_coef"
    coefficient = draft.source_value(name)
    if not isinstance(coefficient, int | float) or not (in_loss or in_reward):
        coefficient = 0
    if coefficient:
        draft.put(KL_COEFFICIENT, coefficient, name)
    if in_loss:
        draft.put("trainer.algorithm.kl_estimator_type", "k3", "use_kl_loss")
    draft.set_kl(in_loss, coefficient)
    draft.set_kl_clamp("k3")
    if in_loss and in_reward:
        draft.remarks.append(
            "the KL term is in the loss alone; there it is in the reward, too: add_token_level_kl"
        )


def _norms(draft: Draft, *, agents: bool) -> None:
    """The baseline of rewards: their group with grpo, else the pools of their norms."""
    mean_path = "trainer.algorithm.reward_norm_mean"
    deviation_path = "trainer.algorithm.reward_norm_std"
    # Agents, and groups of one, have no baseline of their group.
    has_groups = not agents and draft.value(N) != 1
    if has_groups and draft.source_value("adv_estimator") == "grpo":
        for path in (mean_path, deviation_path):
            draft.drop(path, "grpo compares a group's rewards by their mean and deviation")
        if draft.value(ESTIMATOR) == "normalized":
            draft.put(ESTIMATOR, "grpo", "adv_estimator")
    else:
        _rewards_of_agents(draft)
        values = [draft.source_keys.get(name) for name in _NORMS]
        has_norm = any(value not in (None, "identity") for value in values)
        if has_norm or draft.value(ESTIMATOR) == "grpo":
            # A group estimator would normalize once more.
            draft.put(ESTIMATOR, "normalized", *draft.present_names("adv_estimator", *_NORMS))
            _disable_missing_norms(draft, *_NORM_TYPES)
    pools = [draft.value(mean_path), draft.value(deviation_path)]
    if draft.value(ESTIMATOR) == "normalized" and pools == ["group", "batch"]:
        note = "the deviation of the rewards themselves"
        draft.put("trainer.algorithm.extra.raw_std", True, *draft.origin(deviation_path), note=note)
    clip = draft.number("trainer.algorithm.reward_clip")
    if clip and draft.value(ESTIMATOR) in ("grpo", "normalized"):
        draft.remarks.append(
            f"trainer.algorithm.reward_clip={clip:g} bounds the rewards; there what their norms make of them"
        )


def _rewards_of_agents(draft: Draft) -> None:
    """The norms that ``method`` and ``grouping`` stand for, if they are not set themselves."""
    method_name = "reward_normalization.method"
    grouping_name = "reward_normalization.grouping"
    if not draft.present_names(method_name, grouping_name):
        return
    grouping = str(draft.source_keys.get(grouping_name, "batch"))
    pool = {"traj_group_id": "group", "batch": "batch"}.get(grouping)
    if pool is None:
        return
    method = draft.source_keys.get(method_name, "identity")
    # The methods that normalize by each statistic.
    methods = {"mean": ("mean", "mean_std", "asym_clip"), "std": ("mean_std", "asym_clip")}
    for statistic, normalizing in methods.items():
        if draft.source_keys.get(f"reward_normalization.norm_{statistic}_type") is None:
            level = pool if method in normalizing else "none"
            draft.put(
                f"trainer.algorithm.reward_norm_{statistic}", level, method_name, grouping_name
            )


def _whitening(draft: Draft) -> None:
    """Advantages are whitened only on request there; some estimators always do it here."""
    if draft.source_value("whiten_advantages"):
        return
    if draft.value(ESTIMATOR) == "gae":
        draft.put("trainer.algorithm.gae_whiten", False)
    elif draft.value(ESTIMATOR) == "reinforce++":
        if draft.number("trainer.algorithm.gamma") == 1 and not draft.value(
            "trainer.algorithm.use_kl_in_reward"
        ):
            # Without discount and penalty each token's return is the reward.
            draft.put(ESTIMATOR, "normalized", *draft.present_names("adv_estimator"))
            _disable_missing_norms(draft)
        else:
            draft.put("trainer.algorithm.extra.scale", False, "adv_estimator")
            draft.remarks.append(
                f"{ESTIMATOR}=reinforce++ subtracts the batch's mean advantage; there nothing does"
            )


def _updates(draft: Draft) -> None:
    """Prompts per optimizer step: responses per device, accumulation and data-parallel ranks."""
    size = "actor_train.training_args.per_device_train_batch_size"
    accumulation = "actor_train.training_args.gradient_accumulation_steps"
    per_device = draft.source_value(size)
    steps = draft.source_keys.get(accumulation, 1)
    if isinstance(per_device, int) and isinstance(steps, int):
        ranks = draft.number("trainer.placement.policy_num_gpus_per_node")
        for dimension in ("tensor", "context", "pipeline"):
            # Ranks of these dimensions compute the same responses.
            ranks //= draft.number(f"trainer.parallel.{dimension}")
        draft.set_prompts(MINI, int(per_device * steps * ranks), size, accumulation)


def _validation(draft: Draft) -> None:
    """The sampling of a validation; without its group there is none, and nothing to set."""
    prefix = "validation.generating_args."
    if not any(name.startswith(prefix) for name in draft.source_keys):
        return
    # ROLL's defaults of GeneratingArguments.
    for name, default in (("temperature", 0.95), ("top_p", 0.7), ("top_k", 50)):
        source = f"{prefix}{name}"
        if source not in draft.source_keys:
            draft.put(f"generator.eval_sampling_params.{name}", default, source)


def _disable_missing_norms(draft: Draft, mean_name: str = "", deviation_name: str = "") -> None:
    """Disable our norms that no key sets; the names are the source keys of mean and deviation."""
    norms = {
        "trainer.algorithm.reward_norm_mean": mean_name,
        "trainer.algorithm.reward_norm_std": deviation_name,
    }
    for path, name in norms.items():
        if path not in draft.settings:
            draft.put(path, "none", *draft.present_names(name))
