"""TRL's keys that depend on each other."""

from __future__ import annotations

import re
from dataclasses import replace
from math import ceil

from skyasync.config.values import Value
from skyasync.interop.conversion import (
    BATCH,
    Conversion,
    ConversionContext,
    N,
    NoCounterpartError,
    as_list,
)
from skyasync.interop.draft import (
    ANCHOR,
    ENGINE_SIZE,
    ESTIMATOR,
    KL_COEFFICIENT,
    LOSS,
    MINI,
    PLACEMENT,
    PLAN,
    REDUCTION,
    RESPONSE_LENGTH,
    A,
    Draft,
)


def _rewards(value: Value, context: ConversionContext) -> list[Value]:
    names = [str(name) for name in as_list(value)]
    if any(":" not in name and "." not in name for name in names):
        raise NoCounterpartError("name each function with its file: file.py:function")
    return [[name if ":" in name else ":".join(name.rsplit(".", 1)) for name in names]]


CONVERSIONS: dict[str, Conversion] = {"rewards": _rewards}


def finish(draft: Draft) -> None:
    """Batches from per-device sizes, the loss's reduction, what scales rewards, evaluation, other
    trainers."""
    loss = draft.source_value("loss_type")
    if draft.source_value("importance_sampling_level") == "sequence":
        draft.put(LOSS, "gspo", "importance_sampling_level", "loss_type")
    if draft.source_keys.get("use_peft"):
        for name, default in (("rank", 16), ("alpha", 32), ("dropout", 0.05)):
            if f"trainer.policy.lora.{name}" not in draft.settings:
                draft.put(f"trainer.policy.lora.{name}", default, "use_peft")
        targets = "trainer.policy.lora.target_modules"
        if targets not in draft.settings:
            draft.put(
                targets, ["q_proj", "v_proj"], "use_peft", note="peft's choice for most models"
            )
    else:
        draft.drop_group("trainer.policy.lora.", "it has no effect there without use_peft")
    rloo = re.search(r"RLOO|\brloo\b", draft.recipe.command) is not None
    if rloo:
        _rloo(draft)
    samples = "generator.eval_n_samples_per_prompt"  # evaluation samples as training does
    if samples not in draft.settings:
        draft.put(samples, draft.value(N), *draft.origin(N))
    draft.put("generator.eval_sampling_params.temperature", None)
    asynchronous = "Async" in draft.recipe.command
    if asynchronous:
        _asynchronous(draft)
    _passes(draft)
    _warm_up(draft)
    if "eval_steps" in draft.source_keys and draft.source_value("eval_strategy") in ("no", "epoch"):
        draft.put("trainer.eval_interval", 0, "eval_strategy")
        draft.no_counterpart["eval_steps"] = "it has no effect there without eval_strategy=steps"
    if draft.value(LOSS) == "cispo":
        _cispo(draft)
    reductions = {
        "grpo": "sequence_mean",
        "sapo": "sequence_mean",
        "dr_grpo": "seq_mean_token_sum_norm",
    }
    if rloo:
        reduction = "sequence_mean"
    else:
        reduction = reductions.get(str(loss), "token_mean")
    draft.put(REDUCTION, reduction, "loss_type")
    if loss == "dr_grpo":
        draft.put(f"{A}max_seq_len", draft.value(RESPONSE_LENGTH), "loss_type")
    if draft.value(ESTIMATOR) == "normalized":
        draft.put(f"{A}reward_norm_mean", "group")
    corrects = bool(draft.source_value("vllm_importance_sampling_correction")) and bool(
        draft.source_value("use_vllm")
    )
    enabled = corrects and not rloo and not asynchronous
    mode, low, high, cap = (
        f"vllm_importance_sampling_{end}" for end in ("mode", "clip_min", "clip_max", "cap")
    )
    bounds: list[Value] = [
        draft.source_value(low) or 0.0,
        draft.source_keys.get(cap, draft.source_keys.get(high, 3.0)),
    ]
    draft.set_correction(enabled, bounds, mode, low, high, cap)
    device = "per_device_train_batch_size"
    generation = "steps_per_generation"
    accumulation = "gradient_accumulation_steps"
    per_device = draft.source_value(device)
    steps = draft.source_keys.get(accumulation, 1)
    if isinstance(per_device, int) and isinstance(steps, int):
        per_device *= _processes(draft)
        generations = draft.source_value(generation) or steps
        if "generation_batch_size" not in draft.source_keys and isinstance(generations, int):
            draft.set_prompts(BATCH, per_device * generations, device, generation)
        draft.set_prompts(MINI, per_device * steps, device, accumulation)
    elif not any(
        isinstance(draft.source_keys.get(name), int)
        for name in (generation, "generation_batch_size")
    ):
        draft.no_counterpart[accumulation] = f"write {BATCH} and {MINI} by hand, in prompts"
    _count_steps(draft)
    if draft.number("trainer.max_training_steps") > 0:  # which has precedence over epochs there
        draft.drop("trainer.epochs", "it has no effect there: max_steps decides")
    if {"environment_factory", "reward_funcs"} <= {*draft.source_keys}:
        draft.not_needed.pop("environment_factory", None)
        draft.first_targets.pop("environment_factory", None)
        draft.no_counterpart["environment_factory"] = (
            "write it as environment.env_class, which judges as well: module:Class"
        )
    config = draft.source_keys.get("dataset_config")
    if config and isinstance(sources := draft.value("data.train_data"), list):
        draft.put(
            "data.train_data",
            [f"{name}#{config}" for name in sources],
            "dataset_name",
            "dataset_config",
        )
        draft.no_counterpart.pop("dataset_config", None)
    draft.set_split("data.train_data", "dataset_train_split")
    draft.remark_filters()
    if "max_prompt_length" not in draft.source_keys:
        longest = int(draft.number("trainer.max_prompt_length"))
        draft.remarks.append(
            f"trainer.max_prompt_length: prompts above {longest} tokens are left out, there none is"
        )
    _scale(draft, asynchronous)


def _processes(draft: Draft) -> int:
    """How many processes the launcher starts, each with its share of a batch and, colocated, of the
    engines."""
    per_node = f"{PLACEMENT}policy_num_gpus_per_node"
    nodes = int(draft.number(f"{PLACEMENT}policy_num_nodes"))
    processes = int(draft.number(per_node))
    names = draft.origin(per_node)
    if not names:
        draft.no_counterpart["num_processes"] = (
            "the recipe names no number: batch sizes are those of one process"
        )
    if "num_processes" in names:  # of all machines
        draft.put(per_node, max(processes // max(nodes, 1), 1), *names)
    else:
        processes *= nodes
    engines = processes // int(draft.number(ENGINE_SIZE))
    if draft.value(f"{PLACEMENT}colocate_all") and engines > 1:
        draft.put("generator.num_inference_engines", engines, *names)
    return processes


def _cispo(draft: Draft) -> None:
    """The upper bound of a weight there is 1 + ours; a lower bound is in neither."""
    if draft.source_value("epsilon_high") is None:
        name = "epsilon"
    else:
        name = "epsilon_high"
    bound = draft.source_value(name)
    for end in ("low", "high"):
        draft.settings.pop(f"{A}eps_clip_{end}", None)
    if isinstance(bound, int | float) and bound > 1:
        draft.put(f"{A}cispo.cispo_eps_clip_high", round(bound - 1, 9), name)
    elif isinstance(bound, int | float):
        draft.no_counterpart[name] = (
            f"no weight exceeds {bound:g} there, which scales the loss; here the bound is above 1"
        )


def _rloo(draft: Draft) -> None:
    """TRL's RLOO: the ratio of whole responses, and defaults that are not GRPO's."""
    draft.put(ESTIMATOR, "rloo")
    draft.put(LOSS, "gspo")
    draft.put(f"{A}extra", {"product": True})
    for name in ("reward_norm_std", "use_kl_loss", "kl_loss_coef"):
        draft.settings.pop(f"{A}{name}", None)
    if "num_generations" not in draft.source_keys:
        draft.put(N, 2)
    beta = draft.source_keys.get("beta", 0.05)
    if beta:
        draft.put(f"{A}use_kl_in_reward", True, "beta")
        draft.put(KL_COEFFICIENT, beta, "beta")
        draft.put(f"{A}kl_estimator_type", "k1")


#: Defaults of AsyncGRPOConfig that are not GRPOConfig's.
_ASYNC_DEFAULTS: dict[str, Value] = {
    "trainer.policy.optimizer_config.scheduler": "constant",
    RESPONSE_LENGTH: 2048,
    "trainer.max_staleness": 4,
}


def _asynchronous(draft: Draft) -> None:
    """TRL's asynchronous GRPO: the ratio is to the engine's log-probabilities, its engines are
    servers."""
    draft.put(PLAN, "fully_async")
    draft.put("generator.backend", "vllm")
    draft.put(ANCHOR, "behaviour")
    for path, value in _ASYNC_DEFAULTS.items():
        if path not in draft.settings or not draft.settings[path].given:
            draft.put(path, value, *draft.origin(path))
    for path in (
        "generator.gpu_memory_utilization",
        ENGINE_SIZE,
    ):
        if not draft.present_names(*draft.origin(path)):
            draft.settings.pop(path, None)


def _passes(draft: Draft) -> None:
    """The type of the passes: without mixed precision it is that of the weights."""
    weights = draft.source_value(
        "model_init_kwargs.dtype", "model_init_kwargs.torch_dtype", "dtype", "torch_dtype"
    )
    if (
        draft.source_keys.get("bf16") is False
        and not draft.source_keys.get("fp16")
        and weights == "bfloat16"
    ):
        draft.put("trainer.policy.model.dtype", "bfloat16", "bf16")


def _warm_up(draft: Draft) -> None:
    """A number of steps below 1 is a ratio of all steps."""
    prefix = "trainer.policy.optimizer_config."
    steps = draft.value(f"{prefix}num_warmup_steps")
    if isinstance(steps, float) and 0 < steps < 1:
        draft.settings.pop(f"{prefix}num_warmup_steps")
        draft.put(f"{prefix}warmup_ratio", steps, "warmup_steps")
    draft.remark_warm_up()


#: Keys that count optimizer steps there, and steps of a whole batch here.
_STEPS = (
    "trainer.max_training_steps",
    "trainer.ckpt_interval",
    "trainer.eval_interval",
)


def _count_steps(draft: Draft) -> None:
    """A step here is a batch of generated responses, with several optimizer steps where it has
    mini-batches."""
    mini = draft.number(MINI) or draft.number(BATCH)
    updates = ceil(draft.number(BATCH) / mini) * int(
        draft.number("trainer.update_epochs_per_batch")
    )
    for path in _STEPS if updates > 1 else ():
        steps = draft.value(path)
        if path in draft.settings and isinstance(steps, int) and steps > 0:
            note = f"{steps} optimizer steps, {updates} of them in a step here"
            setting = draft.settings[path]
            draft.settings[path] = replace(setting, value=ceil(steps / updates), note=note)


def _scale(draft: Draft, asynchronous: bool) -> None:
    """What is added to the standard deviation that divides the advantages: 1e-4, and 1e-8 in the
    asynchronous GRPO."""
    estimator = draft.value(ESTIMATOR)
    if estimator not in ("grpo", "normalized") or draft.value(f"{A}reward_norm_std") == "none":
        return
    draft.put(f"{A}extra.eps", 1e-8 if asynchronous else 1e-4)
    if asynchronous:  # whose standard deviation is the population's
        draft.put(ESTIMATOR, "normalized")
        draft.put(f"{A}extra.unbiased", False)
