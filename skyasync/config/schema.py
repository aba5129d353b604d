"""Every setting there is. A field's sentence is also its help text.

Invariant: nothing here imports torch, ray or transformers, so that a wrong key is refused at once.
"""

# ruff: noqa: RUF009  (key() returns a dataclasses.field, with a factory where the default is mutable)

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from skyasync.config.algorithm import CRITIC, KL, AlgorithmConfig
from skyasync.config.field import inheriting, key
from skyasync.config.frozen import Settings

_CHECKPOINTS = "trainer.ckpt_interval or trainer.ckpt_minutes or trainer.ckpt_best_metric or trainer.ckpt_on_exit"
_APART = "trainer.placement.colocate_policy_ref=false"
#: There is a reward model.
REWARD = "trainer.reward.model.path"
_CRITIC_APART = "trainer.placement.colocate_policy_critic=false"
_ENVIRONMENTS = "not generator.agent_program"
_AGENTS = "generator.agent_program"
_RESTARTS = "generator.max_engine_restarts"


@dataclass
class ModelConfig(Settings):
    path: str = key(
        "", "Hugging Face name, local folder, or module:function that makes one and returns its path.", open_ended=True
    )
    dtype: str = key(
        "auto",
        "Dtype of the trained weights; auto is float32 on a CPU, bfloat16 on a GPU.",
        choices=("auto", "float32", "bfloat16"),
    )


#: Schedule -> what ``scheduler_kwargs`` may tell it, as transformers' ``get_scheduler`` takes it.
SCHEDULES: dict[str, tuple[str, ...]] = {
    "constant": (),
    "constant_with_warmup": (),
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": ("num_decay_steps", "decay_type", "min_lr_ratio", "num_cycles"),
}


@dataclass
class OptimizerConfig(Settings):
    lr: float = key(1e-6, "Peak learning rate of AdamW; 0 trains nothing (a control).", low=0.0)
    adam_betas: list[float] = key([0.9, 0.999], "AdamW's two decay rates.", low=0.0, below=1.0)
    eps: float = key(1e-8, "AdamW's epsilon, added to the root of the second moment.", above=0.0)
    weight_decay: float = key(0.0, "AdamW's decoupled weight decay.", low=0.0)
    max_grad_norm: float = key(1.0, "Clip the global gradient norm to this; 0 is off.", low=0.0)
    num_warmup_steps: int = key(0, "Optimizer steps of linear warm-up.", low=0)
    warmup_ratio: float = key(0.0, "The same as a share of all optimizer steps.", low=0.0, below=1.0)
    scheduler: str = key(
        "constant", "Learning rate after the warm-up, by transformers' names.", choices=tuple(SCHEDULES)
    )
    scheduler_kwargs: dict[str, Any] = key({}, "What the schedule is told besides, such as {min_lr_rate: 0.1}.")


_ADAPTERS = "trainer.policy.lora.rank"


@dataclass
class LoraConfig(Settings):
    rank: int = key(
        0, "Train low-rank adapters of this rank beside frozen weights (LoRA); 0 trains the weights themselves.", low=0
    )
    alpha: float = key(16.0, "What an adapter adds is scaled by alpha / rank.", above=0.0, when=_ADAPTERS)
    dropout: float = key(
        0.0, "Share of an adapter's inputs that an update leaves out.", low=0.0, below=1.0, when=_ADAPTERS
    )
    target_modules: list[str] = key(
        ["all-linear"],
        "Linear layers that get an adapter, by the ends of their names (q_proj, mlp.up_proj); all-linear is all of "
        "them but the head.",
        when=_ADAPTERS,
    )
    exclude_modules: list[str] = key([], "Layers among these that get none.", when=_ADAPTERS)
    export: str = key(
        "merged",
        "What an export of the policy holds: the weights with the adapters added, or a folder of peft's with the "
        "adapters alone.",
        choices=("merged", "adapter"),
        when=_ADAPTERS,
    )


@dataclass
class PolicyConfig(Settings):
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)
    gradient_checkpointing: bool | str = key(
        "auto",
        "Recompute activations in the backward pass to save memory; auto does so on a GPU.",
        choices=("auto", True, False),
    )
    threads: int = key(0, "CPU threads per policy rank; 0 shares the machine's cores according to the plan.", low=0)


@dataclass
class RefConfig(Settings):
    model: ModelConfig = field(default_factory=ModelConfig)


@dataclass
class CriticOptimizerConfig(OptimizerConfig):
    lr: float = key(5e-6, "Peak learning rate of AdamW; 0 trains nothing (a control).", low=0.0)


@dataclass
class CriticConfig(Settings):
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer_config: CriticOptimizerConfig = field(default_factory=CriticOptimizerConfig)
    gradient_checkpointing: bool | str = key(
        "auto",
        "Recompute activations in the backward pass to save memory; auto does so on a GPU.",
        choices=("auto", True, False),
    )
    value_clip: float = key(
        0.2, "The value loss lets a value move by at most this from what it was before the update; 0 is off.", low=0.0
    )
    warmup_steps: int = key(0, "First training steps in which the critic alone is trained, and no policy.", low=0)
    export_path: str = key(
        "",
        "Write the final critic here as a Hugging Face folder (sequence classification, one label); empty writes none.",
        open_ended=True,
    )
    threads: int = key(0, "CPU threads per critic rank; 0 takes as many as a policy rank has.", low=0)


@dataclass
class RewardConfig(Settings):
    model: ModelConfig = field(default_factory=ModelConfig)
    weight: float = key(1.0, "Factor of the reward model's score in the reward, to which it is added.")
    mean: float = key(0.0, "Mean of the model's scores, measured beforehand: it is subtracted from each.")
    std: float = key(1.0, "Standard deviation of the model's scores: what is left is divided by it.", above=0.0)
    clip: float = key(0.0, "Clamp scores, so scaled, to plus or minus this; 0 is off.", low=0.0)
    threads: int = key(0, "CPU threads per rank of the reward model; 0 takes as many as a policy rank has.", low=0)


@dataclass
class PlacementConfig(Settings):
    colocate_all: bool = key(False, "Engines and workers share devices, taking turns (synchronous plan only).")
    colocate_policy_ref: bool = key(True, "The reference model shares the policy's devices.", when=KL)
    policy_num_nodes: int = key(1, "Nodes for the policy.", low=1)
    policy_num_gpus_per_node: int = key(
        1, "Policy ranks per node: one per GPU, or per CPU process without GPUs.", low=1
    )
    ref_num_nodes: int = key(1, "Nodes for the reference model.", low=1, when=_APART)
    ref_num_gpus_per_node: int = key(1, "Reference ranks per node.", low=1, when=_APART)
    colocate_policy_critic: bool = key(
        True, "The critic shares the policy's devices; with colocate_all it does in any case.", when=CRITIC
    )
    critic_num_nodes: int = key(1, "Nodes for the critic.", low=1, when=_CRITIC_APART)
    critic_num_gpus_per_node: int = key(1, "Critic ranks per node.", low=1, when=_CRITIC_APART)
    reward_num_nodes: int = key(1, "Nodes for the reward model, whose devices are its own.", low=1, when=REWARD)
    reward_num_gpus_per_node: int = key(1, "Reward model ranks per node.", low=1, when=REWARD)
    timeout_s: float = key(180.0, "Seconds to wait for the cluster to grant the devices.", above=0.0)


@dataclass
class TrainerConfig(Settings):
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig, metadata={"when": CRITIC})
    reward: RewardConfig = field(default_factory=RewardConfig, metadata={"when": REWARD})
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    plan: str = key(
        "sync",
        "The execution plan, where the experiment does not fix one.",
        registry="skyasync.plans:PLANS",
        open_ended=True,
    )
    strategy: str = key("fsdp2", "How the trained model is sharded over ranks.", choices=("fsdp2",))
    async_queue_size: int = key(
        1, "Batches the generator may be ahead in the one_step_off plan: the staleness it settles at.", low=1
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
    epochs: int = key(1, "Passes over the training prompts.", low=1)
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
    ckpt_keep: int = key(2, "Newest checkpoints to keep; 0 keeps all.", low=0, when=_CHECKPOINTS)
    ckpt_path: str = key(
        "",
        "Folder of the checkpoints; empty is <run folder>/checkpoints.",
        open_ended=True,
        when=f"{_CHECKPOINTS} or not trainer.resume_mode=none",
    )
    ckpt_async: bool = key(
        False,
        "Write checkpoints while training goes on, of a copy in host memory; the next one waits for the former.",
        when=_CHECKPOINTS,
    )
    ckpt_rollouts: bool = key(
        True,
        "Keep in checkpoints what has been generated and not yet trained, so that a resumed run need not do it again.",
        when=_CHECKPOINTS,
    )
    ckpt_patience: int = key(
        3,
        "Checkpoints in a row that the disk does not take (it is full, or may not be written) before the run ends.",
        low=1,
        when=_CHECKPOINTS,
    )
    sigterm_grace_s: float = key(
        25.0,
        "Seconds that a run has from SIGTERM to its end: the update under way is finished and saved.",
        above=0.0,
        when=_CHECKPOINTS,
    )
    resume_mode: str = key(
        "none",
        "Start anew, or go on from the newest checkpoint in ckpt_path if there is one; or from the one of a step (a "
        "number) or in a folder (a path with a slash), which there must be.",
        choices=("none", "latest"),
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
    logger: list[str] = key(["jsonl"], "Trackers that receive the metrics.", registry="skyasync.observe:TRACKERS")
    progress: bool = key(True, "Show a progress bar where the terminal allows it.")
    seed: int = key(42, "The one seed that governs the run; with vLLM, sampling depends on timing as well.", low=0)
    step_timeout_s: float = key(1800.0, "Seconds after which a step that has not ended is an error.", above=0.0)
    save_samples: int = key(4, "Trajectories written to samples.jsonl per step.", low=0)
    dump_trajectories: bool = key(
        False, "Write every trajectory that is trained to trajectories/step_<n>.parquet, for skyasync replay."
    )
    report: bool = key(True, "Make report.html, a page about the run, at its end (skyasync report makes one any time).")


@dataclass
class SamplingConfig(Settings):
    max_generate_length: int = key(256, "Most tokens per response.", low=1)
    min_tokens: int = key(0, "Fewest tokens per response.", low=0)
    temperature: float = key(1.0, "Sampling temperature; 0 is greedy.", low=0.0)
    top_p: float = key(1.0, "Sample from the smallest set of tokens with this probability.", above=0.0, high=1.0)
    top_k: int = key(-1, "Sample from the k likeliest tokens; -1 is off.", low=-1)
    min_p: float = key(0.0, "Leave out tokens less likely than this times the likeliest.", low=0.0, high=1.0)
    presence_penalty: float = key(
        0.0, "Subtracted from the logits of tokens that the response has already.", low=-2.0, high=2.0
    )
    frequency_penalty: float = key(
        0.0, "Subtracted from the logit of a token for each time that the response has it.", low=-2.0, high=2.0
    )
    repetition_penalty: float = key(
        1.0,
        "Divides positive logits of tokens in prompt and response, and multiplies negative ones.",
        above=0.0,
    )
    stop: list[str] = key([], "Strings that end a response.")
    stop_token_ids: list[int] = key([], "Tokens that end a response, besides the model's own.", low=0)
    include_stop_str_in_output: bool = key(
        True, "What environments read holds the string that ended the response; its tokens are trained in any case."
    )
    ignore_eos: bool = key(False, "Go on after the model's end-of-sequence token.")
    bad_words: list[str] = key([], "Words that are never generated.")
    logit_bias: dict[str, Any] = key({}, "Added to the logits of these tokens: token id -> bias from -100 to 100.")
    allowed_token_ids: list[int] = key([], "Generate no other tokens than these; empty allows all.", low=0)
    skip_special_tokens: bool = key(True, "What environments and stop strings see leaves out special tokens.")
    seed: int = key(
        -1, "Draw each response from this seed and the response's identity alone; -1 is the engine's own.", low=-1
    )
    structured_outputs: dict[str, Any] = key(
        {}, "A grammar for the response: json, regex, choice, ... as in vLLM's StructuredOutputsParams (vllm only)."
    )
    repetition_detection: dict[str, Any] = key(
        {}, "End a response that repeats itself, as one cut by its length: max_pattern_size, min_count (vllm only)."
    )


@inheriting
class EvalSamplingConfig(SamplingConfig):
    """What is null is as in ``sampling_params``; read it through ``skyasync.config.sampling.evaluation``."""

    temperature: float | None = key(0.0, "Sampling temperature; 0 is greedy, null as in training.", low=0.0)  # type: ignore[assignment]


@dataclass
class GeneratorConfig(Settings):
    backend: str = key(
        "auto",
        "Inference engine; auto is vllm where it is installed, else transformers.",
        choices=("auto",),
        registry="skyasync.engines.protocol:ENGINES",
        open_ended=True,
    )
    num_inference_engines: int = key(1, "Engines behind the client.", low=1)
    inference_engine_tensor_parallel_size: int = key(1, "GPUs per engine.", low=1)
    n_samples_per_prompt: int = key(8, "Responses per prompt: a group.", low=1)
    is_num_return_sequences_expand: bool = key(
        True,
        "Ask for each sample on its own, so that a group may spread over the engines; false keeps a group on one, and "
        "asks vLLM once per prompt for all of it, which then ends together.",
    )
    eval_n_samples_per_prompt: int = key(1, "Responses per prompt in evaluation.", low=1)
    sampling_params: SamplingConfig = field(default_factory=SamplingConfig)
    eval_sampling_params: EvalSamplingConfig = field(default_factory=EvalSamplingConfig)
    generate_batch_size: int = key(
        0, "Prompts submitted and not yet trained in the fully_async plan; 0 is what max_staleness allows.", low=0
    )
    max_concurrent_rollouts: int = key(
        0, "Prompts generated at once in the fully_async plan; 0 has no such limit.", low=0
    )
    max_turns: int = key(
        0, "Most turns per episode, told to environments as extras['max_turns']; 0 has no such limit.", low=0
    )
    max_concurrent_episodes: int = key(
        0, "Episodes in flight at once, over all prompts; the others wait their turn. 0 has no such limit.", low=0
    )
    episode_timeout_s: float = key(
        0.0, "Seconds an episode may take, pauses of the engines included; 0 has no such limit.", low=0.0
    )
    agent_func_path: str = key(
        "", "An OpenRLHF agent's file, played by every row that names no env_class.", open_ended=True
    )
    agent_program: str = key(
        "",
        "Agent program in place of environments, module:function or file.py:function: it is called with data, base_url "
        "and api_key of an OpenAI-compatible endpoint, and returns the score. Or a class with async "
        "run(data, **extra).",
        open_ended=True,
    )
    turn_discount: float = key(
        1.0,
        "Factor of the reward of each call of an agent program, once for every call before it, where the program gives "
        "rewards call by call.",
        above=0.0,
        high=1.0,
        when=_AGENTS,
    )
    agent_env: list[str] = key(
        [],
        "Environment variables that agent programs may see though their names look secret (KEY, TOKEN, ...).",
        when=_AGENTS,
    )
    endpoint_host: str = key(
        "127.0.0.1",
        "Address that the endpoint listens on; one other than the loopback opens it.",
        open_ended=True,
        when=_AGENTS,
    )
    max_model_len: int = key(
        0,
        "Most tokens per sequence in the engine, at which an episode ends; 0 is room for max_turns responses (4 where "
        "it is 0) with prompts in front of and between them, or the model's context where that is shorter.",
        low=0,
    )
    max_num_seqs: int = key(1024, "Most sequences an engine computes at once.", low=1)
    max_num_batched_tokens: int = key(
        0, "Most tokens an engine computes per step, prompts included (vllm); 0 is max_num_seqs, at least 8192.", low=0
    )
    gpu_memory_utilization: float = key(
        0.8, "Share of a GPU's memory that engines may take; those on one GPU divide it.", above=0.0, high=1.0
    )
    kv_cache_gb: float = key(1.0, "KV cache of an engine on a CPU, in GB.", above=0.0)
    engine_kwargs: dict[str, Any] = key(
        {},
        "More of the engine's own arguments, such as {enforce_eager: true} (vllm); checked before the start.",
    )
    dtype: str = key(
        "auto", "Dtype of the engine's weights; auto follows the policy's.", choices=("auto", "float32", "bfloat16")
    )
    threads: int = key(0, "CPU threads per engine; 0 shares the machine's cores according to the plan.", low=0)
    weight_sync_backend: str = key(
        "auto",
        "How weights reach the engines; auto is nccl for vllm on GPUs of its own, else shared_memory.",
        choices=("auto", "shared_memory", "nccl"),
    )
    verify_weight_sync: bool = key(True, "Compare probe log-probabilities, trainer against engine, after weight syncs.")
    verify_interval: int = key(
        10, "Syncs from one such comparison to the next; digests prove every sync but those by NCCL.", low=1
    )
    weight_sync_tolerance: float = key(
        0.0,
        "Largest mean gap per token allowed in it, in nats; 0 takes 4 times the gap at start-up.",
        low=0.0,
        when="generator.verify_weight_sync",
    )
    request_timeout_s: float = key(600.0, "Seconds after which an unanswered request is an error.", above=0.0)
    engine_start_timeout_s: float = key(300.0, "Seconds an engine may take to start.", above=0.0)
    max_engine_restarts: int = key(
        3,
        "Engines that may die in an hour and are started again, while the run goes on; at the next death, or with 0 at "
        "the first, the run ends. Not with weight_sync_backend=nccl, nor with trainer.placement.colocate_all.",
        low=0,
    )
    heartbeat_s: float = key(
        5.0,
        "Seconds from one question for an engine's new tokens to the next; what it told goes on if it dies.",
        above=0.0,
        when=_RESTARTS,
    )
    heartbeat_timeout_s: float = key(
        60.0,
        "Seconds after which an engine that does not answer this question is dead; a busy one answers between two "
        "tokens.",
        above=0.0,
        when=_RESTARTS,
    )
    run_engines_locally: bool = key(True, "Engines are started by the run (the only mode there is).", choices=(True,))
    async_engine: bool = key(True, "Engines serve requests asynchronously (the only mode there is).", choices=(True,))
    batched: bool = key(
        False, "Accepted for SkyRL's recipes; requests are always batched by the engine.", choices=(False, True)
    )

    @property
    def devices_per_engine(self) -> int:
        """GPUs of an engine: tensor-parallel ranks in each of its pipeline's stages."""
        stages = self.engine_kwargs.get("pipeline_parallel_size", 1)
        return self.inference_engine_tensor_parallel_size * (stages if isinstance(stages, int) else 1)


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
        "path/to/file.py:function (alone: its reward_func), or the address of an OpenRLHF reward server (http://...; "
        "several with commas).",
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
