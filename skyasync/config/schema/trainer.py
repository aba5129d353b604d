"""The run itself: its plan, its batches, its checkpoints, what it writes, and what it does when
something fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Any

from skyasync.config.frozen import SettingsGroup
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
    from skyasync.config.schema import Config


#: Checkpoints are saved.
CHECKPOINTS = When(
    "trainer.ckpt_interval",
    "trainer.ckpt_minutes",
    "trainer.ckpt_best_metric",
    "trainer.ckpt_on_exit",
)


@dataclass
class FaultToleranceConfig(SettingsGroup):
    """The part of ``TrainerConfig`` that is about failures."""

    ckpt_patience: int = key(3, low=1, when=CHECKPOINTS)
    """Number of checkpoints in a row that cannot be written (disk full, read-only) before the run
    ends."""
    sigterm_grace_s: float = key(25.0, above=0.0, when=CHECKPOINTS)
    """Seconds from SIGTERM to the end of the run, in which the current update is finished and
    saved."""
    max_restarts: int = key(3, low=0)
    """Maximum number of restarts per hour from the newest checkpoint, after failures of workers or
    controller. One more failure ends the run. Without checkpoints the first failure ends it."""
    heartbeat_timeout_s: float = key(120.0, above=0.0)
    """Seconds without a heartbeat after which the controller, or a busy worker, counts as failed.
    Needs checkpoints and trainer.max_restarts above 0."""
    on_nonfinite: str = key("raise", choices=("raise", "skip"))
    """If a loss, gradient or reward is NaN or infinite: raise stops the run, skip skips the
    optimizer step. The batch is written to nonfinite/, for skyasync replay."""
    spike_limits: dict[str, Any] = key({})
    """Upper limit per metric; more is a spike. For example {policy/approx_kl: 0.2,
    off_policy/ratio_max: 50}."""
    on_spike: str = key("warn", choices=("warn", "raise", "rollback"), when="trainer.spike_limits")
    """If a metric exceeds its limit. warn: log and count it. raise: stop the run. rollback: restore
    the newest checkpoint's weights and optimizer state, and skip the data since then."""
    max_bad_steps: int = key(
        3, low=1, when=When("trainer.on_nonfinite=skip", "trainer.on_spike=rollback")
    )
    """Number of skipped optimizer steps (on_nonfinite=skip) or undone steps (on_spike=rollback) in
    a row that ends the run."""


def check_fault_tolerance(trainer: TrainerConfig) -> Iterator[str]:
    for name, limit in trainer.spike_limits.items():
        if isinstance(limit, bool) or not isinstance(limit, int | float):
            yield f"trainer.spike_limits.{name}={limit!r} is not a number: set the largest value that is not a spike"
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
    """Execution plan; an experiment class that has its own ignores this."""
    strategy: str = key("fsdp2", registry="skyasync.models:BACKENDS", open_ended=True)
    """Training backend: fsdp2, or a ModelBackend of your own."""
    async_queue_size: int = key(1, low=1)
    """Number of batches that one_step_off generates ahead, which is also its staleness."""
    stream_groups: int = key(0, low=0)
    """Number of groups that the plan streamed trains at a time, in the order of their prompts; the
    same seed then gives bitwise identical losses. 0 trains groups as they finish, with the least
    waiting."""
    max_staleness: int = key(1, low=0)
    """Maximum staleness in fully_async and its variants: policy versions from a prompt's submission
    to its training. 0 is synchronous."""
    staleness_control: str = key("none", choices=("none", "auto"))
    """auto lowers the policy's learning rate for stale samples by the KL divergence between
    sampling and trained policy, and divides AdamW's first decay rate by 1 + staleness. The learning
    rate is never above the schedule's. If the effective sample size is below 0.5, it flattens the
    correction's weights; fully_async and its variants also lower the staleness bound."""
    sync_interval: int = key(1, low=1)
    """Training steps from one weight sync to the next. A value of n adds up to n - 1 to the
    staleness."""
    staleness_bound: str = key("hard", choices=("hard", "mean"))
    """hard: max_staleness limits every prompt. mean: it limits only the mean staleness (as in
    AReaL)."""
    async_generation_ratio: float = key(0.0, low=0.0)
    """Number of batches that fully_async and its variants generate ahead, may be fractional; 0 uses
    max_staleness."""
    partial_rollout: str = key("keep", choices=("keep", "recompute", "wait"))
    """What happens to requests in flight at a weight sync. keep: they continue with the old KV
    cache. recompute: they continue from their tokens with the new weights. wait: they finish
    first."""
    eval_mode: str = key("overlap", choices=("overlap", "pause"))
    """overlap: evaluate during generation for training. pause: let requests in flight finish, then
    evaluate alone."""
    allow_uncorrected: bool = key(False)
    """Let an asynchronous plan run without an off-policy correction."""
    epochs: int = key(0, low=0, when="not data.streaming")
    """Passes over the training prompts; 0 means until max_training_steps, or one pass if that is
    0."""
    max_training_steps: int = key(0, low=0)
    """Stop after this many steps; 0 runs all epochs."""
    train_batch_size: int = key(64, low=1)
    """Prompts per training step."""
    policy_mini_batch_size: int = key(0, low=0)
    """Prompts per optimizer step; 0 takes the whole training batch."""
    update_epochs_per_batch: int = key(1, low=1)
    """Optimizer passes over each training batch."""
    micro_train_batch_size_per_gpu: int = key(0, low=0)
    """Maximum number of sequences per forward and backward pass, within micro_batch_tokens; 0 is no
    limit."""
    micro_forward_batch_size_per_gpu: int = key(0, low=0)
    """Maximum number of sequences per forward-only pass, within micro_batch_tokens; 0 is no
    limit."""
    micro_batch_tokens: int = key(0, low=0)
    """Maximum number of tokens per forward and backward pass, including padding. A longer sequence
    is a pass of its own. 0 is 4096 on a CPU, 16384 on a GPU."""
    max_prompt_length: int = key(512, low=1)
    """Maximum number of tokens of a prompt; longer prompts are dropped and counted."""
    eval_batch_size: int = key(1024, low=1)
    """Prompts evaluated at once."""
    eval_interval: int = key(5, low=0)
    """Steps between evaluations; 0 evaluates only at the end."""
    eval_minutes: float = key(0.0, low=0.0)
    """Evaluate also after this many minutes; 0 is off."""
    eval_before_train: bool = key(True)
    """Evaluate the starting policy."""
    eval_k: list[int] = key([], low=1)
    """Values of k in eval/pass@k; empty is 1, 2, 4, ... up to the samples per prompt."""
    eval_passing: float = key(1.0)
    """Minimum reward of a correct sample in eval/pass@k and eval/maj@n."""
    eval_answer: str = key("auto", open_ended=True)
    """How the answer of a response is found for the votes of eval/maj@n: auto (the last \\boxed{},
    the text after #### or 'answer is', or a short response itself), a regular expression (its last
    match), or file.py:function of the text. Empty: no votes."""
    ckpt_interval: int = key(0, low=0)
    """Steps between checkpoints; 0 saves none."""
    ckpt_minutes: float = key(0.0, low=0.0)
    """Save a checkpoint also after this many minutes; 0 is off."""
    ckpt_best_metric: str = key("", open_ended=True)
    """Save a checkpoint at each new best value of this metric (eval/score), and keep the best one
    in addition to the newest."""
    ckpt_best_mode: str = key("max", choices=("max", "min"), when="trainer.ckpt_best_metric")
    """Whether a larger (max) or a smaller value (min) of ckpt_best_metric is better."""
    ckpt_on_exit: bool = key(False)
    """Save a checkpoint at every end of the run (Ctrl-C, an error); the current update is finished
    first."""
    ckpt_keep: int = key(2, low=0, when=CHECKPOINTS)
    """Number of newest checkpoints to keep; 0 keeps all."""
    ckpt_path: str = key(
        "",
        open_ended=True,
        when=When(*CHECKPOINTS.alternatives, "not trainer.resume_mode=none|auto"),
    )
    """Folder of the checkpoints; empty is <run folder>/checkpoints."""
    ckpt_async: bool = key(False, when=CHECKPOINTS)
    """Write checkpoints from a copy in host memory while training continues; the next one waits for
    the previous."""
    ckpt_rollouts: bool = key(True, when=CHECKPOINTS)
    """Save rollouts that are generated and not yet trained in checkpoints, so a resumed run does
    not generate them again."""
    resume_mode: str = key("auto", choices=("auto", "none", "latest"), pattern=r"\d+|.*/.*")
    """none: start a new run. latest: resume from the newest checkpoint in ckpt_path, if there is
    one. A number: from the checkpoint of that step. A path with a slash: from that folder. auto:
    latest if run_name names a run with checkpoints, otherwise none."""
    export_path: str = key("", open_ended=True)
    """Folder for the final policy in Hugging Face's format; empty writes none."""
    export_interval: int = key(0, low=0)
    """Steps between exports of the policy to <run folder>/exports/step_<n>, in Hugging Face's
    format; 0 is off."""
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
    """auto: a live panel on a terminal, otherwise one line per step; live and lines choose one of
    them."""
    seed: int = key(42, low=0)
    """Random seed of the run; with vLLM, sampling also depends on timing."""
    step_timeout_s: float = key(1800.0, above=0.0)
    """Maximum duration of a phase of a step in seconds; exceeding it is an error. In generation and
    evaluation only time counts in which the engines generate nothing."""
    save_samples: int = key(4, low=0)
    """Number of trajectories per step that are written to samples.jsonl, and per evaluation and set
    to eval_samples.jsonl."""
    dump_trajectories: bool = key(False)
    """Write every trained trajectory to trajectories/step_<n>.parquet, for skyasync replay."""
    report: bool = key(True)
    """Write report.html at the end of the run (skyasync report makes it at any time)."""
    live_page: bool = key(False)
    """Serve the report with alarms during the run, at a free port of 127.0.0.1; the run prints its
    address."""


def check_plan(cfg: Config, plan: Plan | None) -> Iterator[str]:
    """Devices that are shared, and samples that are stale and not corrected."""
    if plan is None:
        return
    interval = cfg.trainer.sync_interval
    if cfg.trainer.placement.colocate_all and interval > 1:
        yield (
            f"trainer.sync_interval={interval} leaves the engines without new weights after most steps, and "
            f"trainer.placement.colocate_all=true wakes them by a weight sync: set one of them to its default"
        )
    shares = plan.shares_devices
    ranks = cfg.trainer.placement.policy_ranks
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
    if (
        cfg.trainer.placement.colocate_all
        and shares != "all"
        and (plan.asynchronous or plan.streams)
    ):
        if plan.fixed:
            way_out = ""
        else:
            way_out = ", trainer.plan=colocated_async (asynchronous, in turn) or trainer.plan=sync"
        yield (
            f"trainer.placement.colocate_all=true lets engines and policy take turns, but {plan} runs both at the "
            f"same time: set trainer.placement.colocate_all=false{way_out}"
        )
    yield from check_correction(cfg, plan)


def check_admission(cfg: Config, plan: Plan | None) -> Iterator[str]:
    """Contradictions in how far generation may be ahead."""
    trainer = cfg.trainer
    generator = cfg.generator
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
    smallest = (between + 1) * batch
    largest = (trainer.max_staleness + 1) * batch
    batch_text = f"trainer.train_batch_size={batch}" + (
        f" times trainer.sync_interval={between + 1}" if between else ""
    )
    if generator.generate_batch_size and not smallest <= generator.generate_batch_size <= largest:
        yield (
            f"generator.generate_batch_size={generator.generate_batch_size} is not between "
            f"{batch_text} and the {largest} prompts that trainer.max_staleness="
            f"{trainer.max_staleness} allows: change it, or raise trainer.max_staleness to "
            f"{max(ceil(generator.generate_batch_size / batch) - 1, trainer.max_staleness)}"
        )


def check_trainer(cfg: Config) -> Iterator[str]:
    """Batch sizes that do not divide, and trackers that are named twice."""
    batch = cfg.trainer.train_batch_size
    mini = cfg.trainer.policy_mini_batch_size
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
