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
    PLAN,
    REDUCTION,
    RESPONSE_LENGTH,
    Draft,
)


def _rewards(value: Value, context: ConversionContext) -> list[Value]:
    """Reward functions as ``module:function`` or ``file.py:function``."""
    functions: list[Value] = []
    for name in map(str, as_list(value)):
        if ":" not in name:
            module, dot, function = name.rpartition(".")
            if not dot:
                raise NoCounterpartError("name each function with its file: file.py:function")
            name = f"{module}:{function}"
        functions.append(name)
    return [functions]


CONVERSIONS: dict[str, Conversion] = {"rewards": _rewards}


_DEVICE_BATCH = "per_device_train_batch_size"


_ACCUMULATION = "gradient_accumulation_steps"


_GENERATION_STEPS = "steps_per_generation"


_GENERATION_BATCH = "generation_batch_size"


#: The reduction of each loss type; of all others it is ``token_mean``.
_REDUCTIONS = {
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "dr_grpo": "seq_mean_token_sum_norm",
}


def finish(draft: Draft) -> None:
    """Apply the rules for keys that depend on each other, and those of TRL's other trainers."""
    if draft.source_value("importance_sampling_level") == "sequence":
        draft.put(LOSS, "gspo", "importance_sampling_level", "loss_type")
    _adapters(draft)
    rloo = re.search(r"RLOO|\brloo\b", draft.recipe.command) is not None
    if rloo:
        _rloo(draft)
    samples = "generator.eval_n_samples_per_prompt"
    if samples not in draft.settings:
        draft.put(samples, draft.value(N), *draft.origin(N))
    draft.put("generator.eval_sampling_params.temperature", None)  # TRL evaluates as it trains
    asynchronous = "Async" in draft.recipe.command
    if asynchronous:
        _asynchronous(draft)
    _passes(draft)
    _warm_up(draft)
    if "eval_steps" in draft.source_keys and draft.source_value("eval_strategy") in ("no", "epoch"):
        # With epoch, evaluation is not counted in steps: it is left out.
        draft.put("trainer.eval_interval", 0, "eval_strategy")
        draft.no_counterpart["eval_steps"] = "it has no effect there without eval_strategy=steps"
    if draft.value(LOSS) == "cispo":
        _cispo(draft)
    loss_type = draft.source_value("loss_type")
    # RLOO has no loss type: its loss is the mean over responses.
    reduction = "sequence_mean" if rloo else _REDUCTIONS.get(str(loss_type), "token_mean")
    draft.put(REDUCTION, reduction, "loss_type")
    if loss_type == "dr_grpo":
        draft.put("trainer.algorithm.max_seq_len", draft.value(RESPONSE_LENGTH), "loss_type")
    if draft.value(ESTIMATOR) == "normalized":
        draft.put("trainer.algorithm.reward_norm_mean", "group")  # TRL always subtracts it
    _correction(draft, has_correction=not rloo and not asynchronous)
    _batches(draft)
    _count_steps(draft)
    if draft.number("trainer.max_training_steps") > 0:
        # max_steps has precedence over epochs there.
        draft.drop("trainer.epochs", "it has no effect there: max_steps decides")
    if "environment_factory" in draft.source_keys and "reward_funcs" in draft.source_keys:
        # Either of them gives the reward here.
        draft.not_needed.pop("environment_factory", None)
        draft.first_targets.pop("environment_factory", None)
        draft.no_counterpart["environment_factory"] = (
            "write it as environment.env_class, which judges as well: module:Class"
        )
    _data(draft)
    draft.remark_filters()
    if "max_prompt_length" not in draft.source_keys:
        longest = int(draft.number("trainer.max_prompt_length"))
        draft.remarks.append(
            f"trainer.max_prompt_length: prompts above {longest} tokens are left out, there none is"
        )
    _scale(draft, asynchronous)


def _adapters(draft: Draft) -> None:
    """LoRA, which has an effect with ``use_peft`` alone; the defaults are those of ModelConfig."""
    if not draft.source_keys.get("use_peft"):
        draft.drop_group("trainer.policy.lora.", "it has no effect there without use_peft")
        return
    for name, default in (("rank", 16), ("alpha", 32), ("dropout", 0.05)):
        if f"trainer.policy.lora.{name}" not in draft.settings:
            draft.put(f"trainer.policy.lora.{name}", default, "use_peft")
    targets = "trainer.policy.lora.target_modules"
    if targets not in draft.settings:
        note = "peft's choice for most models"
        draft.put(targets, ["q_proj", "v_proj"], "use_peft", note=note)


def _correction(draft: Draft, *, has_correction: bool) -> None:
    """The importance sampling correction of GRPO, which is on by default with vLLM.

    Args:
        has_correction: TRL's trainer has one.
    """
    prefix = "vllm_importance_sampling"
    low = f"{prefix}_clip_min"
    high = f"{prefix}_clip_max"
    cap = f"{prefix}_cap"  # another name of clip_max, with precedence
    enabled = draft.source_value(f"{prefix}_correction") and draft.source_value("use_vllm")
    upper = draft.source_keys.get(cap, draft.source_keys.get(high, 3.0))
    bounds: list[Value] = [draft.source_value(low) or 0.0, upper]
    names = (f"{prefix}_mode", low, high, cap)
    draft.set_correction(bool(enabled) and has_correction, bounds, *names)


def _batches(draft: Draft) -> None:
    """Batch and mini-batch in prompts, from responses per device, steps and processes."""
    responses = draft.source_value(_DEVICE_BATCH)
    steps = draft.source_keys.get(_ACCUMULATION, 1)
    if isinstance(responses, int) and isinstance(steps, int):
        responses *= _processes(draft)
        generations = draft.source_value(_GENERATION_STEPS) or steps
        if _GENERATION_BATCH not in draft.source_keys and isinstance(generations, int):
            draft.set_prompts(BATCH, responses * generations, _DEVICE_BATCH, _GENERATION_STEPS)
        draft.set_prompts(MINI, responses * steps, _DEVICE_BATCH, _ACCUMULATION)
        return
    sizes = [draft.source_keys.get(name) for name in (_GENERATION_STEPS, _GENERATION_BATCH)]
    if not any(isinstance(size, int) for size in sizes):
        draft.no_counterpart[_ACCUMULATION] = f"write {BATCH} and {MINI} by hand, in prompts"


def _data(draft: Draft) -> None:
    """The configuration and the split of data sets, which are parts of their names here."""
    config = draft.source_keys.get("dataset_config")
    datasets = draft.value("data.train_data")
    if config and isinstance(datasets, list):
        names: list[Value] = [f"{name}#{config}" for name in datasets]
        draft.put("data.train_data", names, "dataset_name", "dataset_config")
        draft.no_counterpart.pop("dataset_config", None)
    draft.set_split("data.train_data", "dataset_train_split")


def _processes(draft: Draft) -> int:
    """The number of processes that the launcher starts; each computes a part of the batch.

    Colocated, the processes are also divided among the engines.
    """
    per_node = "trainer.placement.policy_num_gpus_per_node"
    nodes = int(draft.number("trainer.placement.policy_num_nodes"))
    processes = int(draft.number(per_node))
    names = draft.origin(per_node)
    if not names:
        draft.no_counterpart["num_processes"] = (
            "the recipe names no number: batch sizes are those of one process"
        )
    if "num_processes" in names:
        # accelerate counts the processes of all machines, torchrun those of each.
        processes_per_node = processes // max(nodes, 1)
        draft.put(per_node, max(processes_per_node, 1), *names)
    else:
        processes *= nodes
    engines = processes // int(draft.number(ENGINE_SIZE))
    if draft.value("trainer.placement.colocate_all") and engines > 1:
        draft.put("generator.num_inference_engines", engines, *names)
    return processes


def _cispo(draft: Draft) -> None:
    """CISPO: the upper bound of a weight there is 1 + ours; neither has a lower bound."""
    name = "epsilon" if draft.source_value("epsilon_high") is None else "epsilon_high"
    bound = draft.source_value(name)
    draft.settings.pop("trainer.algorithm.eps_clip_low", None)
    draft.settings.pop("trainer.algorithm.eps_clip_high", None)
    if not isinstance(bound, int | float):
        return
    if bound > 1:
        # Rounded, because 1.2 - 1 is not exact.
        draft.put("trainer.algorithm.cispo.cispo_eps_clip_high", round(bound - 1, 9), name)
    else:
        draft.no_counterpart[name] = (
            f"no weight exceeds {bound:g} there, which scales the loss; here the bound is above 1"
        )


def _rloo(draft: Draft) -> None:
    """TRL's RLOO: the ratio of full responses, and defaults that differ from GRPO's."""
    draft.put(ESTIMATOR, "rloo")
    draft.put(LOSS, "gspo")
    # The ratio is the product of the tokens' ratios, not their geometric mean.
    draft.put("trainer.algorithm.extra", {"product": True})
    for name in ("reward_norm_std", "use_kl_loss", "kl_loss_coef"):
        draft.settings.pop(f"trainer.algorithm.{name}", None)
    if "num_generations" not in draft.source_keys:
        draft.put(N, 2)
    beta = draft.source_keys.get("beta", 0.05)
    if beta:
        draft.put("trainer.algorithm.use_kl_in_reward", True, "beta")
        draft.put(KL_COEFFICIENT, beta, "beta")
        draft.put("trainer.algorithm.kl_estimator_type", "k1")


#: Defaults of AsyncGRPOConfig that differ from GRPOConfig's.
_ASYNC_DEFAULTS: dict[str, Value] = {
    "trainer.policy.optimizer_config.scheduler": "constant",
    RESPONSE_LENGTH: 2048,
    "trainer.max_staleness": 4,
}


def _asynchronous(draft: Draft) -> None:
    """TRL's asynchronous GRPO: its engines are servers.

    The ratio is to the engine's log-probabilities.
    """
    draft.put(PLAN, "fully_async")
    draft.put("generator.backend", "vllm")
    draft.put(ANCHOR, "behaviour")
    for path, value in _ASYNC_DEFAULTS.items():
        if path not in draft.settings or not draft.settings[path].explicit:
            draft.change(path, value)
    # Defaults for colocated engines.
    draft.drop_default("generator.gpu_memory_utilization")
    draft.drop_default(ENGINE_SIZE)


def _passes(draft: Draft) -> None:
    """The dtype of forward and backward: without mixed precision it is that of the weights."""
    weights = draft.source_value(
        "model_init_kwargs.dtype", "model_init_kwargs.torch_dtype", "dtype", "torch_dtype"
    )
    mixed = draft.source_keys.get("bf16") is not False or draft.source_keys.get("fp16")
    if weights == "bfloat16" and not mixed:
        draft.put("trainer.policy.model.dtype", "bfloat16", "bf16")


def _warm_up(draft: Draft) -> None:
    """A number of steps below 1 is a ratio of all steps."""
    prefix = "trainer.policy.optimizer_config."
    steps = draft.value(f"{prefix}num_warmup_steps")
    if isinstance(steps, float) and 0 < steps < 1:
        draft.settings.pop(f"{prefix}num_warmup_steps")
        draft.put(f"{prefix}warmup_ratio", steps, "warmup_steps")
    draft.remark_warm_up()


#: Settings that count optimizer steps there, and batches here.
_STEPS = (
    "trainer.max_training_steps",
    "trainer.ckpt_interval",
    "trainer.eval_interval",
)


def _count_steps(draft: Draft) -> None:
    """Convert optimizer steps to steps: a step here is a batch, with several optimizer steps."""
    updates = draft.updates_per_batch()
    if updates <= 1:
        return
    for path in _STEPS:
        steps = draft.value(path)
        if path in draft.settings and isinstance(steps, int) and steps > 0:
            note = f"{steps} optimizer steps, {updates} of them in a step here"
            setting = draft.settings[path]
            draft.settings[path] = replace(setting, value=ceil(steps / updates), note=note)


def _scale(draft: Draft, asynchronous: bool) -> None:
    """The epsilon that is added to the standard deviation of a group's rewards."""
    if draft.value(ESTIMATOR) not in ("grpo", "normalized"):
        return
    if draft.value("trainer.algorithm.reward_norm_std") == "none":
        return
    if asynchronous:
        # The asynchronous GRPO divides by the standard deviation of the population.
        draft.put("trainer.algorithm.extra.eps", 1e-8)
        draft.put(ESTIMATOR, "normalized")
        draft.put("trainer.algorithm.extra.unbiased", False)
    else:
        draft.put("trainer.algorithm.extra.eps", 1e-4)
