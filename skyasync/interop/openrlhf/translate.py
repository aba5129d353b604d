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
from skyasync.interop.draft import BOUNDS, CORRECTION, HUB, PLACEMENT, PLAN, SAMPLING, A, Draft


def _reward(value: Value, context: ConversionContext) -> list[Value]:
    """Files with a ``reward_func``, or the addresses of a reward model's servers."""
    files = [str(part) for part in as_list(value)]
    if all(re.match(r"https?://", file) for file in files):
        return [[",".join(files)]]
    return [[file if ":" in file else f"{file}:reward_func" for file in files]]


def _frozen(value: Value, context: ConversionContext) -> list[Value]:
    """Steps are counted from 0 there, and the policy learns from the step behind this number."""
    if not isinstance(value, int):
        raise NoCounterpartError("a whole number here")
    return [max(0, value + 1)]


CONVERSIONS: dict[str, Conversion] = {
    "reward": _reward,
    "frozen": _frozen,
    "wandb": lambda value, context: [["jsonl", "wandb"] if value else ["jsonl"]],
    "tensorboard": lambda value, context: [["jsonl", "tensorboard"] if value else ["jsonl"]],
}


def finish(draft: Draft) -> None:
    """Correction and its thresholds, the objective, the KL term, lengths, data sets, plan and
    placement."""
    switch = ("algo.advantage.is_correction_enable", "enable_vllm_is_correction")
    enabled = bool(draft.theirs(*switch))
    kind = ("algo.advantage.is_correction_type", "vllm_is_correction_type")
    bounds = ("algo.advantage.is_correction_threshold", "vllm_is_truncated_threshold")
    enabled = enabled or bool(draft.given.get("use_icepop"))
    draft.set_correction(enabled, draft.theirs(*bounds), *kind, *bounds)
    _objective(draft, draft.named(*switch) if enabled else [])
    total = draft.theirs("data.max_len", "max_len")
    names = draft.named("data.max_len", "max_len")
    response = draft.theirs("rollout.max_new_tokens", "max_new_tokens")
    prompt = "trainer.max_prompt_length"
    if not names and draft.named(
        "prompt_max_len", "generate_max_len"
    ):  # earlier releases, without a limit of both
        draft.ours.pop("generator.max_model_len", None)
        for path in (prompt, f"{SAMPLING}.max_generate_length"):
            if path not in draft.ours:
                draft.put(path, 1024)
    elif isinstance(total, int):  # their limit counts prompt and response together
        if isinstance(response, int) and "prompt_max_len" not in draft.given:
            draft.put(prompt, total - response, *names)
        elif response is None and total > draft.number(prompt):
            rest = total - int(draft.number(prompt))
            note = "there all that the prompt leaves of it"
            draft.put(f"{SAMPLING}.max_generate_length", rest, *names, note=note)
            if prompt not in draft.ours:
                bound = f"prompts of more than {draft.number(prompt):g} tokens are left out"
                draft.remarks.append(f"{bound}; there of more than {total}: {prompt}")
    if draft.number(f"{A}overlong_buffer.len"):
        longest = response if isinstance(response, int) else total
        draft.put(f"{A}overlong_buffer.max_len", longest, *draft.origin(f"{A}overlong_buffer.len"))
    _critic(draft)
    draft.set_split("data.train_data", "data.prompt_split", "prompt_split")
    draft.set_split("data.val_data", "eval.split", "eval_split")
    _first_rows(draft)
    if draft.value(PLAN) == "one_step_off":
        _plan(draft)
    together = draft.named("train.colocate_all", "colocate_all_models")
    if together and draft.given[together[0]]:
        # With asynchronous training the engines have their own devices, and the trained models
        # share theirs.
        draft.put(f"{PLACEMENT}colocate_policy_ref", True, *together)
        if draft.value(f"{A}advantage_estimator") == "gae":
            draft.put(f"{PLACEMENT}colocate_policy_critic", True, *together)
        if draft.value(PLAN) != "sync":
            draft.ours.pop(f"{PLACEMENT}colocate_all", None)
    if "generator.agent_func_path" in draft.ours and f"{A}dynamic_sampling.type" in draft.ours:
        draft.put(
            f"{A}dynamic_sampling.metric", "score"
        )  # what is filtered there, and not the reward


def _objective(draft: Draft, corrected: Sequence[str]) -> None:
    """The loss with its correction, what whitens advantages, the KL term, the warm-up."""
    loss = ("actor.policy_loss_type", "policy_loss_type")
    if draft.value(f"{A}policy_loss_type") == "gspo":
        draft.put(f"{A}loss_reduction", "sequence_mean", *loss)
        if corrected:  # its ratio is to the engine's policy then, without a weight
            for path in {path for pair in BOUNDS.values() for path in pair if path in draft.ours}:
                draft.drop(
                    path,
                    "gspo takes its ratio to the engine's log-probabilities and bounds nothing else",
                )
            draft.put(f"{A}ratio_anchor", "behaviour", *corrected)
            draft.put(CORRECTION, "none", *loss)
    elif draft.value(CORRECTION) == "sequence_mask_tis":
        draft.put(
            f"{A}token_tis_ratio_clip_high",
            1e9,
            *draft.origin(CORRECTION),
            note="the weight is not truncated",
        )
    if draft.value(f"{A}advantage_estimator") not in ("reinforce++", "reinforce++_baseline"):
        draft.drop(
            f"{A}extra.scale",
            "advantages are not whitened, or with gae divided by their deviation in any case",
        )
    draft.set_kl(
        bool(draft.theirs("algo.kl.use_loss", "use_kl_loss")), draft.number(f"{A}kl_loss_coef")
    )
    draft.set_kl_clamp("k1", "k2", "k3")
    draft.remark_kl_in_reward()
    draft.remark_filters()
    for section in ("policy", "critic"):
        draft.remark_warm_up(section)
    draft.put("trainer.eval_before_train", False)


def _critic(draft: Draft) -> None:
    """A critic that is not named begins as the reward model, if there is one."""
    path = "trainer.critic.model.path"
    reward = "trainer.reward.model.path"
    if (
        draft.value(f"{A}advantage_estimator") != "gae"
        or path in draft.ours
        or reward not in draft.ours
    ):
        return
    if draft.named("reward.remote_url", "remote_rm_url", "train.agent_func_path"):
        return
    first = str(draft.value(reward)).partition(",")[0]
    draft.put(path, first, *draft.origin(reward), note="the critic begins as the reward model")


def _plan(draft: Draft) -> None:
    """Asynchronous training that generates beyond a batch or keeps requests over a weight
    update."""
    partial = draft.named("train.partial_rollout_enable", "partial_rollout")
    more = draft.named("rollout.vllm_generate_batch_size", "vllm_generate_batch_size")
    prompts = draft.value("generator.generate_batch_size")
    larger = bool(more) and isinstance(prompts, int) and prompts > draft.number(BATCH)
    if more and not larger:
        draft.drop(
            "generator.generate_batch_size",
            "no larger than rollout.batch_size, which is generated anyway",
        )
    if not larger and not (partial and draft.given[partial[0]]):
        return
    queue = ("train.async_queue_size", "async_queue_size")
    draft.put(
        PLAN, "fully_async", *draft.named("train.async_enable", "async_train"), *partial, *more
    )
    draft.put("trainer.max_staleness", draft.theirs(*queue), *draft.named(*queue))
    draft.ours.pop("trainer.async_queue_size", None)


def _first_rows(draft: Draft) -> None:
    """The first rows of a data set, as a slice of its split."""
    path = "data.train_data"
    name = next(iter(draft.named("data.max_samples", "max_samples")), "")
    rows = draft.given.get(name)
    sources = draft.value(path)
    if not isinstance(rows, int) or not isinstance(sources, list):
        return
    source, colon, split = str(sources[0]).partition(":") if len(sources) == 1 else ("", "", "")
    if not HUB.fullmatch(source) or not re.fullmatch(r"\w*", split):
        draft.left[name] = "a data set of the hub is cut by its name: owner/name:train[:1000]"
        return
    draft.put(path, [f"{source}:{split if colon else 'train'}[:{rows}]"], *draft.origin(path), name)
    draft.left.pop(name, None)
