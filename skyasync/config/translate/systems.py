"""What one key of a system cannot say alone: keys that decide together, by system.

Invariant: these change a draft only; what remains contradictory is settled in ``write.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import ceil

from skyasync.config.translate.draft import Draft
from skyasync.config.values import Value

A = "trainer.algorithm."
CORRECTION = f"{A}off_policy_correction"
MASKS = f"{A}off_policy_masks"
PLAN, PLACEMENT = "trainer.plan", "trainer.placement."
N = "generator.n_samples_per_prompt"
BATCH, MINI = "trainer.train_batch_size", "trainer.policy_mini_batch_size"
SAMPLING = "generator.sampling_params"

#: The bounds of each correction, low and high.
BOUNDS = {
    "token_tis": (f"{A}token_tis_ratio_clip_low", f"{A}token_tis_ratio_clip_high"),
    "icepop": (f"{A}icepop_low", f"{A}icepop_high"),
    "sequence_tis": ("", f"{A}sequence_tis_ratio_clip_high"),
    "geometric_tis": ("", f"{A}geometric_tis_ratio_clip_high"),
    "segment_tis": ("", f"{A}geometric_tis_ratio_clip_high"),
    "sequence_icepop": (f"{A}product_mask_low", f"{A}product_mask_high"),
    "sequence_mask_tis": (f"{A}geo_mask_low", f"{A}geo_mask_high"),
}


def openrlhf(draft: Draft) -> None:
    """Correction and its thresholds, the KL term, lengths, one batch for several updates."""
    enabled = bool(draft.said("algo.advantage.is_correction_enable", "enable_vllm_is_correction"))
    kind = ("algo.advantage.is_correction_type", "vllm_is_correction_type")
    bounds = ("algo.advantage.is_correction_threshold", "vllm_is_truncated_threshold")
    _corrected(draft, enabled or bool(draft.given.get("use_icepop")), draft.said(*bounds), *kind, *bounds)
    _kl(draft, bool(draft.said("algo.kl.use_loss", "use_kl_loss")), draft.number(f"{A}kl_loss_coef"))
    total, response = draft.said("data.max_len", "max_len"), draft.said("rollout.max_new_tokens", "max_new_tokens")
    if isinstance(total, int) and isinstance(response, int) and "prompt_max_len" not in draft.given:
        draft.put("trainer.max_prompt_length", total - response, *_given(draft, "data.max_len", "max_len"))
    elif isinstance(total, int) and response is None and total > draft.number("trainer.max_prompt_length"):
        room = total - int(draft.number("trainer.max_prompt_length"))
        draft.put(f"{SAMPLING}.max_generate_length", room, *_given(draft, "data.max_len", "max_len"))
    if draft.value(f"{A}overlong_buffer.len"):
        draft.put(f"{A}overlong_buffer.max_len", draft.value(f"{SAMPLING}.max_generate_length"))
    _split(draft, "data.train_data", "data.prompt_split", "prompt_split")
    _split(draft, "data.val_data", "eval.split", "eval_split")
    _samples(draft, "data.train_data", "data.max_samples", "max_samples")
    if draft.value(PLAN) == "one_step_off":
        _ahead(draft)
    together = _given(draft, "train.colocate_all", "colocate_all_models")
    if together and draft.given[together[0]]:
        # With asynchronous training the engines have their own devices, and the trained models share theirs.
        draft.put(f"{PLACEMENT}colocate_policy_ref", True, *together)
        if draft.value(f"{A}advantage_estimator") == "gae":
            draft.put(f"{PLACEMENT}colocate_policy_critic", True, *together)
        if draft.value(PLAN) != "sync":
            draft.ours.pop(f"{PLACEMENT}colocate_all", None)
    agents = "generator.agent_func_path" in draft.ours
    if agents and f"{A}dynamic_sampling.type" in draft.ours:
        draft.put(f"{A}dynamic_sampling.metric", "score")  # what is filtered there, and not the reward


def _ahead(draft: Draft) -> None:
    """OpenRLHF's asynchronous training where it generates beyond a batch or keeps requests over a weight update."""
    partial = _given(draft, "train.partial_rollout_enable", "partial_rollout")
    more = _given(draft, "rollout.vllm_generate_batch_size", "vllm_generate_batch_size")
    prompts = draft.value("generator.generate_batch_size")
    larger = bool(more) and isinstance(prompts, int) and prompts > draft.number(BATCH)
    if more and not larger:
        draft.drop("generator.generate_batch_size", "no larger than rollout.batch_size, which is generated anyway")
    if not larger and not (partial and draft.given[partial[0]]):
        return
    queue = ("train.async_queue_size", "async_queue_size")
    draft.put(PLAN, "fully_async", *_given(draft, "train.async_enable", "async_train"), *partial, *more)
    draft.put("trainer.max_staleness", draft.said(*queue), *_given(draft, *queue))
    draft.ours.pop("trainer.async_queue_size", None)


def skyrl(draft: Draft) -> None:
    """Masks that are on where a threshold is given, the plan of the program, rewards of its environments."""
    masks = draft.value(MASKS)
    chosen: list[Value] = [masks] if isinstance(masks, str) else list(masks) if isinstance(masks, list) else []
    for mask, prefix in (("outlier_mask", "outlier_token_is"), ("token_mask", "token_mask_is")):
        if any(f"{A}{prefix}_threshold_{end}" in draft.ours for end in ("low", "high")):
            chosen.append(mask)
    if chosen:
        theirs = draft.ours[MASKS].theirs if MASKS in draft.ours else ()
        draft.put(MASKS, chosen, *theirs)
    if "trainer.plan" not in draft.ours and "fully_async" not in draft.recipe.command:
        if re.search(r"\.main_async\b|async\.main", draft.recipe.command):
            draft.put("trainer.plan", "one_step_off")
    elif "trainer.plan" not in draft.ours:
        draft.put("trainer.plan", "fully_async")
    if draft.value(f"{A}overlong_buffer.len"):
        draft.put(f"{A}overlong_buffer.max_len", draft.value(f"{SAMPLING}.max_generate_length"))
    if draft.value("environment.env_class") == "reward":
        draft.put("environment.reward_funcs", ["gsm8k"], "environment.env_class")
    _kl(draft, bool(draft.value(f"{A}use_kl_loss")), draft.number(f"{A}kl_loss_coef"), named=True)


def roll(draft: Draft) -> None:
    """Which KL is meant, rewards' norms, the ratio's staleness, updates per batch, batches of agents."""
    agentic = any(name.startswith(("train_env_manager", "val_env_manager")) for name in draft.given)
    group = "train_env_manager.group_size"
    if agentic:
        draft.put(N, draft.given.get(group, 1), group)
        _prompts(draft, BATCH, int(draft.said("rollout_batch_size")), "rollout_batch_size")  # type: ignore[arg-type]
    in_loss = bool(draft.said("use_kl_loss"))
    in_reward = bool(draft.said("add_token_level_kl"))
    name = "kl_loss_coef" if in_loss else "init_kl_coef"
    coefficient = draft.said(name)
    if (in_loss or in_reward) and isinstance(coefficient, int | float) and coefficient:
        draft.put(f"{A}kl_loss_coef", coefficient, name)
        _kl(draft, in_loss, coefficient)
    else:
        _kl(draft, in_loss, 0)
    _corrected(
        draft,
        bool(draft.said("train_infer_correction.is_weight.enabled")),
        [0, draft.said("train_infer_correction.is_weight.upper_bound")],
        "train_infer_correction.is_weight.weight_type",
        "train_infer_correction.is_weight.upper_bound",
    )
    norms = ("norm_mean_type", "norm_std_type", "reward_normalization.method", "reward_normalization.grouping")
    if any(draft.given.get(name) not in (None, "identity") for name in norms):
        draft.put(f"{A}advantage_estimator", "normalized", *_given(draft, *norms))
        for end, name in (("mean", "norm_mean_type"), ("std", "norm_std_type")):
            if f"{A}reward_norm_{end}" not in draft.ours:
                draft.put(f"{A}reward_norm_{end}", "none", *_given(draft, name))
    if draft.value(N) == 1 and draft.value(f"{A}advantage_estimator") == "grpo":
        # Its estimator alone compares nothing: groups are compared by the norms of rewards.
        draft.put(f"{A}advantage_estimator", "normalized", *_given(draft, "adv_estimator"))
        for end in ("mean", "std"):
            if f"{A}reward_norm_{end}" not in draft.ours:
                draft.put(f"{A}reward_norm_{end}", "none")
    _ratio(draft, "async_generation_ratio")
    if draft.value(PLAN) == "fully_async":
        draft.put("trainer.eval_mode", "pause")  # as its validation does
    args = "actor_train.training_args."
    _updates(draft, args + "per_device_train_batch_size", args + "gradient_accumulation_steps",
             ranks=draft.number("trainer.placement.policy_num_gpus_per_node"))  # fmt: skip


def areal(draft: Draft) -> None:
    """Rewards' norms, and losses that several switches choose."""
    if not any(name.startswith("actor.reward_norm") and draft.given[name] is not None for name in draft.given):
        for end in ("mean", "std"):
            draft.put(f"{A}reward_norm_{end}", "none")
        draft.put(f"{A}advantage_estimator", "normalized")
    if draft.value(f"{A}advantage_estimator") == "rloo":
        for end in ("mean", "std"):
            draft.drop(f"{A}reward_norm_{end}", "the estimator rloo")
    if "eval_gconfig.temperature" not in draft.given:
        draft.put("generator.eval_sampling_params.temperature", None)  # as in training
    if draft.value(f"{A}overlong_buffer.len"):
        draft.put(f"{A}overlong_buffer.max_len", draft.value(f"{SAMPLING}.max_generate_length"))
    if draft.value("environment.reward_funcs") == [] and "generator.agent_program" not in draft.ours:
        draft.left.setdefault("workflow", "the reward is in the program: write environment.reward_funcs")


def verl(draft: Draft) -> None:
    """Which KL is meant, the number of engines, the correction's bounds, the plan of its program."""
    in_loss, in_reward = draft.said(f"{_ACTOR}use_kl_loss"), draft.said("algorithm.use_kl_in_reward")
    coefficient = f"{_ACTOR}kl_loss_coef" if in_loss else "algorithm.kl_ctrl.kl_coef"
    kind = f"{_ACTOR}kl_loss_type" if in_loss else "algorithm.kl_penalty"
    _one_of(draft, f"{A}kl_loss_coef", coefficient)
    _one_of(draft, f"{A}kl_estimator_type", kind)
    _kl(draft, bool(in_loss), draft.number(f"{A}kl_loss_coef") if in_loss or in_reward else 0)
    threshold = "algorithm.rollout_correction.rollout_is_threshold"
    bounds = re.findall(r"[\d.]+", str(draft.said(threshold)))
    if len(bounds) == 2 and draft.value(CORRECTION) == "token_tis":
        draft.put(CORRECTION, "icepop", "algorithm.rollout_correction.rollout_is", threshold)
    limits: list[Value] = [float(bound) for bound in bounds] if len(bounds) == 2 else [0, draft.said(threshold)]
    _corrected(draft, bool(draft.said("algorithm.rollout_correction.rollout_is")), limits, threshold)
    if str(draft.given.get(f"{_ACTOR}policy_loss.loss_mode")).startswith("dppo_"):
        divergence = str(draft.given[f"{_ACTOR}policy_loss.loss_mode"])[-2:]
        draft.put(f"{A}dppo.divergence", divergence, f"{_ACTOR}policy_loss.loss_mode")
    rewards = "environment.reward_funcs"
    for name in [name for name in draft.given if name.endswith("custom_reward_function.name")]:
        if rewards in draft.ours:
            draft.put(rewards, draft.value(rewards), *draft.ours[rewards].theirs, name)
            draft.left.pop(name, None)
    for module, plan in (("one_step_off", "one_step_off"), ("fully_async", "fully_async")):
        if module in draft.recipe.command:
            draft.put("trainer.plan", plan)
    own = ("rollout.nnodes", "rollout.n_gpus_per_node")
    apart = [draft.given.get(name) for name in own]
    nodes, per_node = apart if all(isinstance(n, int) and n for n in apart) else (None, None)
    if isinstance(nodes, int) and isinstance(per_node, int):
        devices, theirs = float(nodes * per_node), _given(draft, *own)
    else:
        devices = draft.number(f"{PLACEMENT}policy_num_nodes") * draft.number(f"{PLACEMENT}policy_num_gpus_per_node")
        theirs = _given(draft, "trainer.n_gpus_per_node")
    engines = devices // draft.number("generator.inference_engine_tensor_parallel_size")
    if engines >= 1:
        draft.put("generator.num_inference_engines", int(engines), *theirs)
        for name in own:
            draft.left.pop(name, None)
    if draft.value(PLAN) == "fully_async":
        _streamed(draft)
    if draft.value(f"{A}overlong_buffer.len") and not draft.value(f"{A}overlong_buffer.max_len"):
        draft.put(f"{A}overlong_buffer.max_len", draft.value(f"{SAMPLING}.max_generate_length"))
    _ratio(draft, "async_training.staleness_threshold")


def _streamed(draft: Draft) -> None:
    """verl's batches without a size: so many mini-batches, until so many prompts were trained on."""
    batches, mini = "async_training.require_batches", f"{_ACTOR}ppo_mini_batch_size"
    if draft.given.get("data.train_batch_size", 0) == 0:
        count = draft.given.get(batches, 1)
        draft.put(BATCH, int(draft.number(MINI) * count) if isinstance(count, int) else None, mini, batches)
        draft.left.pop(batches, None)
        draft.silent["data.train_batch_size"] = f"{mini} times {batches}"
    for name in _given(draft, "rollout.total_rollout_steps", "trainer.total_rollout_steps"):
        prompts = draft.given[name]
        if isinstance(prompts, int) and "trainer.total_training_steps" not in draft.given:
            draft.put("trainer.max_training_steps", int(prompts // draft.number(BATCH)), name)
            draft.left.pop(name, None)


def trl(draft: Draft) -> None:
    """Batches from per-device sizes, the loss's reduction, what scales rewards, names of data sets, other trainers."""
    loss = draft.said("loss_type")
    if draft.said("importance_sampling_level") == "sequence":
        draft.put(f"{A}policy_loss_type", "gspo", "importance_sampling_level", "loss_type")
    if draft.given.get("use_peft"):
        for name, default in (("rank", 16), ("alpha", 32), ("dropout", 0.05)):
            if f"trainer.policy.lora.{name}" not in draft.ours:
                draft.put(f"trainer.policy.lora.{name}", default, "use_peft")
    if re.search(r"RLOO|\brloo\b", draft.recipe.command):
        _rloo(draft)
    if "Async" in draft.recipe.command:
        draft.put(PLAN, "fully_async")
        draft.put("generator.backend", "vllm")
        draft.put("trainer.max_staleness", draft.given.get("max_staleness", 4), "max_staleness")
        draft.put(CORRECTION, "none")
        draft.put("trainer.allow_uncorrected", True)
    reductions = {"grpo": "sequence_mean", "dr_grpo": "seq_mean_token_sum_norm"}
    draft.put(f"{A}loss_reduction", reductions.get(str(loss), "token_mean"), "loss_type")
    if loss == "dr_grpo":
        draft.put(f"{A}max_seq_len", draft.value(f"{SAMPLING}.max_generate_length"), "loss_type")
    if draft.value(f"{A}advantage_estimator") == "normalized":
        draft.put(f"{A}reward_norm_mean", "group")
    enabled = bool(draft.said("vllm_importance_sampling_correction")) and bool(draft.said("use_vllm"))
    low, high = "vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"
    cap = draft.given.get("vllm_importance_sampling_cap", draft.given.get(high, 3.0))
    names = ("vllm_importance_sampling_mode", low, high, "vllm_importance_sampling_cap")
    _corrected(draft, enabled, [draft.said(low) or 0.0, cap], *names)
    per_device, steps = draft.said("per_device_train_batch_size"), draft.given.get("gradient_accumulation_steps", 1)
    if isinstance(per_device, int) and isinstance(steps, int):
        batch, generations = per_device * steps, draft.said("steps_per_generation") or steps
        if "generation_batch_size" not in draft.given and isinstance(generations, int):
            _prompts(draft, BATCH, per_device * generations, "per_device_train_batch_size", "steps_per_generation")
        _prompts(draft, MINI, batch, "per_device_train_batch_size", "gradient_accumulation_steps")
    config = draft.given.get("dataset_config")
    if config and isinstance(names_ := draft.value("data.train_data"), list):
        draft.put("data.train_data", [f"{name}#{config}" for name in names_], "dataset_name", "dataset_config")
        draft.left.pop("dataset_config", None)
    _split(draft, "data.train_data", "dataset_train_split")


def _rloo(draft: Draft) -> None:
    """TRL's RLOO, whose defaults are not GRPO's."""
    draft.put(f"{A}advantage_estimator", "rloo")
    draft.ours.pop(f"{A}reward_norm_std", None)
    if "num_generations" not in draft.given:
        draft.put(N, 2)
    beta = draft.given.get("beta", 0.05)
    draft.ours.pop(f"{A}use_kl_loss", None)
    draft.ours.pop(f"{A}kl_loss_coef", None)
    if beta:
        draft.put(f"{A}use_kl_in_reward", True, "beta")
        draft.put(f"{A}kl_loss_coef", beta, "beta")
        draft.put(f"{A}kl_estimator_type", "k1")


def _samples(draft: Draft, path: str, *names: str) -> None:
    """The first rows of a data set, as a slice of its split."""
    name = next(iter(_given(draft, *names)), "")
    rows, sources = draft.given.get(name), draft.value(path)
    if not isinstance(rows, int) or not isinstance(sources, list):
        return
    if len(sources) != 1 or not re.fullmatch(r"[\w.-]+/[\w.-]+(#[^:]+)?(:\w+)?", str(sources[0])):
        draft.left[name] = "a data set of the hub is cut by its name: owner/name:train[:1000]"
        return
    source, colon, split = str(sources[0]).partition(":")
    draft.put(path, [f"{source}:{split if colon else 'train'}[:{rows}]"], *draft.ours[path].theirs, name)
    draft.left.pop(name, None)


def _given(draft: Draft, *names: str) -> list[str]:
    return [name for name in names if name in draft.given]


def _one_of(draft: Draft, path: str, name: str) -> None:
    """Of two of their keys for one of ours, the one that counts."""
    setting = draft.ours.get(path)
    if setting is None or name in setting.theirs:
        return
    for other in setting.theirs:
        if other in draft.given:
            draft.left[other] = f"it has no effect there: {name} decides"
    from skyasync.config.peers import converted

    row = draft.table.exact[name]
    value = draft.said(name)
    result = converted(row, value, draft.around()) if value is not None else None
    draft.ours.pop(path)
    if result:
        draft.put(path, result[path], name)


def _corrected(draft: Draft, enabled: bool, bounds: Value, *names: str) -> None:
    """The correction and its bounds; asynchronous recipes without one keep ours, which would be refused otherwise."""
    for low, high in BOUNDS.values():
        for path in (low, high):
            if path and path in draft.ours and set(draft.ours[path].theirs) & {*names}:
                draft.ours.pop(path)
    chosen = draft.value(CORRECTION)
    if not enabled:
        for name in _given(draft, *names):
            draft.left.setdefault(name, "the correction is off")
        draft.ours.pop(CORRECTION, None)
        if draft.value("trainer.plan") in ("sync", "streamed") and draft.table.name != "skyrl":
            draft.put(CORRECTION, "none")
        return
    low, high = BOUNDS.get(str(chosen), ("", ""))
    values = bounds if isinstance(bounds, list) else [None, None]
    for path, value in ((low, values[0]), (high, values[1])):
        if path and isinstance(value, int | float):
            draft.put(path, float(value), *_given(draft, *names))


def _kl(draft: Draft, in_loss: bool, coefficient: float, *, named: bool = False) -> None:
    """The KL term where their keys put it; none where its weight is 0."""
    if named:
        if not in_loss and not draft.value(f"{A}use_kl_in_reward"):
            draft.drop(f"{A}kl_loss_coef", "there is no KL term")
            draft.drop(f"{A}kl_estimator_type", "there is no KL term")
        return
    for path in (f"{A}use_kl_loss", f"{A}use_kl_in_reward"):
        setting = draft.ours.get(path)
        theirs = setting.theirs if setting else ()
        wanted = bool(coefficient) and in_loss == path.endswith("use_kl_loss")
        draft.ours.pop(path, None)
        if wanted or _given(draft, *theirs):
            draft.put(path, wanted, *theirs)
    if not coefficient:
        for name in ("kl_loss_coef", "kl_estimator_type", "kl_ctrl.horizon", "kl_ctrl.kl_target", "kl_ctrl.type"):
            draft.drop(f"{A}{name}", "there is no KL term")


def _ratio(draft: Draft, name: str) -> None:
    """A ratio of batches ahead is bounded by the whole number above it."""
    ratio = draft.value("trainer.async_generation_ratio")
    if draft.value("trainer.plan") == "fully_async" and isinstance(ratio, int | float) and ratio:
        draft.put("trainer.max_staleness", max(ceil(ratio), ceil(draft.number("trainer.sync_interval")) - 1), name)


def _updates(draft: Draft, per_device: str, accumulation: str, *, ranks: float) -> None:
    """Responses per optimizer step, from one device's, as prompts."""
    size, steps = draft.said(per_device), draft.given.get(accumulation)
    if isinstance(size, int) and isinstance(steps, int):
        _prompts(draft, MINI, int(size * steps * ranks), per_device, accumulation)


def _prompts(draft: Draft, path: str, responses: int, *names: str) -> None:
    """Set a key that counts prompts from a number of responses, if it is one of whole groups."""
    samples = draft.number(N)
    if responses % samples or responses < samples:
        for name in _given(draft, *names):
            draft.left.setdefault(name, f"{responses} responses are no whole number of groups of {samples:g}")
        return
    prompts = int(responses // samples)
    whole = path == MINI and prompts >= draft.number(BATCH)
    draft.put(path, 0 if whole else prompts, *_given(draft, *names))
    for name in _given(draft, *names):
        draft.left.pop(name, None)


def _split(draft: Draft, path: str, *splits: str) -> None:
    """The split of data sets that are named without one; ``splits`` are their keys for it."""
    names = draft.value(path)
    split = next((draft.given[name] for name in splits if name in draft.given), None)
    if split and split != "train" and isinstance(names, list):
        hub = re.compile(r"[\w.-]+/[\w.-]+(#[^:]+)?")
        split_names: list[Value] = [f"{n}:{split}" if hub.fullmatch(str(n)) else n for n in names]
        theirs = draft.ours[path].theirs if path in draft.ours else ()
        draft.put(path, split_names, *theirs, *_given(draft, *splits))
    for name in _given(draft, *splits):
        draft.left.pop(name, None)
        draft.silent.setdefault(name, "the split is written with the data set's name")


_ACTOR = "actor_rollout_ref.actor."

FINISH: dict[str, Callable[[Draft], None]] = {
    "skyrl": skyrl,
    "openrlhf": openrlhf,
    "roll": roll,
    "areal": areal,
    "verl": verl,
    "trl": trl,
}
"""By system: after each key has been carried over by itself."""
