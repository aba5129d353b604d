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
from skyasync.interop.draft import (
    ANCHOR,
    BOUNDS,
    CORRECTION,
    ESTIMATOR,
    LOSS,
    PLAN,
    RESPONSE_LENGTH,
    Draft,
)


def _minibatches(value: Value, context: ConversionContext) -> list[Value]:
    """Prompts per optimizer step, from optimizer steps per batch."""
    batch = context.number(BATCH)
    if not is_number(value) or not value or batch % value:  # type: ignore[operator]
        raise NoCounterpartError(f"{BATCH}={batch:g} does not divide by {value}")
    # 0 stands for the full batch.
    return [0 if value == 1 else int(batch // value)]  # type: ignore[operator]


def _sizes(value: Value) -> dict[str, int]:
    """``fsdp:d4p1t2`` as sizes by letter: data, pipeline, tensor, context (c), experts (e)."""
    _, _, layout = str(value).rpartition(":")
    return {letter: int(size) for letter, size in re.findall(r"([a-z])(\d+)", layout)}


def _ranks(value: Value, context: ConversionContext) -> list[Value]:
    """Ranks of the policy, then the sizes of its parallel dimensions.

    They are tensor, context, pipeline and, within the data dimension, experts.
    """
    sizes = _sizes(value)
    if not sizes:
        raise NoCounterpartError("")
    dimensions = [sizes.get(letter, 1) for letter in "tcp"]
    experts = sizes.get("e", 1)
    ranks = sizes.get("d", 1) * prod(dimensions)
    return [ranks, *dimensions, experts if experts > 1 else 0]


def _engines(value: Value, context: ConversionContext) -> list[Value]:
    """The number of engines, and the tensor-parallel size of each."""
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
    """Minutes, from seconds."""
    if not isinstance(value, int | float):
        raise NoCounterpartError("")
    return [value / 60]


_REWARD_NORMS = {
    "mean": "trainer.algorithm.reward_norm_mean",
    "std": "trainer.algorithm.reward_norm_std",
}
_WEIGHT_CAP = "trainer.algorithm.behave_imp_weight_cap"
_REJECTION = "actor.rejection_sampling."
#: Level and action of AReaL's rejection sampling -> our correction.
_CORRECTIONS = {
    ("token", "mask"): "icepop",
    ("token", "clamp"): "token_tis",
    ("sequence", "mask"): "sequence_icepop",
    ("sequence", "clamp"): "geometric_tis",
}
#: AReaL's defaults of its group ``eval_gconfig``, by our names.
_EVALUATION_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "max_generate_length": 16384}
CONVERSIONS: dict[str, Conversion] = {
    "minibatches": _minibatches,
    "areal_ranks": _ranks,
    "areal_engines": _engines,
    "allocation": _allocation,
    "minutes": _minutes,
}


def finish(draft: Draft) -> None:
    """Apply the rules for keys that depend on each other."""
    _norms(draft)
    _loss(draft)
    _penalty(draft)
    rank = "trainer.policy.lora.rank"
    if not draft.source_value("actor.use_lora"):
        draft.drop_group("trainer.policy.lora.", "it has no effect there without actor.use_lora")
    elif rank not in draft.settings:
        draft.put(rank, 32, "actor.use_lora")  # AReaL's default
    buffer = "trainer.algorithm.overlong_buffer."
    if not draft.source_value("actor.overlong_reward_penalty"):
        draft.drop_group(buffer, "it has no effect there without actor.overlong_reward_penalty")
    elif f"{buffer}len" in draft.settings:
        longest = draft.source_value("actor.max_new_tokens")
        draft.put(f"{buffer}max_len", longest, "actor.max_new_tokens")
    _sampling(draft)
    _lengths(draft)
    _steps(draft)
    _checkpoints(draft)
    _data(draft)


def _has_prefix(draft: Draft, prefix: str) -> bool:
    """Whether the recipe sets a key with this prefix."""
    return any(name.startswith(prefix) for name in draft.source_keys)


def _norms(draft: Draft) -> None:
    """The normalization of rewards and advantages."""
    prefix = "actor.reward_norm"
    has_norm = False
    for name, value in draft.source_keys.items():
        has_norm = has_norm or (name.startswith(prefix) and value is not None)
    if not has_norm:
        draft.put(ESTIMATOR, "normalized")
    for statistic, path in _REWARD_NORMS.items():
        if not has_norm:
            draft.put(path, "none")
        elif path not in draft.settings:
            draft.put(path, "batch", f"{prefix}.{statistic}_level")  # AReaL's default level
    mean, deviation = map(draft.value, _REWARD_NORMS.values())
    if draft.value(ESTIMATOR) == "rloo":
        if mean == "group" and deviation == "none":
            for path in _REWARD_NORMS.values():
                draft.drop(path, "the estimator rloo")
        else:
            draft.change(ESTIMATOR, "normalized")
            # The estimator rloo has no other normalization than by the mean of the group.
            draft.put("trainer.algorithm.extra.leave_one_out", True, f"{prefix}.mean_leave1out")
    if _has_prefix(draft, "critic."):
        draft.put(ESTIMATOR, "gae", *draft.present_names("critic.path"))
        draft.put("trainer.algorithm.gae_whiten", False)
        origin: list[str] = []
        for path in _REWARD_NORMS.values():
            origin += draft.origin(path)
        for path in _REWARD_NORMS.values():
            # With a critic rewards are normalized before the advantages are estimated.
            draft.drop(path, "not with a critic: see trainer.algorithm.reward_normalization")
        if has_norm and mean == deviation != "none":
            draft.put("trainer.algorithm.reward_normalization", mean, *origin)
            for name in origin:
                draft.no_counterpart.pop(name, None)
    _advantage_norms(draft)


def _advantage_norms(draft: Draft) -> None:
    """The normalization of advantages, by the batch or not at all."""
    prefix = "actor.adv_norm."
    names = [name for name in draft.source_keys if name.startswith(prefix)]
    if not names:
        return
    mean = draft.source_keys.get(f"{prefix}mean_level", "batch")
    deviation = draft.source_keys.get(f"{prefix}std_level", "batch")
    by_batch = mean == deviation == "batch"
    draft.put("trainer.algorithm.advantage_batch_normalize", by_batch, *names)
    if not by_batch:
        draft.remarks.append(
            f"advantages are whitened over the batch or not at all; there by the mean of {mean or 'nothing'} and the "
            f"deviation of {deviation or 'nothing'}: actor.adv_norm"
        )


def _loss(draft: Draft) -> None:
    """The loss, the policy of its ratio, and the weight of stale tokens."""
    by_sequence = draft.source_value("actor.importance_sampling_level") == "sequence"
    names: list[str] = []
    if draft.source_value("actor.use_sapo_loss"):
        loss = "sapo"
        names = ["actor.use_sapo_loss"]
        if by_sequence:
            draft.put(
                "trainer.algorithm.extra.sequence_level", True, "actor.importance_sampling_level"
            )
    elif by_sequence:
        loss = "gspo"
        names = ["actor.importance_sampling_level"]
        draft.put("trainer.algorithm.extra.mean_advantage", True, "actor.importance_sampling_level")
    elif draft.source_value("actor.m2_threshold") is not None:
        loss = "m2po"
        names = ["actor.m2_threshold"]
    elif draft.source_value("actor.c_clip") is not None:
        loss = "dual_clip"
        names = ["actor.c_clip"]
    else:
        loss = "ppo"
    draft.put(LOSS, loss, *names)
    # Only rejection sampling, below, brings a weight.
    draft.put(CORRECTION, "none")
    decoupled = "actor.use_decoupled_loss"
    if not draft.source_value(decoupled):
        draft.drop(_WEIGHT_CAP, "it has no effect there without actor.use_decoupled_loss")
        return
    # The decoupled loss needs proximal log-probabilities: the anchor stays at our default.
    draft.drop(ANCHOR, "with actor.use_decoupled_loss they are computed again in any case")
    rejection = [name for name in draft.source_keys if name.startswith(_REJECTION)]
    rejection += draft.present_names("actor.behave_imp_weight_cap", "actor.behav_imp_weight_cap")
    if rejection:
        _rejection(draft, loss, [decoupled, *rejection])
    else:
        note = "there is no weight without rejection_sampling"
        draft.put(LOSS, loss, decoupled, *names, note=note)


def _rejection(draft: Draft, loss: str, names: Sequence[str]) -> None:
    """The weight of proximal over behaviour policy, and the tokens with one out of bounds."""
    level = draft.source_value(f"{_REJECTION}level")
    action = draft.source_value(f"{_REJECTION}action")
    metric = draft.source_value(f"{_REJECTION}metric")
    lower = draft.source_value(f"{_REJECTION}lower")
    upper = draft.value(_WEIGHT_CAP) if _WEIGHT_CAP in draft.settings else 5.0  # AReaL's default
    for name in ("level", "action", "lower"):
        draft.no_counterpart.pop(f"{_REJECTION}{name}", None)
    if metric != "ratio":
        draft.remarks.append(
            f"tokens are not left out by {_REJECTION}metric={metric}; each has its weight"
        )
        # A truncation that never has an effect.
        level = "token"
        action = "clamp"
        lower = None
        upper = 1e9
    if level == "sequence" and draft.source_value(f"{_REJECTION}agg") != "mean":
        draft.remarks.append(
            f"sequences are judged by the mean of their tokens; there {_REJECTION}agg decides"
        )
    if (level, action, lower, loss) == ("token", "mask", None, "ppo"):
        draft.put(LOSS, "decoupled_ppo", *names)
        draft.put(_WEIGHT_CAP, upper, *names)
        return
    draft.settings.pop(_WEIGHT_CAP, None)
    correction = _CORRECTIONS[str(level), str(action)]
    draft.put(CORRECTION, correction, *names)
    low, high = BOUNDS[correction]
    # Corrections that have no setting for a lower bound read it from extra.
    draft.put(high, upper, *names)
    draft.put(low or "trainer.algorithm.extra.low", lower or 0.0, *names)
    if correction == "sequence_icepop":
        draft.put("trainer.algorithm.extra.level", "geometric", *names)


def _penalty(draft: Draft) -> None:
    """A KL term in the reward, if there is a reference model."""
    weight = draft.source_value("actor.kl_ctl")
    if not _has_prefix(draft, "ref.") and not draft.source_keys.get("ref"):
        for name in ("use_kl_in_reward", "kl_loss_coef", "kl_estimator_type"):
            draft.drop(f"trainer.algorithm.{name}", "there is no reference without ref")
        draft.drop_default("trainer.ref.model.dtype")
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
    """Sampling in training and evaluation.

    The trained log-probabilities have a temperature of their own there.
    """
    temperature = draft.source_value("gconfig.temperature")
    trained = draft.source_value("actor.temperature") or 1.0
    if not draft.source_value("gconfig.greedy"):
        # The table sets 0 for greedy: without it, the temperature decides.
        draft.set_one_of("generator.sampling_params.temperature", "gconfig.temperature")
        if temperature != trained:
            draft.remarks.append(
                "trained log-probabilities are at generator.sampling_params.temperature; "
                f"there at actor.temperature={written(trained)}"
            )
    draft.remark_filters()
    evaluation = "generator.eval_sampling_params."
    samples = "generator.eval_n_samples_per_prompt"
    if not _has_prefix(draft, "eval_gconfig."):
        # Without this group AReaL evaluates with the sampling of training.
        draft.put(f"{evaluation}temperature", None)
        draft.put(samples, draft.value(N), *draft.origin(N))
    elif not draft.source_value("eval_gconfig.greedy"):
        for name, default in _EVALUATION_DEFAULTS.items():
            if f"{evaluation}{name}" not in draft.settings:
                draft.put(f"{evaluation}{name}", default, "eval_gconfig")


def _lengths(draft: Draft) -> None:
    """The prompt length that the data set does not bound: the engine's context less a response."""
    path = "trainer.max_prompt_length"
    if path in draft.settings:
        return
    context_path = "generator.max_model_len"
    context_length: Value = 32768  # AReaL's default for its engines
    if context_path in draft.settings:
        context_length = draft.value(context_path)
    response = draft.number(RESPONSE_LENGTH)
    if isinstance(context_length, int) and context_length > response:
        prompt = int(context_length - response)
        # AReaL itself has no limit for prompts without one in the data set.
        note = "what a response leaves of the context"
        draft.put(path, prompt, *draft.origin(context_path), note=note)


def _steps(draft: Draft) -> None:
    """Learning rates, the optimizer's precision, and requests in flight at a weight update."""
    if draft.value(PLAN) == "fully_async":
        note = "interrupted requests begin with their tokens"
        draft.put("trainer.partial_rollout", "recompute", *draft.origin(PLAN), note=note)
    draft.remark_warm_up("policy")
    draft.remark_warm_up("critic")
    schedule = draft.value("trainer.policy.optimizer_config.scheduler")
    if schedule != "constant" and draft.source_value("actor.ppo_n_minibatches") != 1:
        draft.remarks.append(
            "the learning rate changes with each optimizer step; there with each batch"
        )
    # Megatron's optimizer has float32 master weights, as we have.
    backend = str(draft.source_value("actor.backend") or "fsdp")
    uses_fsdp = backend.startswith("fsdp")
    if uses_fsdp and draft.value("trainer.policy.model.dtype") == "bfloat16":
        draft.remarks.append(
            "weights and AdamW's state are float32 here, and passes are computed in bfloat16; "
            "there with FSDP all are bfloat16"
        )


def _checkpoints(draft: Draft) -> None:
    """Checkpoint intervals; those of a recovery that is off have no effect."""
    if draft.source_value("recover.mode") not in ("disabled", "off"):
        return
    for path, unit in (("trainer.ckpt_interval", "steps"), ("trainer.ckpt_minutes", "secs")):
        saver = f"saver.freq_{unit}"
        if f"recover.freq_{unit}" not in draft.origin(path):
            continue
        draft.drop(path, "it has no effect there with recover.mode=disabled")
        if saver in draft.source_keys:
            # Both keys set this interval, and the recovery's had overwritten the saver's.
            row = draft.system.table.exact[saver]
            settings = converted(row, draft.source_keys[saver], draft.context()) or {}
            for key, entry in settings.items():
                draft.put(key, entry, saver)


def _data(draft: Draft) -> None:
    """Columns, splits and prompts that AReaL's loaders add to a data set."""
    for key, split in (("train_data", "train"), ("val_data", "test")):
        datasets = draft.value(f"data.{key}")
        if not isinstance(datasets, list):
            continue
        names = " ".join(map(str, datasets))
        # AReaL's loader of this data set chooses these columns.
        if "gsm8k" in names:
            draft.put("data.prompt_key", "question")
            draft.put("data.label_key", "answer")
            with_split: list[Value] = []
            for dataset in datasets:
                is_hub_name = dataset == "openai/gsm8k"
                with_split.append(f"{dataset}#main:{split}" if is_hub_name else dataset)
            draft.put(f"data.{key}", with_split)
        if key == "train_data" and re.search("gsm8k|torl", names, re.IGNORECASE):
            draft.remarks.append(
                "prompts are the data's; there the loader adds to each the request to put the final answer "
                "within \\boxed{}: write it into the data"
            )
    has_reward = draft.value("environment.reward_funcs") != []
    if not has_reward and "generator.agent_program" not in draft.settings:
        why = "the reward is in the program: write environment.reward_funcs"
        draft.no_counterpart.setdefault("workflow", why)
