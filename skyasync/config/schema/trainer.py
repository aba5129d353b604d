"""The run itself: its plan, its batches, its checkpoints, what it writes, and what it does when something fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Any

from skyasync.config.keys import When, key
from skyasync.config.parts import Plan, check_correction
from skyasync.config.resume import keeps_checkpoints
from skyasync.config.schema.algorithm import CRITIC, AlgorithmConfig
from skyasync.config.schema.models import (
    REWARD,
    TEACHER,
    CriticConfig,
    PolicyConfig,
    RefConfig,
    RewardConfig,
    TeacherConfig,
)
from skyasync.config.schema.placement import ParallelConfig, PlacementConfig

if TYPE_CHECKING:
    from skyasync.config.schema import Config, TrainerConfig


#: Checkpoints are saved.
CHECKPOINTS = When("trainer.ckpt_interval", "trainer.ckpt_minutes", "trainer.ckpt_best_metric", "trainer.ckpt_on_exit")


@dataclass
class FaultToleranceConfig:
    """The part of ``TrainerConfig`` that is about failures."""

    ckpt_patience: int = key(3, low=1, when=CHECKPOINTS)
    """Checkpoints in a row that the disk does not take (it is full, or may not be written) before the run ends."""
    sigterm_grace_s: float = key(25.0, above=0.0, when=CHECKPOINTS)
    """Seconds that a run has from SIGTERM to its end: the update under way is finished and saved."""
    max_restarts: int = key(3, low=0)
    """Failures of workers or of the controller in an hour after which they are started again from the newest
    checkpoint; at the next failure, or with 0 at the first, the run ends, as it does if it saves no checkpoints."""
    heartbeat_timeout_s: float = key(120.0, above=0.0)
    """Seconds without a heartbeat after which a process of a model, while it works on a request, or the controller
    counts as failed; if checkpoints are saved and trainer.max_restarts is above 0."""
    on_nonfinite: str = key("raise", choices=("raise", "skip"))
    """What a loss, gradient or reward that is NaN or infinite does: end the run, or (skip) leave out the optimizer
    step. The batch is written to nonfinite/, for skyasync replay."""
    spike_limits: dict[str, Any] = key({})
    """Metric -> the largest value that is not a spike, such as {policy/approx_kl: 0.2, off_policy/ratio_max: 50}."""
    on_spike: str = key("warn", choices=("warn", "raise", "rollback"), when="trainer.spike_limits")
    """What a spike does: a line and a count; end the run; or return to the weights and optimizer state of the newest
    checkpoint, and leave out the data since then."""
    max_bad_steps: int = key(3, low=1, when=When("trainer.on_nonfinite=skip", "trainer.on_spike=rollback"))
    """Optimizer steps in a row that are left out (on_nonfinite=skip), or steps undone (on_spike=rollback), at which the
    run ends."""


def check_fault_tolerance(trainer: TrainerConfig) -> Iterator[str]:
    for name, limit in trainer.spike_limits.items():
        if isinstance(limit, bool) or not isinstance(limit, int | float):
            yield f"trainer.spike_limits.{name}={limit!r} is no number: it is the largest value that is not a spike"
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
    plan: str = key("sync", registry="skyasync.trainer.plans:PLANS", open_ended=True)
    """The execution plan, where the experiment does not fix one."""
    strategy: str = key("fsdp2", registry="skyasync.models:BACKENDS", open_ended=True)
    """The backend that holds and trains the models, or a ModelBackend of your own."""
    async_queue_size: int = key(1, low=1)
    """Batches the generator may be ahead in the one_step_off plan: the staleness it settles at."""
    stream_groups: int = key(0, low=0)
    """Groups that the streamed plan trains at a time, in the order of their prompts: the same seed then gives bitwise
    identical losses. 0 trains whatever has been generated, which waits least."""
    max_staleness: int = key(1, low=0)
    """Maximum staleness in fully_async and its variants: policy versions from a prompt's submission to its training. 0
    is synchronous."""
    staleness_control: str = key("none", choices=("none", "auto"))
    """auto lowers the policy's learning rate while stale samples are far from the trained policy: no more than keeps
    their KL divergence at 0.02 nats per token. It is never above the schedule's."""
    sync_interval: int = key(1, low=1)
    """Training steps from one weight sync to the next. A value of n adds up to n - 1 to the staleness."""
    staleness_bound: str = key("hard", choices=("hard", "mean"))
    """hard: max_staleness bounds the staleness of every prompt. mean: it bounds the mean (AReaL's formula)."""
    async_generation_ratio: float = key(0.0, low=0.0)
    """Batches generated ahead, with fractions, in fully_async and its variants; 0 is max_staleness."""
    partial_rollout: str = key("keep", choices=("keep", "recompute", "wait"))
    """What requests in flight do at a weight sync. keep: continue with the old KV cache. recompute: continue from their
    tokens with the new weights. wait: finish before it."""
    eval_mode: str = key("overlap", choices=("overlap", "pause"))
    """overlap: evaluate during generation for training. pause: let requests in flight finish, then evaluate alone."""
    allow_uncorrected: bool = key(False)
    """Let an asynchronous plan run without an off-policy correction."""
    epochs: int = key(0, low=0, when="not data.streaming")
    """Passes over the training prompts; 0 makes as many as max_training_steps takes, or one without it."""
    max_training_steps: int = key(0, low=0)
    """Stop after this many steps; 0 runs all epochs."""
    train_batch_size: int = key(64, low=1)
    """Prompts per training step."""
    policy_mini_batch_size: int = key(0, low=0)
    """Prompts per optimizer step; 0 takes the whole training batch."""
    update_epochs_per_batch: int = key(1, low=1)
    """Optimizer passes over each training batch."""
    micro_train_batch_size_per_gpu: int = key(0, low=0)
    """Most sequences per forward-backward pass, within micro_batch_tokens; 0 sets no such limit."""
    micro_forward_batch_size_per_gpu: int = key(0, low=0)
    """Maximum number of sequences of a forward-only pass, within micro_batch_tokens; 0 sets no such limit."""
    micro_batch_tokens: int = key(0, low=0)
    """Maximum number of tokens of a forward and backward pass, with padding. A longer sequence is a pass by itself. 0
    is 4096 on a CPU, 16384 on a GPU."""
    max_prompt_length: int = key(512, low=1)
    """Prompts with more tokens are left out, and counted."""
    eval_batch_size: int = key(1024, low=1)
    """Prompts evaluated at once."""
    eval_interval: int = key(5, low=0)
    """Evaluate every so many steps; 0 only at the end."""
    eval_minutes: float = key(0.0, low=0.0)
    """Evaluate as well when so many minutes have passed; 0 goes by steps."""
    eval_before_train: bool = key(True)
    """Evaluate the starting policy."""
    eval_k: list[int] = key([], low=1)
    """The k of eval/pass@k and eval/maj@k; empty is 1, 2, 4, ... as far as the samples per prompt go."""
    eval_passing: float = key(1.0)
    """The reward from which on a sample counts as right in them."""
    eval_answer: str = key("auto", open_ended=True)
    r"""What a response's answer is, for the votes of eval/maj@k: auto (the last \boxed{}, #### or 'answer is', or a
    short response itself), a regular expression (its last match), file.py:function of the text; empty: no votes."""
    ckpt_interval: int = key(0, low=0)
    """Save a checkpoint every so many steps; 0 saves none."""
    ckpt_minutes: float = key(0.0, low=0.0)
    """Save a checkpoint as well when so many minutes have passed; 0 goes by steps."""
    ckpt_best_metric: str = key("", open_ended=True)
    """Save a checkpoint whenever this metric (eval/score) is better than before, and keep the best one in addition to
    the newest."""
    ckpt_best_mode: str = key("max", choices=("max", "min"), when="trainer.ckpt_best_metric")
    """Which value of ckpt_best_metric is better."""
    ckpt_on_exit: bool = key(False)
    """Save one however the run ends (Ctrl-C, an error); an update under way is finished first."""
    ckpt_keep: int = key(2, low=0, when=CHECKPOINTS)
    """Newest checkpoints to keep; 0 keeps all."""
    ckpt_path: str = key("", open_ended=True, when=When(*CHECKPOINTS.alternatives, "not trainer.resume_mode=none|auto"))
    """Folder of the checkpoints; empty is <run folder>/checkpoints."""
    ckpt_async: bool = key(False, when=CHECKPOINTS)
    """Write checkpoints while training continues, from a copy in host memory; the next one waits for the previous."""
    ckpt_rollouts: bool = key(True, when=CHECKPOINTS)
    """Keep in checkpoints what has been generated and not yet trained, so that a resumed run need not do it again."""
    resume_mode: str = key("auto", choices=("auto", "none", "latest"), pattern=r"\d+|.*/.*")
    """Start a new run (none), or continue from the newest checkpoint in ckpt_path if there is one (latest); or from
    that of a step (a number) or in a folder (a path with a slash), which must exist. auto is latest for a run_name that
    has checkpoints, else none."""
    export_path: str = key("", open_ended=True)
    """Write the final policy here as a Hugging Face folder; empty writes none."""
    export_interval: int = key(0, low=0)
    """Write the policy as a Hugging Face folder, <run folder>/exports/step_<n>, every so many steps."""
    profile_steps: list[int] = key([], low=1)
    """Steps in which torch's profiler records the workers, into <run folder>/profile."""
    run_name: str = key("", open_ended=True)
    """Name of the run's folder; empty makes one from plan and time."""
    runs_dir: str = key("runs", open_ended=True)
    """Folder that holds the runs' folders."""
    project_name: str = key("skyasync", open_ended=True)
    """Project name for external trackers."""
    logger: list[str] = key(["jsonl"], registry="skyasync.observability:TRACKERS", open_ended=True)
    """Trackers that receive the metrics."""
    terminal: str = key("auto", choices=("auto", "live", "lines"))
    """A live view where standard output is a terminal, else a line per step; or one of both wherever it goes."""
    seed: int = key(42, low=0)
    """The one seed that governs the run; with vLLM, sampling depends on timing as well."""
    step_timeout_s: float = key(1800.0, above=0.0)
    """Seconds after which a step that has not ended is an error."""
    save_samples: int = key(4, low=0)
    """Trajectories written to samples.jsonl per step."""
    dump_trajectories: bool = key(False)
    """Write every trajectory that is trained to trajectories/step_<n>.parquet, for skyasync replay."""
    report: bool = key(True)
    """Make report.html, a page about the run, at its end (skyasync report makes one any time)."""
    live_page: bool = key(False)
    """Serve that page during the run, at a free port of 127.0.0.1, with alarms in words; the run prints its address."""


def check_plan(cfg: Config, plan: Plan | None) -> Iterator[str]:
    """Devices that are shared, and samples that are stale and not corrected."""
    if plan is None:
        return
    way_back = "" if plan.fixed else " or trainer.plan=sync"
    interval = cfg.trainer.sync_interval
    if cfg.trainer.placement.colocate_all and interval > 1:
        yield (
            f"trainer.sync_interval={interval} leaves the engines without new weights after most steps, and "
            f"trainer.placement.colocate_all=true wakes them by a weight sync: set one of them to its default"
        )
    shares, ranks = (
        plan.shares_devices,
        cfg.trainer.placement.policy_num_nodes * (cfg.trainer.placement.policy_num_gpus_per_node),
    )
    if shares == "all" and not cfg.trainer.placement.colocate_all:
        yield (
            f"{plan} lets policy and engines use the same devices in turn: set trainer.placement.colocate_all=true, or "
            f"trainer.plan=fully_async for devices of their own"
        )
    if shares == "hybrid" and not 0 < cfg.generator.hybrid_engines <= ranks:
        yield (
            f"{plan} has engines on the policy's devices, and generator.hybrid_engines={cfg.generator.hybrid_engines}: "
            f"set it to 1{f' to {ranks}, one per rank of the policy' if ranks > 1 else ', for the one rank'}, or use "
            f"trainer.plan=fully_async"
        )
    if cfg.trainer.placement.colocate_all and shares != "all" and (plan.asynchronous or plan.streams):
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
