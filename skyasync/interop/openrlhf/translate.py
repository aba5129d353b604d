"""OpenRLHF's keys that depend on each other."""

from __future__ import annotations

import re
from collections.abc import Sequence

from skyasync.config.values import Value
from skyasync.interop.conversion import (
    BATCH,
    Conversion,
    ConversionContext,
    NoCounterpartError,
    as_list,
)
from skyasync.interop.draft import (
    ANCHOR,
    BOUND_PATHS,
    CORRECTION,
    ESTIMATOR,
    HUB,
    KL_COEFFICIENT,
    LOSS,
    PLAN,
    REDUCTION,
    RESPONSE_LENGTH,
    Draft,
)


def _reward(value: Value, context: ConversionContext) -> list[Value]:
    """Files with a ``reward_func``, or the addresses of a reward model's servers."""
    files = [str(file) for file in as_list(value)]
    if all(re.match(r"https?://", file) for file in files):
        # Several servers of one reward model are one name: they take turns.
        return [[",".join(files)]]
    return [[file if ":" in file else f"{file}:reward_func" for file in files]]


def _frozen(value: Value, context: ConversionContext) -> list[Value]:
    """The first steps, in which the policy does not learn.

    Steps are counted from 0 there, and the policy learns from the step after this number.
    """
    if not isinstance(value, int):
        raise NoCounterpartError("a whole number here")
    # -1, the default there, freezes no step.
    return [max(0, value + 1)]


def _wandb(value: Value, context: ConversionContext) -> list[Value]:
    return [["jsonl", "wandb"] if value else ["jsonl"]]


def _tensorboard(value: Value, context: ConversionContext) -> list[Value]:
    return [["jsonl", "tensorboard"] if value else ["jsonl"]]


CONVERSIONS: dict[str, Conversion] = {
    "reward": _reward,
    "frozen": _frozen,
    "wandb": _wandb,
    "tensorboard": _tensorboard,
}


def finish(draft: Draft) -> None:
    """Apply the rules for keys that depend on each other.

    Where there are two names, the second one is that of earlier releases.
    """
    switch = ("algo.advantage.is_correction_enable", "enable_vllm_is_correction")
    correction = ("algo.advantage.is_correction_type", "vllm_is_correction_type")
    bounds = ("algo.advantage.is_correction_threshold", "vllm_is_truncated_threshold")
    enabled = bool(draft.source_value(*switch) or draft.source_keys.get("use_icepop"))
    draft.set_correction(enabled, draft.source_value(*bounds), *correction, *bounds)
    _objective(draft, draft.present_names(*switch) if enabled else [])
    _lengths(draft)
    _critic(draft)
    draft.set_split("data.train_data", "data.prompt_split", "prompt_split")
    draft.set_split("data.val_data", "eval.split", "eval_split")
    _slice_rows(draft)
    if draft.value(PLAN) == "one_step_off":
        _plan(draft)
    colocate = draft.present_names("train.colocate_all", "colocate_all_models")
    if colocate and draft.source_keys[colocate[0]]:
        # With asynchronous training the engines have their own devices, and the trained models
        # share theirs.
        draft.put("trainer.placement.colocate_policy_ref", True, *colocate)
        if draft.value(ESTIMATOR) == "gae":
            draft.put("trainer.placement.colocate_policy_critic", True, *colocate)
        if draft.value(PLAN) != "sync":
            # That is with the engines, which have their own devices.
            draft.settings.pop("trainer.placement.colocate_all", None)
    filtered = "trainer.algorithm.dynamic_sampling.type" in draft.settings
    if filtered and "generator.agent_func_path" in draft.settings:
        # Dynamic sampling filters the agent's "scores" there, not its rewards.
        draft.put("trainer.algorithm.dynamic_sampling.metric", "score")


def _lengths(draft: Draft) -> None:
    """The lengths of prompt and response; there is one limit for their sum there."""
    total = draft.source_value("data.max_len", "max_len")
    names = draft.present_names("data.max_len", "max_len")
    response = draft.source_value("rollout.max_new_tokens", "max_new_tokens")
    prompt = "trainer.max_prompt_length"
    if not names and draft.present_names("prompt_max_len", "generate_max_len"):
        # Earlier releases have a limit of each, with this default, and none of the sum.
        draft.settings.pop("generator.max_model_len", None)
        for path in (prompt, RESPONSE_LENGTH):
            if path not in draft.settings:
                draft.put(path, 1024)
    elif isinstance(total, int):
        if isinstance(response, int) and "prompt_max_len" not in draft.source_keys:
            draft.put(prompt, total - response, *names)
        elif response is None and total > draft.number(prompt):
            longest_prompt = draft.number(prompt)
            remaining = total - int(longest_prompt)
            note = "there all that the prompt leaves of it"
            draft.put(RESPONSE_LENGTH, remaining, *names, note=note)
            if prompt not in draft.settings:
                draft.remarks.append(
                    f"prompts of more than {longest_prompt:g} tokens are left out; "
                    f"there of more than {total}: {prompt}"
                )
    buffer = "trainer.algorithm.overlong_buffer.len"
    if draft.number(buffer):
        longest = response if isinstance(response, int) else total
        draft.put("trainer.algorithm.overlong_buffer.max_len", longest, *draft.origin(buffer))


def _objective(draft: Draft, correction_names: Sequence[str]) -> None:
    """The loss with its correction, the whitening of advantages, the KL term, the warm-up.

    Args:
        correction_names: the source keys that switch the correction on.
    """
    loss = ("actor.policy_loss_type", "policy_loss_type")
    if draft.value(LOSS) == "gspo":
        draft.put(REDUCTION, "sequence_mean", *loss)
        if correction_names:
            # OpenRLHF's GSPO then takes its ratio to the engine's policy, without a weight.
            why = "gspo takes its ratio to the engine's log-probabilities and bounds nothing else"
            for path in BOUND_PATHS:
                draft.drop(path, why)
            draft.put(ANCHOR, "behaviour", *correction_names)
            draft.put(CORRECTION, "none", *loss)
    elif draft.value(CORRECTION) == "sequence_mask_tis":
        path = "trainer.algorithm.token_tis_ratio_clip_high"
        note = "the weight is not truncated"
        draft.put(path, 1e9, *draft.origin(CORRECTION), note=note)
    if draft.value(ESTIMATOR) not in ("reinforce++", "reinforce++_baseline"):
        why = "advantages are not whitened, or with gae divided by their deviation in any case"
        draft.drop("trainer.algorithm.extra.scale", why)
    in_loss = bool(draft.source_value("algo.kl.use_loss", "use_kl_loss"))
    draft.set_kl(in_loss, draft.number(KL_COEFFICIENT))
    draft.set_kl_clamp("k1", "k2", "k3")
    draft.remark_kl_in_reward()
    draft.remark_filters()
    draft.remark_warm_up("policy")
    draft.remark_warm_up("critic")
    # OpenRLHF evaluates after steps only.
    draft.put("trainer.eval_before_train", False)


def _critic(draft: Draft) -> None:
    """Initialize a critic without a path from the reward model, if there is one."""
    path = "trainer.critic.model.path"
    reward = "trainer.reward.model.path"
    if draft.value(ESTIMATOR) != "gae":
        return
    if path in draft.settings or reward not in draft.settings:
        return
    # With these keys, the reward model does not give the reward.
    if draft.present_names("reward.remote_url", "remote_rm_url", "train.agent_func_path"):
        return
    reward_models = str(draft.value(reward)).split(",")
    model = reward_models[0]
    draft.put(path, model, *draft.origin(reward), note="the critic begins as the reward model")


def _plan(draft: Draft) -> None:
    """Asynchronous training is one step off-policy there, with two exceptions.

    It may generate beyond a batch, or keep requests over a weight update.
    """
    partial = draft.present_names("train.partial_rollout_enable", "partial_rollout")
    size = draft.present_names("rollout.vllm_generate_batch_size", "vllm_generate_batch_size")
    path = "generator.generate_batch_size"
    prompts = draft.value(path)
    is_larger = bool(size) and isinstance(prompts, int) and prompts > draft.number(BATCH)
    if size and not is_larger:
        draft.drop(path, "no larger than rollout.batch_size, which is generated anyway")
    is_partial = bool(partial) and bool(draft.source_keys[partial[0]])
    if not is_larger and not is_partial:
        return
    names = draft.present_names("train.async_enable", "async_train")
    draft.put(PLAN, "fully_async", *names, *partial, *size)
    queue = ("train.async_queue_size", "async_queue_size")
    staleness = draft.source_value(*queue)
    draft.put("trainer.max_staleness", staleness, *draft.present_names(*queue))
    # It belongs to the plan one_step_off, which the table chose.
    draft.settings.pop("trainer.async_queue_size", None)


def _slice_rows(draft: Draft) -> None:
    """The first rows of a data set, as a slice of its split."""
    path = "data.train_data"
    names = draft.present_names("data.max_samples", "max_samples")
    datasets = draft.value(path)
    if not names or not isinstance(datasets, list):
        return
    name = names[0]
    rows = draft.source_keys[name]
    if not isinstance(rows, int):
        return
    dataset, split = "", "train"
    if len(datasets) == 1:
        dataset, colon, written_split = str(datasets[0]).partition(":")
        if colon:
            split = written_split
    # A split that is a slice already is not cut again.
    if not HUB.fullmatch(dataset) or not re.fullmatch(r"\w*", split):
        draft.no_counterpart[name] = (
            "a data set of the hub is cut by its name: owner/name:train[:1000]"
        )
        return
    slice_name = f"{dataset}:{split}[:{rows}]"
    draft.change(path, [slice_name], name)
    draft.no_counterpart.pop(name, None)
