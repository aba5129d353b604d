"""AReaL's keys that depend on each other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

from skyasync.config.values import Value, written
from skyasync.interop.conversion import (
    BATCH,
    Conversion,
    ConversionContext,
    N,
    NoCounterpartError,
    converted,
    is_number,
)
from skyasync.interop.draft import BOUNDS, CORRECTION, PLAN, SAMPLING, A, Draft


def _minibatches(value: Value, context: ConversionContext) -> list[Value]:
    """Optimizer steps per batch there, prompts per optimizer step here."""
    batch = context.number(BATCH)
    if not is_number(value) or not value or batch % value:  # type: ignore[operator]
        raise NoCounterpartError(f"{BATCH}={batch:g} does not divide by {value}")
    return [0 if value == 1 else int(batch // value)]  # type: ignore[operator]


def _sizes(value: Value) -> dict[str, int]:
    """``fsdp:d4p1t2`` as sizes by letter."""
    return {
        letter: int(size)
        for letter, size in re.findall(r"([a-z])(\d+)", str(value).rpartition(":")[2])
    }


def _ranks(value: Value, context: ConversionContext) -> list[Value]:
    """Ranks of the policy, and the axes that they are divided by (``d2p2t2``), or experts by the
    data axis (``e4``)."""
    sizes = _sizes(value)
    if not sizes:
        raise NoCounterpartError("")
    dimensions = [sizes.get(letter, 1) for letter in "tcp"]
    experts = sizes.get("e", 1)
    return [sizes.get("d", 1) * prod(dimensions), *dimensions, experts if experts > 1 else 0]


def _engines(value: Value, context: ConversionContext) -> list[Value]:
    sizes = _sizes(value)
    if "d" not in sizes or sizes.get("p", 1) > 1:
        raise NoCounterpartError(
            "stages of an engine are generator.engine_kwargs.pipeline_parallel_size"
        )
    return [sizes["d"], sizes.get("t", 1)]


def _allocation(value: Value, context: ConversionContext) -> list[Value]:
    """``sglang:d4t2+d8``: engines, and ranks of the policy."""
    engines, plus, ranks = str(value).partition("+")
    if not plus:
        raise NoCounterpartError("")
    return [*_ranks(ranks, context), *_engines(engines, context)]


def _minutes(value: Value, context: ConversionContext) -> list[Value]:
    if not isinstance(value, int | float):
        raise NoCounterpartError("")
    return [value / 60]


CONVERSIONS: dict[str, Conversion] = {
    "minibatches": _minibatches,
    "areal_ranks": _ranks,
    "areal_engines": _engines,
    "allocation": _allocation,
    "minutes": _minutes,
}


def finish(draft: Draft) -> None:
    """The objective, adapters and penalties that are on, and what its workflow and its evaluation
    bring."""
    _norms(draft)
    _loss(draft)
    _penalty(draft)
    rank = "trainer.policy.lora.rank"
    if not draft.theirs("actor.use_lora"):
        draft.drop_group("trainer.policy.lora.", "it has no effect there without actor.use_lora")
    elif rank not in draft.ours:
        draft.put(rank, 32, "actor.use_lora")
    buffer = f"{A}overlong_buffer."
    if not draft.theirs("actor.overlong_reward_penalty"):
        draft.drop_group(buffer, "it has no effect there without actor.overlong_reward_penalty")
    elif f"{buffer}len" in draft.ours:
        draft.put(f"{buffer}max_len", draft.theirs("actor.max_new_tokens"), "actor.max_new_tokens")
    _sampling(draft)
    _lengths(draft)
    _steps(draft)
    _checkpoints(draft)
    _data(draft)


def _norms(draft: Draft) -> None:
    """What rewards and advantages are normalized by; a level that is left out is the batch."""
    prefix = "actor.reward_norm"
    estimator = f"{A}advantage_estimator"
    paths = [f"{A}reward_norm_{end}" for end in ("mean", "std")]
    has_norm = any(
        name.startswith(prefix) and draft.given[name] is not None for name in draft.given
    )
    if not has_norm:
        draft.put(estimator, "normalized")
    for path in paths:
        if not has_norm:
            draft.put(path, "none")
        elif path not in draft.ours:
            draft.put(path, "batch", f"{prefix}.{path.rpartition('_')[2]}_level")
    mean, deviation = (draft.value(path) for path in paths)
    if draft.value(estimator) == "rloo" and (mean, deviation) == ("group", "none"):
        for path in paths:
            draft.drop(path, "the estimator rloo")
    elif draft.value(estimator) == "rloo":
        draft.put(estimator, "normalized", *draft.origin(estimator))
        draft.put(f"{A}extra.leave_one_out", True, f"{prefix}.mean_leave1out")
    if any(name.startswith("critic.") for name in draft.given):
        draft.put(estimator, "gae", *draft.named("critic.path"))
        draft.put(f"{A}gae_whiten", False)
        origin = [name for path in paths for name in draft.origin(path)]
        for path in paths:
            draft.drop(path, "not with a critic: see trainer.algorithm.reward_normalization")
        if has_norm and mean == deviation != "none":
            draft.put(f"{A}reward_normalization", mean, *origin)
            for name in origin:
                draft.left.pop(name, None)
    given = {
        name: value for name, value in draft.given.items() if name.startswith("actor.adv_norm.")
    }
    levels = [given.get(f"actor.adv_norm.{end}_level", "batch") for end in ("mean", "std")]
    if given:
        draft.put(f"{A}advantage_batch_normalize", levels == ["batch", "batch"], *given)
    if given and levels != ["batch", "batch"]:
        mean, deviation = levels
        draft.remarks.append(
            f"advantages are whitened over the batch or not at all; there by the mean of {mean or 'nothing'} and the "
            f"deviation of {deviation or 'nothing'}: actor.adv_norm"
        )


def _loss(draft: Draft) -> None:
    """Which policy the ratio is to, and what weighs stale tokens: only rejection sampling brings a
    weight."""
    path = f"{A}policy_loss_type"
    cap = f"{A}behave_imp_weight_cap"
    losses = {
        "sapo": "actor.use_sapo_loss" if draft.theirs("actor.use_sapo_loss") else "",
        "gspo": "actor.importance_sampling_level" if _by_sequence(draft) else "",
        "m2po": "actor.m2_threshold" if draft.theirs("actor.m2_threshold") is not None else "",
        "dual_clip": "actor.c_clip" if draft.theirs("actor.c_clip") is not None else "",
    }
    loss, name = next(((kind, name) for kind, name in losses.items() if name), ("ppo", ""))
    if loss == "sapo" and _by_sequence(draft):
        draft.put(f"{A}extra.sequence_level", True, "actor.importance_sampling_level")
    elif loss == "gspo":
        draft.put(f"{A}extra.mean_advantage", True, "actor.importance_sampling_level")
    draft.put(path, loss, *([name] if name else []))
    draft.put(CORRECTION, "none")
    anchor = f"{A}ratio_anchor"
    decoupled = "actor.use_decoupled_loss"
    rejection = [name for name in draft.given if name.startswith("actor.rejection_sampling.")]
    rejection += draft.named("actor.behave_imp_weight_cap", "actor.behav_imp_weight_cap")
    if not draft.theirs(decoupled):
        draft.drop(cap, "it has no effect there without actor.use_decoupled_loss")
        return
    draft.drop(anchor, "with actor.use_decoupled_loss they are computed again in any case")
    if not rejection:
        draft.put(
            path,
            loss,
            decoupled,
            *([name] if name else []),
            note="there is no weight without rejection_sampling",
        )
        return
    _rejection(draft, loss, [decoupled, *rejection])


def _by_sequence(draft: Draft) -> bool:
    return draft.theirs("actor.importance_sampling_level") == "sequence"


def _rejection(draft: Draft, loss: str, names: Sequence[str]) -> None:
    """The weight of proximal over behaviour policy, and what happens to those out of bounds."""
    prefix = "actor.rejection_sampling."
    cap = f"{A}behave_imp_weight_cap"
    level = draft.theirs(f"{prefix}level")
    action = draft.theirs(f"{prefix}action")
    metric = draft.theirs(f"{prefix}metric")
    lower = draft.theirs(f"{prefix}lower")
    upper = draft.value(cap) if cap in draft.ours else 5.0
    for name in ("level", "action", "lower"):
        draft.left.pop(f"{prefix}{name}", None)
    if metric != "ratio":
        draft.remarks.append(
            f"tokens are not left out by {prefix}metric={metric}; each has its weight"
        )
        level = "token"
        action = "clamp"
        lower = None
        upper = 1e9
    if level == "sequence" and draft.theirs(f"{prefix}agg") != "mean":
        draft.remarks.append(
            f"sequences are judged by the mean of their tokens; there {prefix}agg decides"
        )
    if (level, action, lower, loss) == ("token", "mask", None, "ppo"):
        draft.put(f"{A}policy_loss_type", "decoupled_ppo", *names)
        draft.put(cap, upper, *names)
        return
    draft.ours.pop(cap, None)
    kind = {
        ("token", "mask"): "icepop",
        ("token", "clamp"): "token_tis",
        ("sequence", "mask"): "sequence_icepop",
        ("sequence", "clamp"): "geometric_tis",
    }[str(level), str(action)]
    draft.put(CORRECTION, kind, *names)
    low, high = BOUNDS[kind]
    draft.put(high, upper, *names)
    draft.put(low or f"{A}extra.low", lower or 0.0, *names)
    if kind == "sequence_icepop":
        draft.put(f"{A}extra.level", "geometric", *names)


def _penalty(draft: Draft) -> None:
    """A KL term in the reward, if there is a reference."""
    reference = any(name.startswith("ref.") for name in draft.given) or bool(draft.given.get("ref"))
    weight = draft.theirs("actor.kl_ctl")
    if not reference:
        for name in ("use_kl_in_reward", "kl_loss_coef", "kl_estimator_type"):
            draft.drop(f"{A}{name}", "there is no reference without ref")
        draft.drop_unasked("trainer.ref.model.dtype")
        if weight:
            draft.remarks.append(
                f"there is no KL term; there actor.kl_ctl={written(weight)} without ref rewards unlikely tokens, by "
                f"their log-probability"
            )
        return
    draft.set_kl(False, float(weight) if isinstance(weight, int | float) else 0.0)
    draft.set_kl_clamp("k1", "k2", "k3")
    draft.remark_kl_in_reward()


def _sampling(draft: Draft) -> None:
    """Sampling and its evaluation; the trained log-probabilities have a temperature of their own
    there."""
    temperature = draft.theirs("gconfig.temperature")
    trained = draft.theirs("actor.temperature") or 1.0
    if not draft.theirs("gconfig.greedy"):
        draft.set_one_of(f"{SAMPLING}.temperature", "gconfig.temperature")
        if temperature != trained:
            there = f"there at actor.temperature={written(trained)}"
            draft.remarks.append(
                f"trained log-probabilities are at {SAMPLING}.temperature; {there}"
            )
    draft.remark_filters()
    evaluation = "generator.eval_sampling_params."
    samples = "generator.eval_n_samples_per_prompt"
    given = [name for name in draft.given if name.startswith("eval_gconfig.")]
    if not given:  # as in training
        draft.put(f"{evaluation}temperature", None)
        draft.put(samples, draft.value(N), *draft.origin(N))
    elif not draft.theirs("eval_gconfig.greedy"):
        usual = {"temperature": 1.0, "top_p": 1.0, "max_generate_length": 16384}
        for name, value in usual.items():
            if f"{evaluation}{name}" not in draft.ours:
                draft.put(f"{evaluation}{name}", value, "eval_gconfig")


def _lengths(draft: Draft) -> None:
    """A prompt is as long as the engine's context is beyond a response, if the data set bounds it
    no further."""
    path = "trainer.max_prompt_length"
    if path in draft.ours:
        return
    context = "generator.max_model_len"
    # the engines' default there
    if context in draft.ours:
        whole = draft.value(context)
    else:
        whole = 32768
    response = draft.number(f"{SAMPLING}.max_generate_length")
    if isinstance(whole, int) and whole > response:
        draft.put(
            path,
            int(whole - response),
            *draft.origin(context),
            note="what a response leaves of the context",
        )


def _steps(draft: Draft) -> None:
    """Rates and weights of the optimizer, and requests in flight at a weight update."""
    if draft.value(PLAN) == "fully_async":
        origin = draft.origin(PLAN)
        draft.put(
            "trainer.partial_rollout",
            "recompute",
            *origin,
            note="interrupted requests begin with their tokens",
        )
    for section in ("policy", "critic"):
        draft.remark_warm_up(section)
    schedule = draft.value("trainer.policy.optimizer_config.scheduler")
    if schedule != "constant" and draft.theirs("actor.ppo_n_minibatches") != 1:
        draft.remarks.append(
            "the learning rate changes with each optimizer step; there with each batch"
        )
    fsdp = str(draft.theirs("actor.backend") or "fsdp").startswith("fsdp")
    if fsdp and draft.value("trainer.policy.model.dtype") == "bfloat16":
        draft.remarks.append(
            "weights and AdamW's state are float32 here, and passes are computed in bfloat16; "
            "there with FSDP all are bfloat16"
        )


def _checkpoints(draft: Draft) -> None:
    """Intervals of a recovery that is off have no effect."""
    if draft.theirs("recover.mode") not in ("disabled", "off"):
        return
    for path, unit in (("trainer.ckpt_interval", "steps"), ("trainer.ckpt_minutes", "secs")):
        recovery = f"recover.freq_{unit}"
        saver = f"saver.freq_{unit}"
        if recovery not in draft.origin(path):
            continue
        draft.drop(path, "it has no effect there with recover.mode=disabled")
        if saver in draft.given:
            row = draft.system.table.exact[saver]
            settings = converted(row, draft.given[saver], draft.context()) or {}
            for key, entry in settings.items():
                draft.put(key, entry, saver)


def _data(draft: Draft) -> None:
    """What its loaders know of a data set, and what they add to it."""
    for key, split in (("train_data", "train"), ("val_data", "test")):
        sources = draft.value(f"data.{key}")
        if not isinstance(sources, list):
            continue
        if any("gsm8k" in str(source) for source in sources):  # its loader knows these
            draft.put("data.prompt_key", "question")
            draft.put("data.label_key", "answer")
            draft.put(
                f"data.{key}", [f"{s}#main:{split}" if s == "openai/gsm8k" else s for s in sources]
            )
        if key == "train_data" and any(
            re.search("gsm8k|torl", str(source), re.IGNORECASE) for source in sources
        ):
            draft.remarks.append(
                "prompts are the data's; there the loader adds to each the request to put the final answer "
                "within \\boxed{}: write it into the data"
            )
    if (
        draft.value("environment.reward_funcs") == []
        and "generator.agent_program" not in draft.ours
    ):
        draft.left.setdefault(
            "workflow", "the reward is in the program: write environment.reward_funcs"
        )
