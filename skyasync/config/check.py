"""Settings that are right alone and wrong together.

Invariant: each problem is one line that names the keys concerned and the way out; nothing here imports torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from math import ceil
from operator import attrgetter

from skyasync.config.agents import check_agents
from skyasync.config.algorithm import AlgorithmConfig
from skyasync.config.domains import check_domains, check_weights
from skyasync.config.groups import check_groups
from skyasync.config.sampling import check_sampling, sampling_groups, sampling_warnings
from skyasync.config.schema import Config, DataConfig, EnvironmentConfig
from skyasync.errors import unknown

#: Built-in plans that train on samples of an older policy.
ASYNCHRONOUS_PLANS = frozenset({"one_step_off", "fully_async"})
#: Built-in plans whose engines are idle while weights are swapped.
WHOLE_BATCH_PLANS = frozenset({"sync", "one_step_off"})

# Importing the losses would import torch, so what their signatures say stands here as well; a test holds both equal.
#: Built-in policy losses that weigh by the behaviour policy whatever ``ratio_anchor`` is.
BEHAVIOUR_LOSSES = frozenset({"decoupled_ppo", "dppo", "rollout_is"})
#: Built-in policy losses that leave out tokens by it.
BEHAVIOUR_SELECTING_LOSSES = frozenset({"m2po"})
#: Built-in policy losses without an anchor: ``ratio_anchor`` says nothing about them.
ANCHORLESS_LOSSES = BEHAVIOUR_LOSSES | BEHAVIOUR_SELECTING_LOSSES | {"vanilla"}

#: Advantage estimators whose baseline is the rest of the group: a group of one has advantage zero.
GROUP_ESTIMATORS = frozenset({"dr_grpo", "grpo", "grpo_passk", "maxrl", "opo", "reinforce++_baseline", "rloo"})


#: What names a procedural task among ``data.train_data`` and ``data.val_data``.
TASK_SOURCE = "reasoning_gym:"

#: Pairs of keys under ``trainer.algorithm`` that bound an interval (clip ranges are distances from 1, no such pair).
INTERVALS = (
    ("tis_low", "tis_high"),
    ("token_tis_ratio_clip_low", "token_tis_ratio_clip_high"),
    ("icepop_low", "icepop_high"),
    ("token_mask_is_threshold_low", "token_mask_is_threshold_high"),
    ("product_mask_low", "product_mask_high"),
    ("geo_mask_low", "geo_mask_high"),
    ("outlier_token_is_threshold_low", "outlier_token_is_threshold_high"),
    ("clip_cov.clip_cov_lb", "clip_cov.clip_cov_ub"),
    ("dynamic_sampling.low", "dynamic_sampling.high"),
)


def check_config(cfg: Config, *, plan: str | None = None) -> list[str]:
    """All contradictions in a configuration whose single values are right.

    Args:
        plan: the plan that the experiment fixes; by default ``trainer.plan`` decides.
    """
    return [
        *_check_plan(cfg, plan or cfg.trainer.plan, fixed=plan is not None),
        *_check_admission(cfg, plan or cfg.trainer.plan),
        *_check_devices(cfg),
        *_check_resuming(cfg),
        *_check_batches(cfg),
        *_check_lengths(cfg),
        *check_sampling(cfg),
        *_check_algorithm(cfg),
        *check_groups(cfg.trainer.algorithm),
        *_check_intervals(cfg.trainer.algorithm),
        *_check_lists(cfg),
        *check_weights("environment", cfg.environment.reward_funcs, cfg.environment.reward_weights),
        *check_domains(cfg.environment.domains),
        *_check_environment(cfg.environment),
        *_check_tasks(cfg.data),
        *check_agents(cfg),
    ]


def config_warnings(cfg: Config) -> list[str]:
    """What may be meant so, but is worth a line at the start of a run."""
    algorithm = cfg.trainer.algorithm
    return list(sampling_warnings(cfg, reads_behaviour=_corrected(algorithm) or _uses_behaviour(algorithm)))


def _corrected(algorithm: AlgorithmConfig) -> bool:
    return algorithm.off_policy_correction != "none" or bool(set(algorithm.off_policy_masks) - {"none"})


def _check_plan(cfg: Config, plan: str, *, fixed: bool) -> Iterator[str]:
    if plan not in ASYNCHRONOUS_PLANS:
        return
    which = f"this experiment's plan, {plan}," if fixed else f"trainer.plan={plan}"
    way_back = "" if fixed else " or trainer.plan=sync"
    if cfg.trainer.placement.colocate_all:
        yield (
            f"trainer.placement.colocate_all=true lets engines and policy take turns, but {which} runs both at the "
            f"same time: set trainer.placement.colocate_all=false{way_back}"
        )
    if plan == "fully_async" and cfg.trainer.max_staleness == 0:
        return  # no sample is stale
    algorithm = cfg.trainer.algorithm
    if not _corrected(algorithm) and not cfg.trainer.allow_uncorrected and not _uses_behaviour(algorithm):
        yield (
            f"trainer.algorithm.off_policy_correction=none leaves the samples of an older policy uncorrected, since "
            f"{which} is asynchronous and trainer.algorithm.policy_loss_type={algorithm.policy_loss_type} does not use "
            f"the behaviour log-probabilities: choose a correction (auto, token_tis), a loss that uses them "
            f"({', '.join(sorted(BEHAVIOUR_LOSSES))}), or trainer.allow_uncorrected=true"
        )


def _check_admission(cfg: Config, plan: str) -> Iterator[str]:
    trainer, generator = cfg.trainer, cfg.generator
    if plan in WHOLE_BATCH_PLANS and trainer.partial_rollout != "keep":
        yield (
            f"trainer.partial_rollout={trainer.partial_rollout} decides about requests in flight at a weight swap, and "
            f"trainer.plan={plan} has none: set trainer.plan=fully_async, or leave trainer.partial_rollout at keep"
        )
    if plan != "fully_async":
        return
    if trainer.async_generation_ratio > trainer.max_staleness:
        yield (
            f"trainer.async_generation_ratio={trainer.async_generation_ratio:g} generates further ahead than "
            f"trainer.max_staleness={trainer.max_staleness} allows: raise trainer.max_staleness to "
            f"{ceil(trainer.async_generation_ratio)}, or lower the ratio"
        )
    batch, most = trainer.train_batch_size, (trainer.max_staleness + 1) * trainer.train_batch_size
    if generator.generate_batch_size and not batch <= generator.generate_batch_size <= most:
        yield (
            f"generator.generate_batch_size={generator.generate_batch_size} is not between "
            f"trainer.train_batch_size={batch} and the {most} prompts that trainer.max_staleness="
            f"{trainer.max_staleness} allows: change it, or raise trainer.max_staleness to "
            f"{max(ceil(generator.generate_batch_size / batch) - 1, trainer.max_staleness)}"
        )


def _check_devices(cfg: Config) -> Iterator[str]:
    generator = cfg.generator
    if generator.backend == "transformers" and generator.inference_engine_tensor_parallel_size > 1:
        yield (
            f"generator.inference_engine_tensor_parallel_size={generator.inference_engine_tensor_parallel_size} needs "
            f"generator.backend=vllm: an engine of generator.backend=transformers runs on one device"
        )
    if generator.backend == "transformers" and generator.weight_sync_backend == "nccl":
        yield (
            "generator.weight_sync_backend=nccl needs generator.backend=vllm: with generator.backend=transformers use "
            "generator.weight_sync_backend=shared_memory"
        )
    if not cfg.trainer.placement.colocate_all:
        return
    if generator.weight_sync_backend == "nccl":
        yield (
            "generator.weight_sync_backend=nccl broadcasts from one GPU to others, and "
            "trainer.placement.colocate_all=true puts policy and engines on the same: use "
            "generator.weight_sync_backend=shared_memory, or set trainer.placement.colocate_all=false"
        )
    if generator.inference_engine_tensor_parallel_size > 1:
        yield (
            f"generator.inference_engine_tensor_parallel_size={generator.inference_engine_tensor_parallel_size} needs "
            f"as many GPUs per engine, and trainer.placement.colocate_all=true gives it a share of one: set the size "
            f"to 1, or trainer.placement.colocate_all=false"
        )


def _check_resuming(cfg: Config) -> Iterator[str]:
    trainer = cfg.trainer
    if trainer.resume_mode == "latest" and not trainer.run_name and not trainer.ckpt_path:
        yield (
            "trainer.resume_mode=latest finds nothing in a run folder whose name is made anew at every start: set "
            "trainer.run_name to the run to go on with, or trainer.ckpt_path to the folder of its checkpoints"
        )


def _check_environment(environment: EnvironmentConfig) -> Iterator[str]:
    if environment.env_class not in ("", "reward") and environment.reward_funcs:
        yield (
            f"environment.reward_funcs are called by environment.env_class=reward, not by {environment.env_class}: "
            f"leave environment.env_class empty, or environment.reward_funcs"
        )


def _check_tasks(data: DataConfig) -> Iterator[str]:
    sources = [source for source in [*data.train_data, *data.val_data] if source.startswith(TASK_SOURCE)]
    tasks = {source.removeprefix(TASK_SOURCE) for source in sources}
    for task, options in data.reasoning_gym.items():
        if task not in tasks:
            yield f"data.reasoning_gym.{task} is for no task in data.train_data: {unknown('task', str(task), tasks)}"
        elif not isinstance(options, Mapping):
            yield f"data.reasoning_gym.{task} must be a mapping of options, found {options!r}"


def _uses_behaviour(algorithm: AlgorithmConfig) -> bool:
    return algorithm.policy_loss_type in BEHAVIOUR_SELECTING_LOSSES or _weighs_by_behaviour(algorithm)


def _weighs_by_behaviour(algorithm: AlgorithmConfig) -> bool:
    """Whether the loss itself has the behaviour policy in its ratio."""
    from skyasync.algorithms import POLICY_LOSSES

    loss, anchored = algorithm.policy_loss_type, algorithm.ratio_anchor == "behaviour"
    registered = POLICY_LOSSES.get(loss)  # a user's loss is registered by now; a built-in one perhaps not
    if registered is None:
        return loss in BEHAVIOUR_LOSSES or (anchored and loss not in ANCHORLESS_LOSSES)
    parameters = inspect.signature(registered).parameters
    return "behaviour" in parameters or (anchored and "anchor" in parameters)


def _check_batches(cfg: Config) -> Iterator[str]:
    batch, mini = cfg.trainer.train_batch_size, cfg.trainer.policy_mini_batch_size
    if mini > batch:
        yield (
            f"trainer.policy_mini_batch_size={mini} is larger than trainer.train_batch_size={batch}: "
            f"make it a divisor of {batch}, or 0 for the whole batch"
        )
    elif mini and batch % mini:
        divisor = max(d for d in range(1, mini + 1) if batch % d == 0)
        yield (
            f"trainer.policy_mini_batch_size={mini} does not divide trainer.train_batch_size={batch}: "
            f"the nearest smaller divisor is {divisor}; 0 takes the whole batch"
        )


def _check_lengths(cfg: Config) -> Iterator[str]:
    generator = cfg.generator
    for group, sampling in sampling_groups(generator).items():
        name = f"generator.{group}.max_generate_length"
        needed = cfg.trainer.max_prompt_length + sampling.max_generate_length
        if 0 < generator.max_model_len < needed:
            yield (
                f"generator.max_model_len={generator.max_model_len} is less than "
                f"trainer.max_prompt_length={cfg.trainer.max_prompt_length} plus {name}="
                f"{sampling.max_generate_length}: raise it to {needed}, or leave it at 0"
            )
        turns = generator.max_turns
        longest = cfg.trainer.max_prompt_length + turns * sampling.max_generate_length
        if turns > 1 and needed <= generator.max_model_len < longest:
            yield (
                f"generator.max_model_len={generator.max_model_len} has no room for generator.max_turns={turns} turns "
                f"of {name}={sampling.max_generate_length} behind a prompt of trainer.max_prompt_length="
                f"{cfg.trainer.max_prompt_length}: raise it to {longest} and what the environment says, or set "
                f"generator.max_turns=0, as many as there is room for"
            )
        if sampling.min_tokens > sampling.max_generate_length:
            yield (
                f"generator.{group}.min_tokens={sampling.min_tokens} is more than {name}="
                f"{sampling.max_generate_length}: lower the one or raise the other"
            )


def _check_algorithm(cfg: Config) -> Iterator[str]:
    algorithm, samples = cfg.trainer.algorithm, cfg.generator.n_samples_per_prompt
    if algorithm.advantage_estimator == "gae":
        preset = f" (trainer.algorithm.preset={algorithm.preset})" if algorithm.preset == "ppo" else ""
        yield (
            f"trainer.algorithm.advantage_estimator=gae{preset} needs a critic, and there is none yet: choose an "
            f"estimator without one, trainer.algorithm.advantage_estimator=reinforce++ (no groups) or grpo"
        )
    if samples == 1 and algorithm.advantage_estimator in GROUP_ESTIMATORS:
        yield (
            f"generator.n_samples_per_prompt=1 leaves trainer.algorithm.advantage_estimator="
            f"{algorithm.advantage_estimator} no group to compare with (every advantage would be 0): "
            f"sample at least 2 per prompt, or choose an estimator without a group, such as reinforce++"
        )
    if algorithm.use_kl_loss and algorithm.use_kl_in_reward:
        yield (
            "trainer.algorithm.use_kl_loss and trainer.algorithm.use_kl_in_reward are both true, which counts the "
            "KL divergence twice: set one of them to false"
        )
    correction = algorithm.off_policy_correction
    if correction not in ("auto", "none") and not correction.endswith("_mask") and _weighs_by_behaviour(algorithm):
        yield (
            f"trainer.algorithm.policy_loss_type={algorithm.policy_loss_type} (with trainer.algorithm.ratio_anchor="
            f"{algorithm.ratio_anchor}) weighs samples by the behaviour policy itself; trainer.algorithm."
            f"off_policy_correction={correction} would weigh them twice: choose auto, none or a mask"
        )


def _check_intervals(algorithm: AlgorithmConfig) -> Iterator[str]:
    for low, high in INTERVALS:
        least, most = attrgetter(low)(algorithm), attrgetter(high)(algorithm)
        if least > most:
            yield (
                f"trainer.algorithm.{low}={least} is above trainer.algorithm.{high}={most}, which leaves nothing "
                f"between them: lower the one or raise the other"
            )


def _check_lists(cfg: Config) -> Iterator[str]:
    betas = cfg.trainer.policy.optimizer_config.adam_betas
    if len(betas) != 2:
        yield f"trainer.policy.optimizer_config.adam_betas has {len(betas)} entries: AdamW takes two, [0.9,0.999]"
    for name in sorted({name for name in cfg.trainer.logger if cfg.trainer.logger.count(name) > 1}):
        yield f"trainer.logger names {name} twice: name each tracker once"
