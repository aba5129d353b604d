"""Settings of the models that workers hold: what they load, how they are trained, where they are.

Invariant: as of ``schema``, whose part this is.
"""

# ruff: noqa: RUF009  (key() returns a dataclasses.field, with a factory where the default is mutable)

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from skyasync.config.algorithm import CRITIC, KL
from skyasync.config.field import key
from skyasync.config.frozen import Settings

#: There is a reward model, by itself or among several.
REWARD = "trainer.reward.model.path or trainer.reward.models"
_ONE_REWARD = "trainer.reward.model.path"
#: There is a teacher.
TEACHER = "trainer.teacher.model.path"
_APART = "trainer.placement.colocate_policy_ref=false"
_CRITIC_APART = "trainer.placement.colocate_policy_critic=false"
_TEACHER_APART = "trainer.placement.colocate_policy_teacher=false"


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
    config_kwargs: dict[str, Any] = key(
        {},
        "Settings of the model's config.json in place of its own, such as {rope_theta: 500000.0} or {rope_scaling: "
        "{rope_type: yarn, factor: 2.0}}; engines follow the policy's. Checked by the model's class before the start.",
    )


#: Schedule -> what ``scheduler_kwargs`` may tell it, as transformers' ``get_scheduler`` takes it.
SCHEDULES: dict[str, tuple[str, ...]] = {
    "constant": (),
    "constant_with_warmup": (),
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate", "warmup_lr_rate"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": ("num_decay_steps", "decay_type", "min_lr_ratio", "num_cycles"),
}
#: Theirs that no number of a step decides.
BY_A_METRIC = tuple(
    (name, "goes by a metric that it is told of after each step, and a rate here is a function of the step's number")
    for name in ("reduce_lr_on_plateau", "greedy")
)


@dataclass
class OptimizerConfig(Settings):
    name: str = key(
        "adamw",
        "adamw; adamw_8bit: moments of matrices in eight bits, in blocks with a scale each; or muon: the matrices of "
        "decoder layers by Muon, at AdamW's learning rate, the rest by AdamW.",
        choices=("adamw", "adamw_8bit", "muon"),
    )
    bf16_stochastic_round: bool = key(
        False,
        "Keep no float32 masters: weights (and moments, but for adamw_8bit's) are bfloat16, each step rounded up or "
        "down by chance, so that small ones are not lost. Needs model.dtype=bfloat16 (on a GPU auto is that).",
    )
    muon_momentum: float = key(0.95, "Muon's momentum; read with name=muon.", low=0.0, below=1.0)
    lr: float = key(1e-6, "Peak learning rate of AdamW; 0 trains nothing (a control).", low=0.0)
    adam_betas: list[float] = key([0.9, 0.999], "AdamW's two decay rates.", low=0.0, below=1.0)
    eps: float = key(1e-8, "AdamW's epsilon, added to the root of the second moment.", above=0.0)
    weight_decay: float = key(0.0, "AdamW's decoupled weight decay.", low=0.0)
    max_grad_norm: float = key(1.0, "Clip the global gradient norm to this; 0 is off.", low=0.0)
    num_warmup_steps: int = key(0, "Optimizer steps of linear warm-up.", low=0)
    warmup_ratio: float = key(0.0, "The same as a share of all optimizer steps.", low=0.0, below=1.0)
    scheduler: str = key(
        "constant",
        "Learning rate after the warm-up, by transformers' names.",
        choices=tuple(SCHEDULES),
        refused=BY_A_METRIC,
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
    base_dtype: str = key(
        "",
        "Hold the frozen weights of linear layers in few bits (QLoRA): nf4, four with a scale per block, by "
        "bitsandbytes; int8, eight with a scale per row. Layers compute with the numbers that these stand for; empty "
        "rounds nothing.",
        choices=("", "nf4", "int8"),
        when=_ADAPTERS,
    )
    sync: str = key(
        "merged",
        "What a weight sync sends: the weights with the adapters added, or the adapters alone, which engines add to "
        "weights of their own (transformers) or compute beside them (vllm).",
        choices=("merged", "adapter"),
        when=_ADAPTERS,
    )
    export: str = key(
        "merged",
        "What an export of the policy holds: the weights with the adapters added, or a folder of peft's with the "
        "adapters alone.",
        choices=("merged", "adapter"),
        when=_ADAPTERS,
    )


def _gradient_checkpointing() -> bool | str:
    return key(
        "auto",
        "Recompute activations in the backward pass to save memory; auto does so on a GPU; selective keeps what matrix "
        "products and attention gave, about half of it, and recomputes the rest, which is cheap.",
        choices=("auto", True, False, "selective"),
    )


def _reduce_gradients() -> str:
    return key(
        "micro_batch",
        "When ranks add up their gradients: after each micro-batch, or once per update (per part of it, where plans "
        "stream), for which each rank holds the whole gradient.",
        choices=("micro_batch", "update"),
    )


def _fsdp_size(when: str = "") -> int:
    return key(
        0,
        "Neighbouring ranks over which these weights are sharded; groups of so many are replicas of each other (HSDP), "
        "among which gradients alone travel. 0 shards over all ranks.",
        low=0,
        when=when,
    )


def _cpu_offload(when: str = "") -> str:
    return key(
        "none",
        "What lies in host memory while the model is trained: optimizer: the moments, which come to the device for "
        "each optimizer step; parameters: weights, gradients and moments (FSDP2), where the CPU makes the step, and a "
        "layer's weights come when it computes.",
        choices=("none", "optimizer", "parameters"),
        when=when,
    )


@dataclass
class PolicyConfig(Settings):
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)
    gradient_checkpointing: bool | str = _gradient_checkpointing()
    reduce_gradients: str = _reduce_gradients()
    torch_compile: bool = key(
        False,
        "Compile the policy's decoder layers (torch.compile), which takes minutes when they first compute; rows then "
        "stand one below the other.",
    )
    fsdp_size: int = _fsdp_size()
    cpu_offload: str = _cpu_offload()
    router_replay: str = key(
        "none",
        "Mixtures of experts: R3 has the trained model choose the experts that the engine chose when it generated "
        "(rollout routing replay), weighed by the trained router; none lets it choose itself.",
        choices=("none", "R3"),
    )
    threads: int = key(0, "CPU threads per policy rank; 0 shares the machine's cores according to the plan.", low=0)


@dataclass
class RefConfig(Settings):
    model: ModelConfig = field(default_factory=ModelConfig)
    fsdp_size: int = _fsdp_size(KL)
    cpu_offload: str = key(
        "none",
        "parameters: the reference's weights lie in host memory, and a layer's come to the device when it computes.",
        choices=("none", "parameters"),
        when=KL,
    )


@dataclass
class CriticOptimizerConfig(OptimizerConfig):
    lr: float = key(5e-6, "Peak learning rate of AdamW; 0 trains nothing (a control).", low=0.0)


@dataclass
class CriticConfig(Settings):
    backbone: str = key(
        "own",
        "own: a model of its own, with processes of its own; shared: one linear map of the policy's last states, "
        "computed and trained with the policy.",
        choices=("own", "shared"),
    )
    value_loss_coef: float = key(
        0.1,
        "Share of the value loss's gradient that the policy's layers get of a critic on them; 0 detaches it. The head "
        "itself learns by all of it.",
        low=0.0,
        when="trainer.critic.backbone=shared",
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer_config: CriticOptimizerConfig = field(default_factory=CriticOptimizerConfig)
    gradient_checkpointing: bool | str = _gradient_checkpointing()
    reduce_gradients: str = _reduce_gradients()
    fsdp_size: int = _fsdp_size(CRITIC)
    cpu_offload: str = _cpu_offload(CRITIC)
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
    models: dict[str, Any] = key(
        {},
        "Several, by name: path, and dtype, weight, mean, std, clip as of the one. What all say is added up.",
    )
    weight: float = key(
        1.0, "Factor of the reward model's score in the reward, to which it is added.", when=_ONE_REWARD
    )
    mean: float = key(
        0.0, "Mean of the model's scores, measured beforehand: it is subtracted from each.", when=_ONE_REWARD
    )
    std: float = key(
        1.0,
        "Standard deviation of the model's scores: what is left is divided by it.",
        above=0.0,
        when=_ONE_REWARD,
    )
    clip: float = key(0.0, "Clamp scores, so scaled, to plus or minus this; 0 is off.", low=0.0, when=_ONE_REWARD)
    threads: int = key(0, "CPU threads per rank of the reward model; 0 takes as many as a policy rank has.", low=0)


@dataclass
class TeacherConfig(Settings):
    model: ModelConfig = field(default_factory=ModelConfig)
    weight: float = key(
        1.0,
        "Factor of the teacher's part of a token's advantage, log p_teacher - log p_policy, which is added to what the "
        "estimator makes of rewards.",
        above=0.0,
    )
    top_k: int = key(
        0,
        "Compare whole distributions instead of the sampled token alone: reverse KL over so many tokens that the "
        "teacher finds likeliest and all others as one, in each token's loss, times the weight; 0 is the advantage.",
        low=0,
        when=TEACHER,
    )
    threads: int = key(0, "CPU threads per rank of the teacher; 0 takes as many as a policy rank has.", low=0)


@dataclass
class ParallelConfig(Settings):
    data: int = key(
        0,
        "Ranks that train on rows of their own, over which weights are sharded; 0 is all that the other axes leave.",
        low=0,
    )
    context: int = key(1, "Ranks that split each sequence of the same rows, for long ones (Ulysses).", low=1)
    context_kind: str = key(
        "ulysses",
        "How they attend: ulysses exchanges columns for heads, which the axis must divide; ring passes keys and values "
        "on from rank to rank, for any number of heads (prompts are not shared, and there are no windows; on a GPU in "
        "bfloat16, where it has not run).",
        choices=("ulysses", "ring"),
    )
    tensor: int = key(1, "Ranks that split the matrices of the same rows, by transformers' plan for the model.", low=1)
    expert: int = key(
        0, "Ranks that divide a mixture's experts, whole: those of the tensor axis, as many as it has (0).", low=0
    )


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
    colocate_policy_teacher: bool = key(True, "The teacher shares the policy's devices.", when=TEACHER)
    teacher_num_nodes: int = key(1, "Nodes for the teacher.", low=1, when=_TEACHER_APART)
    teacher_num_gpus_per_node: int = key(1, "Teacher ranks per node.", low=1, when=_TEACHER_APART)
    timeout_s: float = key(180.0, "Seconds to wait for the cluster to grant the devices.", above=0.0)
