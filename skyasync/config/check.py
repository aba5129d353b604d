"""Settings that are right alone and wrong together.

Invariant: each problem is one line that names the keys concerned and the way out; nothing here imports torch. What
depends on what the chosen parts can do stands in ``rules``, what nothing reads in ``unread``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from operator import attrgetter

from skyasync.config.agents import check_agents
from skyasync.config.algorithm import AlgorithmConfig
from skyasync.config.domains import check_domains, check_weights
from skyasync.config.endless import check_streamed_data
from skyasync.config.engine_rules import (
    check_adapters,
    check_engine,
    check_engine_kwargs,
    check_router_replay,
)
from skyasync.config.evaluation import check_evaluation, eval_sources
from skyasync.config.groups import check_groups
from skyasync.config.judges import check_judges
from skyasync.config.optimizers import check_optimizers
from skyasync.config.parallel import check_parallel, check_replicas
from skyasync.config.resume import Resume, keeps_checkpoints
from skyasync.config.rules import (
    Plan,
    check_admission,
    check_critic,
    check_estimator,
    check_functions,
    check_plan,
    check_reward_model,
    check_spares,
    check_teacher,
    corrected,
    missing_parts,
    reads_behaviour,
    weighs_by_behaviour,
)
from skyasync.config.sampling import check_sampling, sampling_groups, sampling_warnings
from skyasync.config.schema import Config, EnvironmentConfig, TrainerConfig
from skyasync.config.secrets import check_hidden
from skyasync.config.streaming import check_streaming
from skyasync.config.unread import check_unread
from skyasync.errors import unknown

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


def check_config(cfg: Config, *, plan: str | type | None = None, given: Collection[str] = ()) -> list[str]:
    """All contradictions in a configuration whose single values are right.

    Args:
        plan: the plan that the experiment fixes, a name or a class; by default ``trainer.plan`` decides; "" for one
            that only the experiment knows.
        given: the keys that the user has written: those of the command line and of configuration files.
    """
    if missing := missing_parts(cfg, plan) or list(check_functions(cfg.trainer.algorithm)):
        return missing
    chosen = Plan.of(cfg, plan)
    return [
        *check_plan(cfg, chosen),
        *check_admission(cfg, chosen),
        *check_streaming(cfg, chosen),
        *check_streamed_data(cfg),
        *check_engine(cfg),
        *check_adapters(cfg),
        *check_router_replay(cfg),
        *check_engine_kwargs(cfg),
        *check_hidden(cfg),
        *check_unread(cfg, chosen, given),
        *_check_devices(cfg),
        *check_parallel(cfg),
        *_check_resuming(cfg),
        *_check_spikes(cfg.trainer),
        *_check_batches(cfg),
        *_check_lengths(cfg),
        *check_sampling(cfg, reads_behaviour=reads_behaviour(cfg.trainer.algorithm)),
        *check_spares(cfg),
        *check_estimator(cfg),
        *check_critic(cfg),
        *check_reward_model(cfg),
        *check_teacher(cfg),
        *_check_algorithm(cfg),
        *check_groups(cfg.trainer.algorithm),
        *_check_intervals(cfg.trainer.algorithm),
        *check_optimizers(cfg),
        *check_replicas(cfg),
        *_check_compiled(cfg.trainer),
        *_check_lists(cfg),
        *check_weights("environment", cfg.environment.reward_funcs, cfg.environment.reward_weights),
        *check_domains(cfg.environment.domains),
        *check_judges(cfg.environment),
        *check_evaluation(cfg),
        *_check_environment(cfg.environment),
        *_check_tasks(cfg),
        *check_agents(cfg),
    ]


def config_warnings(cfg: Config) -> list[str]:
    """What may be meant so, but is worth a line at the start of a run."""
    return list(sampling_warnings(cfg, reads_behaviour=corrected(cfg.trainer.algorithm)))


def _check_devices(cfg: Config) -> Iterator[str]:
    generator = cfg.generator
    if not cfg.trainer.placement.colocate_all:
        if generator.weight_sync_backend == "cuda_ipc":
            yield (
                "generator.weight_sync_backend=cuda_ipc has engines read on the policy's own GPUs, and "
                "trainer.placement.colocate_all=false gives them others: use generator.weight_sync_backend=nccl, or "
                "set trainer.placement.colocate_all=true"
            )
        return
    if generator.weight_sync_backend == "nccl":
        yield (
            "generator.weight_sync_backend=nccl broadcasts from one GPU to others, and "
            "trainer.placement.colocate_all=true puts policy and engines on the same: use "
            "generator.weight_sync_backend=cuda_ipc or shared_memory, or set trainer.placement.colocate_all=false"
        )
    if generator.devices_per_engine > 1:
        size = generator.inference_engine_tensor_parallel_size
        key = f"generator.inference_engine_tensor_parallel_size={size}" if size > 1 else "pipeline_parallel_size"
        yield (
            f"{key} needs as many GPUs per engine, and trainer.placement.colocate_all=true gives it a share of one: "
            f"set the size to 1, or trainer.placement.colocate_all=false"
        )


def _check_resuming(cfg: Config) -> Iterator[str]:
    trainer = cfg.trainer
    resume = Resume.of(trainer)
    if resume.wanted and not resume.folder and not trainer.run_name and not trainer.ckpt_path:
        yield (
            f"trainer.resume_mode={trainer.resume_mode} finds nothing in a run folder whose name is made anew "
            f"at every start: set trainer.run_name to the run to go on with, or trainer.ckpt_path to the folder of its "
            f"checkpoints"
        )


def _check_spikes(trainer: TrainerConfig) -> Iterator[str]:
    for name, limit in trainer.spike_limits.items():
        if isinstance(limit, bool) or not isinstance(limit, int | float):
            yield f"trainer.spike_limits.{name}={limit!r} is no number: it is the largest value that is no spike"
        elif trainer.on_spike == "rollback" and name.startswith(("sync/", "eval/")):
            yield (
                f"trainer.spike_limits.{name} is known when the engines have the weights, too late for "
                f"trainer.on_spike=rollback: limit what training finds (policy/..., off_policy/..., critic/...), or "
                f"set warn or raise"
            )
    if trainer.on_spike == "rollback" and not keeps_checkpoints(trainer):
        yield (
            "trainer.on_spike=rollback goes back to a checkpoint, and this run saves none: set trainer.ckpt_interval "
            "or trainer.ckpt_minutes"
        )


def _check_environment(environment: EnvironmentConfig) -> Iterator[str]:
    if environment.env_class not in ("", "reward") and environment.reward_funcs:
        yield (
            f"environment.reward_funcs are called by environment.env_class=reward, not by {environment.env_class}: "
            f"leave environment.env_class empty, or environment.reward_funcs"
        )


def _check_tasks(cfg: Config) -> Iterator[str]:
    data = cfg.data
    held_out = [] if any(check_evaluation(cfg)) else eval_sources(data)
    sources = [source for source in [*data.train_data, *held_out] if source.startswith(TASK_SOURCE)]
    tasks = {source.removeprefix(TASK_SOURCE) for source in sources}
    for task, options in data.reasoning_gym.items():
        if task not in tasks:
            yield f"data.reasoning_gym.{task} is for no task in data.train_data: {unknown('task', str(task), tasks)}"
        elif not isinstance(options, Mapping):
            yield f"data.reasoning_gym.{task} must be a mapping of options, found {options!r}"


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
    algorithm = cfg.trainer.algorithm
    if algorithm.use_kl_loss and algorithm.use_kl_in_reward:
        yield (
            "trainer.algorithm.use_kl_loss and trainer.algorithm.use_kl_in_reward are both true, which counts the "
            "KL divergence twice: set one of them to false"
        )
    correction = algorithm.off_policy_correction
    if correction not in ("auto", "none") and not correction.endswith("_mask") and weighs_by_behaviour(algorithm):
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


def _check_compiled(trainer: TrainerConfig) -> Iterator[str]:
    policy = trainer.policy
    if policy.torch_compile and policy.gradient_checkpointing == "selective":
        yield (
            "trainer.policy.torch_compile=true decides by itself what a layer keeps for its backward pass, so "
            "trainer.policy.gradient_checkpointing=selective has no effect: set true, or false"
        )
    if policy.torch_compile and policy.lora.rank:
        yield (
            f"trainer.policy.torch_compile=true and trainer.policy.lora.rank={policy.lora.rank}: adapters step aside "
            f"for the reference and for engines, and compiled layers would not see it: remove one of them"
        )


def _check_lists(cfg: Config) -> Iterator[str]:
    for name in sorted({name for name in cfg.trainer.logger if cfg.trainer.logger.count(name) > 1}):
        yield f"trainer.logger names {name} twice: name each tracker once"
