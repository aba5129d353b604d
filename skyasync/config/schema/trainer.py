"""The run itself: its plan, its batches, its checkpoints, what it writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING

from skyasync.config.keys import When, key
from skyasync.config.parts import Plan, check_correction
from skyasync.config.schema.algorithm import CRITIC, AlgorithmConfig
from skyasync.config.schema.fault_tolerance import CHECKPOINTS, FaultToleranceConfig
from skyasync.config.schema.models import TEACHER, CriticConfig, PolicyConfig, RefConfig, TeacherConfig
from skyasync.config.schema.placement import ParallelConfig, PlacementConfig
from skyasync.config.schema.reward_models import REWARD, RewardConfig

if TYPE_CHECKING:
    from skyasync.config.schema import Config


@dataclass
class TrainerConfig(FaultToleranceConfig):
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig, metadata={"when": CRITIC})
    reward: RewardConfig = field(default_factory=RewardConfig, metadata={"when": REWARD})
    teacher: TeacherConfig = field(default_factory=TeacherConfig, metadata={"when": TEACHER})
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    plan: str = key(
        "sync",
        "The execution plan, where the experiment does not fix one.",
        registry="skyasync.trainer.plans:PLANS",
        open_ended=True,
    )
    strategy: str = key(
        "fsdp2",
        "The backend that holds and trains the models: fsdp2, or a ModelBackend of your own (module:Class).",
        choices=("fsdp2",),
        open_ended=True,
    )
    async_queue_size: int = key(
        1, "Batches the generator may be ahead in the one_step_off plan: the staleness it settles at.", low=1
    )
    stream_groups: int = key(
        0,
        "Groups that the streamed plan trains at a time, in the order of their prompts: the same seed then gives the "
        "same losses bit for bit. 0 trains whatever has been generated, which waits least.",
        low=0,
    )
    max_staleness: int = key(
        1, "Versions a prompt may age from submission to training in the fully_async plan; 0 is synchronous.", low=0
    )
    sync_interval: int = key(1, "Steps from one weight sync to the next; samples age by up to one less.", low=1)
    staleness_bound: str = key(
        "hard", "max_staleness bounds every prompt's age, or (AReaL's formula) the mean.", choices=("hard", "mean")
    )
    async_generation_ratio: float = key(
        0.0, "Batches generated ahead, with fractions, in the fully_async plan; 0 is max_staleness.", low=0.0
    )
    partial_rollout: str = key(
        "keep",
        "At a weight sync requests in flight continue with their cache, start over from their tokens, or finish first.",
        choices=("keep", "recompute", "wait"),
    )
    eval_mode: str = key(
        "overlap",
        "Evaluate while training generates, or pause it: requests in flight finish, nothing new starts.",
        choices=("overlap", "pause"),
    )
    allow_uncorrected: bool = key(False, "Let an asynchronous plan run without an off-policy correction.")
    epochs: int = key(
        0,
        "Passes over the training prompts; 0 makes as many as max_training_steps takes, or one without it.",
        low=0,
        when=When(lambda cfg: not cfg.data.streaming, "not data.streaming"),
    )
    max_training_steps: int = key(0, "Stop after this many steps; 0 runs all epochs.", low=0)
    train_batch_size: int = key(64, "Prompts per training step.", low=1)
    policy_mini_batch_size: int = key(0, "Prompts per optimizer step; 0 takes the whole training batch.", low=0)
    update_epochs_per_batch: int = key(1, "Optimizer passes over each training batch.", low=1)
    micro_train_batch_size_per_gpu: int = key(
        0, "Most sequences per forward-backward pass, within micro_batch_tokens; 0 sets no such limit.", low=0
    )
    micro_forward_batch_size_per_gpu: int = key(
        0, "Most sequences per forward-only pass, within micro_batch_tokens; 0 sets no such limit.", low=0
    )
    micro_batch_tokens: int = key(
        0,
        "Most tokens per pass, padding included; a longer sequence is a pass by itself. 0 is 4096 on a CPU, 16384 on a "
        "GPU.",
        low=0,
    )
    max_prompt_length: int = key(512, "Prompts with more tokens are left out, and counted.", low=1)
    eval_batch_size: int = key(1024, "Prompts evaluated at once.", low=1)
    eval_interval: int = key(5, "Evaluate every so many steps; 0 only at the end.", low=0)
    eval_minutes: float = key(0.0, "Evaluate as well when so many minutes have passed; 0 goes by steps.", low=0.0)
    eval_before_train: bool = key(True, "Evaluate the starting policy.")
    eval_k: list[int] = key(
        [], "The k of eval/pass@k and eval/maj@k; empty is 1, 2, 4, ... as far as the samples per prompt go.", low=1
    )
    eval_passing: float = key(1.0, "The reward from which on a sample counts as right in them.")
    eval_answer: str = key(
        "auto",
        "What a response's answer is, for the votes of eval/maj@k: auto (the last \\boxed{}, #### or 'answer is', or a "
        "short response itself), a regular expression (its last match), file.py:function of the text; empty: no votes.",
        open_ended=True,
    )
    ckpt_interval: int = key(0, "Save a checkpoint every so many steps; 0 saves none.", low=0)
    ckpt_minutes: float = key(
        0.0, "Save a checkpoint as well when so many minutes have passed; 0 goes by steps.", low=0.0
    )
    ckpt_best_metric: str = key(
        "",
        "Save a checkpoint whenever this metric (eval/score) is better than before, and keep the best one in addition "
        "to the newest.",
        open_ended=True,
    )
    ckpt_best_mode: str = key(
        "max",
        "Which value of ckpt_best_metric is better.",
        choices=("max", "min"),
        when=When(lambda cfg: cfg.trainer.ckpt_best_metric, "trainer.ckpt_best_metric"),
    )
    ckpt_on_exit: bool = key(
        False,
        "Save one however the run ends (Ctrl-C, an error); an update under way is finished first.",
    )
    ckpt_keep: int = key(2, "Newest checkpoints to keep; 0 keeps all.", low=0, when=CHECKPOINTS)
    ckpt_path: str = key(
        "",
        "Folder of the checkpoints; empty is <run folder>/checkpoints.",
        open_ended=True,
        when=When(
            lambda cfg: CHECKPOINTS(cfg) or cfg.trainer.resume_mode not in ("none", "auto"),
            *CHECKPOINTS.alternatives,
            "not trainer.resume_mode=none|auto",
        ),
    )
    ckpt_async: bool = key(
        False,
        "Write checkpoints while training continues, from a copy in host memory; the next one waits for the previous.",
        when=CHECKPOINTS,
    )
    ckpt_rollouts: bool = key(
        True,
        "Keep in checkpoints what has been generated and not yet trained, so that a resumed run need not do it again.",
        when=CHECKPOINTS,
    )
    resume_mode: str = key(
        "auto",
        "Start a new run (none), or continue from the newest checkpoint in ckpt_path if there is one (latest); or from "
        "that of a step (a number) or in a folder (a path with a slash), which must exist. auto is latest for a "
        "run_name that has checkpoints, else none.",
        choices=("auto", "none", "latest"),
        pattern=r"\d+|.*/.*",
    )
    export_path: str = key(
        "", "Write the final policy here as a Hugging Face folder; empty writes none.", open_ended=True
    )
    export_interval: int = key(
        0, "Write the policy as a Hugging Face folder, <run folder>/exports/step_<n>, every so many steps.", low=0
    )
    profile_steps: list[int] = key(
        [], "Steps in which torch's profiler records the workers, into <run folder>/profile.", low=1
    )
    run_name: str = key("", "Name of the run's folder; empty makes one from plan and time.", open_ended=True)
    runs_dir: str = key("runs", "Folder that holds the runs' folders.", open_ended=True)
    project_name: str = key("skyasync", "Project name for external trackers.", open_ended=True)
    logger: list[str] = key(
        ["jsonl"], "Trackers that receive the metrics.", registry="skyasync.observability:TRACKERS", open_ended=True
    )
    terminal: str = key(
        "auto",
        "A live view where standard output is a terminal, else a line per step; or one of both wherever it goes.",
        choices=("auto", "live", "lines"),
    )
    seed: int = key(42, "The one seed that governs the run; with vLLM, sampling depends on timing as well.", low=0)
    step_timeout_s: float = key(1800.0, "Seconds after which a step that has not ended is an error.", above=0.0)
    save_samples: int = key(4, "Trajectories written to samples.jsonl per step.", low=0)
    dump_trajectories: bool = key(
        False, "Write every trajectory that is trained to trajectories/step_<n>.parquet, for skyasync replay."
    )
    report: bool = key(True, "Make report.html, a page about the run, at its end (skyasync report makes one any time).")


def check_plan(cfg: Config, plan: Plan | None) -> Iterator[str]:
    """Devices that are shared, and samples that are stale and not corrected."""
    if plan is None:
        return
    way_back = "" if plan.fixed else " or trainer.plan=sync"
    interval = cfg.trainer.sync_interval
    if cfg.trainer.placement.colocate_all and interval > 1:
        yield (
            f"trainer.sync_interval={interval} leaves the engines without new weights after most steps, and "
            f"trainer.placement.colocate_all=true wakes them by handing weights over: set one of them to its default"
        )
    if cfg.trainer.placement.colocate_all and (plan.asynchronous or plan.streams):
        yield (
            f"trainer.placement.colocate_all=true lets engines and policy take turns, but {plan} runs both at the "
            f"same time: set trainer.placement.colocate_all=false{way_back}"
        )
    yield from check_correction(cfg, plan)


def check_admission(cfg: Config, plan: Plan | None) -> Iterator[str]:
    """How far generation may be ahead."""
    trainer, generator = cfg.trainer, cfg.generator
    if plan is None or not plan.reads("trainer.max_staleness"):
        return
    between = trainer.sync_interval - 1
    if trainer.max_staleness < between:
        yield (
            f"trainer.sync_interval={trainer.sync_interval} lets samples age by {between}, more than "
            f"trainer.max_staleness={trainer.max_staleness} allows: raise the one, or lower the other"
        )
    elif 0 < trainer.async_generation_ratio < between:
        yield (
            f"trainer.async_generation_ratio={trainer.async_generation_ratio:g} generates too little ahead for the "
            f"{trainer.sync_interval} batches that trainer.sync_interval={trainer.sync_interval} trains between two "
            f"weight syncs: raise it to {between}, or lower the interval"
        )
    if trainer.async_generation_ratio > trainer.max_staleness:
        yield (
            f"trainer.async_generation_ratio={trainer.async_generation_ratio:g} generates further ahead than "
            f"trainer.max_staleness={trainer.max_staleness} allows: raise trainer.max_staleness to "
            f"{ceil(trainer.async_generation_ratio)}, or lower the ratio"
        )
    batch = trainer.train_batch_size
    least, most = (between + 1) * batch, (trainer.max_staleness + 1) * batch
    of = f"trainer.train_batch_size={batch}" + (f" times trainer.sync_interval={between + 1}" if between else "")
    if generator.generate_batch_size and not least <= generator.generate_batch_size <= most:
        yield (
            f"generator.generate_batch_size={generator.generate_batch_size} is not between "
            f"{of} and the {most} prompts that trainer.max_staleness="
            f"{trainer.max_staleness} allows: change it, or raise trainer.max_staleness to "
            f"{max(ceil(generator.generate_batch_size / batch) - 1, trainer.max_staleness)}"
        )


def check_trainer(cfg: Config) -> Iterator[str]:
    """Batches that do not divide, and what is named twice."""
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
    for name in sorted({name for name in cfg.trainer.logger if cfg.trainer.logger.count(name) > 1}):
        yield f"trainer.logger names {name} twice: name each tracker once"
