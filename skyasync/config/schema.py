"""Every setting there is: those of a run here, of its models in ``models``, of its engines in ``generation``, of its
objective in ``algorithm``. A field's sentence is also its help text.

Invariant: nothing here imports torch, ray or transformers, so that a wrong key is refused at once.
"""

# ruff: noqa: RUF009  (key() returns a dataclasses.field, with a factory where the default is mutable)

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from skyasync.config.algorithm import CRITIC, AlgorithmConfig
from skyasync.config.field import key
from skyasync.config.frozen import Settings
from skyasync.config.generation import EvalSamplingConfig, GeneratorConfig, SamplingConfig
from skyasync.config.models import (
    REWARD,
    SCHEDULES,
    TEACHER,
    CriticConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PlacementConfig,
    PolicyConfig,
    RefConfig,
    RewardConfig,
    TeacherConfig,
)
from skyasync.config.survival import CHECKPOINTS, SurvivalConfig

__all__ = [
    "REWARD",
    "SCHEDULES",
    "TEACHER",
    "AlgorithmConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "EnvironmentConfig",
    "EvalSamplingConfig",
    "GeneratorConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PlacementConfig",
    "PolicyConfig",
    "RayConfig",
    "RefConfig",
    "RewardConfig",
    "SamplingConfig",
    "TeacherConfig",
    "TrainerConfig",
]

_ENVIRONMENTS = "not generator.agent_program"


@dataclass
class TrainerConfig(SurvivalConfig):
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
    strategy: str = key("fsdp2", "How the trained model is sharded over ranks.", choices=("fsdp2",))
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
    sync_interval: int = key(
        1, "Steps from one hand-over of weights to the engines to the next; samples age by up to one less.", low=1
    )
    staleness_bound: str = key(
        "hard", "max_staleness bounds every prompt's age, or (AReaL's formula) the mean.", choices=("hard", "mean")
    )
    async_generation_ratio: float = key(
        0.0, "Batches generated ahead, with fractions, in the fully_async plan; 0 is max_staleness.", low=0.0
    )
    partial_rollout: str = key(
        "keep",
        "At a weight swap requests in flight go on with their cache, start over from their tokens, or finish first.",
        choices=("keep", "recompute", "wait"),
    )
    eval_mode: str = key(
        "overlap",
        "Evaluate beside the generation for training, or pause it: what is in flight finishes, nothing new starts.",
        choices=("overlap", "pause"),
    )
    allow_uncorrected: bool = key(False, "Let an asynchronous plan run without an off-policy correction.")
    epochs: int = key(
        0,
        "Passes over the training prompts; 0 makes as many as max_training_steps takes, or one without it.",
        low=0,
        when="not data.streaming",
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
        "Save a checkpoint whenever this metric (eval/score) is better than before, and keep the best one beside the "
        "newest.",
        open_ended=True,
    )
    ckpt_best_mode: str = key(
        "max", "Which value of ckpt_best_metric is better.", choices=("max", "min"), when="trainer.ckpt_best_metric"
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
        when=f"{CHECKPOINTS} or not trainer.resume_mode=none|auto",
    )
    ckpt_async: bool = key(
        False,
        "Write checkpoints while training goes on, of a copy in host memory; the next one waits for the former.",
        when=CHECKPOINTS,
    )
    ckpt_rollouts: bool = key(
        True,
        "Keep in checkpoints what has been generated and not yet trained, so that a resumed run need not do it again.",
        when=CHECKPOINTS,
    )
    resume_mode: str = key(
        "auto",
        "Start anew (none), or go on from the newest checkpoint in ckpt_path if there is one (latest); or from the one "
        "of a step (a number) or in a folder (a path with a slash), which there must be. auto is latest for a run_name "
        "that has checkpoints, else none.",
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
        ["jsonl"], "Trackers that receive the metrics.", registry="skyasync.observe:TRACKERS", open_ended=True
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


@dataclass
class EnvironmentConfig(Settings):
    env_class: str = key("", "Environment of rows that name none: a registered id or module:Class.", open_ended=True)
    num_workers: int = key(1, "Processes that run environments or agent programs.", low=1)
    max_threads: int = key(
        512,
        "Most threads per process for environments without async methods; quick steps use one.",
        low=1,
        when=_ENVIRONMENTS,
    )
    step_timeout_s: float = key(
        60.0, "Seconds an environment's step may take from its beginning.", above=0.0, when=_ENVIRONMENTS
    )
    on_error: str = key(
        "raise",
        "What an environment that raises, hangs or says nonsense does: end the run, or end its own episode, which is "
        "then left out of the loss (mask) or trained (keep), with give_up_reward.",
        choices=("raise", "mask", "keep"),
    )
    max_retries: int = key(
        3,
        "Times that a step, or an agent program from its beginning, is tried again after a skyasync.TransientError.",
        low=0,
    )
    retry_pause_s: float = key(
        1.0, "Seconds before the first of them, twice as long before each further one, less up to half by chance.",
        above=0.0, when="environment.max_retries",
    )  # fmt: skip
    transient_errors: list[str] = key(
        [],
        "Other kinds of errors that are transient, by their names: ConnectionError, httpx.ReadTimeout.",
        when="environment.max_retries",
    )
    max_given_up: float = key(
        1.0,
        "Share of a step's episodes that on_error may end before the run ends; 1 is no such limit.",
        above=0.0,
        high=1.0,
        when="environment.on_error=mask|keep",
    )
    give_up_reward: float = key(
        0.0, "Reward of an episode that on_error has ended.", when="environment.on_error=mask|keep"
    )
    max_observation_chars: int = key(
        200_000, "A longer observation is an error of its environment.", low=1, when=_ENVIRONMENTS
    )
    env_config: dict[str, Any] = key({}, "Free settings, handed to the environment.")
    env_class_from_rows: bool = key(
        True, "Rows may name their own env_class; false: environment.env_class for all.", when=_ENVIRONMENTS
    )
    reward_funcs: list[str] = key(
        [],
        "Functions that judge a response (environment.env_class=reward): registered names, module:function, "
        "path/to/file.py:function (alone: its reward_func), the address of an OpenRLHF reward server (http://...; "
        "several with commas), or judge:NAME (environment.judges).",
        registry="skyasync.rewards:REWARDS",
        pattern=r".+\.py",
        open_ended=True,
    )
    reward_weights: list[float] = key([], "Factors of the functions' scores in their sum; none weighs all 1.")
    reward_timeout_s: float = key(10.0, "Seconds a reward function may take for one response.", above=0.0)
    reward_unjudged: str = key(
        "zero",
        "A response whose reward function takes longer, or crashes its process, earns 0 from it and is counted, or "
        "ends the run.",
        choices=("zero", "raise"),
    )
    code_sandbox: str = key(
        "auto",
        "Where code_tests runs the model's code: bubblewrap, landlock, the first of them that works (auto), the "
        "address of a SandboxFusion server (http://...), or with less protection seccomp or none (docs/security.md).",
        choices=("auto", "bubblewrap", "landlock", "seccomp", "none"),
        pattern=r"https?://[^/\s]\S*",
    )
    judges: dict[str, Any] = key(
        {},
        "Models that judge responses, by name: base_url and model (an OpenAI-compatible server) or engine=policy, "
        "prompt, parser, ... (docs/rewards.md). Each is the reward function judge:NAME.",
        when=_ENVIRONMENTS,
    )
    domains: dict[str, Any] = key(
        {},
        "Per domain of the rows: reward_funcs, reward_weights, scale (factor of their sum), proportion (share of the "
        "training prompts), tags (rows whose column names one of these are the domain's too).",
    )


@dataclass
class DataConfig(Settings):
    train_data: list[str] = key(
        [],
        "Training prompts: .parquet, .jsonl or .json files, folders, Hugging Face names (owner/name#config:split), "
        "reasoning_gym:task, or module:function.",
        open_ended=True,
    )
    val_data: list[str] = key([], "Held-out prompts, in the same forms.", open_ended=True)
    val_sets: dict[str, Any] = key(
        {},
        "Held-out prompts by name, evaluated as eval/<name>/...: a source, a list of them, or {data: ..., n_samples: "
        "responses per prompt}.",
    )
    streaming: bool = key(
        False,
        "Read training prompts block by block instead of holding them: for data larger than memory, or without an end. "
        "The run then ends by trainer.max_training_steps, and goes through the data as often as that takes.",
    )
    shuffle_buffer: int = key(
        4096,
        "Rows that are shuffled among each other; a stream's order is that of such blocks.",
        low=1,
        when="data.streaming",
    )
    prompt_key: str = key("prompt", "Column with the prompt: a conversation, or a string.", open_ended=True)
    label_key: str = key(
        "label", "Column with the right answer, the environment's label; a.b is b in column a.", open_ended=True
    )
    domain_key: str = key("domain", "Column with the row's domain.", open_ended=True)
    apply_chat_template: bool = key(True, "Frame prompts by the chat template; false takes text prompts as they are.")
    chat_template: str = key(
        "",
        "Jinja template in place of the model's own: a file, or its text; for prompts, observations and the endpoint.",
        open_ended=True,
        when="data.apply_chat_template",
    )
    chat_template_kwargs: dict[str, Any] = key(
        {}, "What the template is told besides, such as {enable_thinking: false}.", when="data.apply_chat_template"
    )
    chat_history: str = key(
        "template",
        "What the model reads of its earlier turns: what the template shows (some drop thinking parts), a row of its "
        "own for each turn where that differs, or its tokens as sampled, one row per episode.",
        choices=("template", "sampled"),
        when="data.apply_chat_template",
    )
    system_prompt: str = key("", "Put in front of conversations that have no system message.", open_ended=True)
    reasoning_gym: dict[str, Any] = key(
        {}, "Per reasoning_gym task: size, seed, val_size, val_seed, and the task's own options."
    )


@dataclass
class RayConfig(Settings):
    address: str = key(
        "", "Cluster to join ('auto' or host:port); empty starts one on this machine's loopback.", open_ended=True
    )


@dataclass
class Config(Settings):
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    data: DataConfig = field(default_factory=DataConfig)
    ray: RayConfig = field(default_factory=RayConfig)
