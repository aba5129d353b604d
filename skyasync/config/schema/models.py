"""Settings of the models that workers hold: what they load, how they are trained, and how reward
models score.

Invariant: what a device must have, such as a dtype, is checked where the device is known. What
``reward_models`` reads without complaint has been found right by ``check_reward_models``; what
several of them say is added up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from skyasync.algorithms import ADVANTAGE_ESTIMATORS
from skyasync.config.frozen import SettingsGroup
from skyasync.config.keys import Keys, When, entry_problem, key
from skyasync.config.schema.algorithm import CRITIC, KL
from skyasync.config.values import written
from skyasync.errors import unknown

if TYPE_CHECKING:
    from skyasync.config.schema import Config


#: The critic is a head on the policy's layers.
SHARED_CRITIC = When("trainer.critic.backbone=shared")
#: There is a teacher.
TEACHER = When("trainer.teacher.model.path")


@dataclass
class ModelConfig(SettingsGroup):
    path: str = key("", open_ended=True)
    """Hugging Face name, local folder, or module:function that makes one and returns its path."""
    dtype: str = key("auto", choices=("auto", "float32", "bfloat16"))
    """Dtype of the trained weights; auto is float32 on a CPU, bfloat16 on a GPU."""
    config_kwargs: dict[str, Any] = key({})
    """Settings of the model's config.json in place of its own, such as {rope_theta: 500000.0} or
    {rope_scaling: {rope_type: yarn, factor: 2.0}}; engines follow the policy's. Checked by the
    model's class before the start."""


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
    (
        name,
        "goes by a metric that it is told of after each step, and a rate here is a function of the step's number",
    )
    for name in ("reduce_lr_on_plateau", "greedy")
)


@dataclass
class OptimizerConfig(SettingsGroup):
    name: str = key("adamw", choices=("adamw", "adamw_8bit", "muon"))
    """Optimizer. adamw; adamw_8bit: the state of matrices is stored in 8 bits, with a scale per
    block; muon: Muon for the matrices of decoder layers, at AdamW's learning rate, and AdamW for
    the rest."""
    bf16_stochastic_round: bool = key(False)
    """Keep no float32 master weights: weights and optimizer state (except that of adamw_8bit) are
    bfloat16, and steps are rounded up or down at random, so small steps are not lost. Needs
    model.dtype=bfloat16 (auto on a GPU)."""
    muon_momentum: float = key(0.95, low=0.0, below=1.0)
    """Momentum of name=muon."""
    lr: float = key(1e-6, low=0.0)
    """Peak learning rate; 0 trains nothing (a control run)."""
    adam_betas: list[float] = key([0.9, 0.999], low=0.0, below=1.0)
    """AdamW's two decay rates."""
    eps: float = key(1e-8, above=0.0)
    """AdamW's epsilon, added to the root of the second moment."""
    weight_decay: float = key(0.0, low=0.0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = key(1.0, low=0.0)
    """Clip the global gradient norm to this; 0 is off."""
    max_grad_cosine: float = key(0.0, low=0.0, high=1.0)
    """Limit the cosine of the gradients of consecutive optimizer steps: if it is larger, the
    component along the previous gradient is reduced before clipping. 1 only measures it; 0 is off.
    The previous gradient is stored."""
    num_warmup_steps: int = key(0, low=0)
    """Number of optimizer steps of linear warm-up."""
    warmup_ratio: float = key(0.0, low=0.0, below=1.0)
    """Linear warm-up as a share of all optimizer steps."""
    scheduler: str = key("constant", choices=tuple(SCHEDULES), refused=BY_A_METRIC)
    """Learning rate schedule after the warm-up, by transformers' names."""
    scheduler_kwargs: dict[str, Any] = key({})
    """Further parameters of the schedule, such as {min_lr_rate: 0.1}."""


@dataclass
class LoraConfig(SettingsGroup):
    rank: int = key(0, low=0)
    """Train low-rank adapters of this rank next to frozen weights (LoRA); 0 trains the weights
    themselves."""
    alpha: float = key(16.0, above=0.0, when="trainer.policy.lora.rank")
    """The output of an adapter is multiplied by alpha / rank."""
    dropout: float = key(0.0, low=0.0, below=1.0, when="trainer.policy.lora.rank")
    """Share of an adapter's inputs that is dropped in training."""
    target_modules: list[str] = key(["all-linear"], when="trainer.policy.lora.rank")
    """Linear layers that get an adapter, by the ends of their names (q_proj, mlp.up_proj);
    all-linear is all of them but the head."""
    exclude_modules: list[str] = key([], when="trainer.policy.lora.rank")
    """Layers of target_modules that get no adapter."""
    base_dtype: str = key("", choices=("", "nf4", "int8"), when="trainer.policy.lora.rank")
    """Quantize the frozen weights of linear layers (QLoRA): nf4, four bits with a scale per block
    (bitsandbytes); int8, eight bits with a scale per row. Layers compute with the rounded weights.
    Empty is off."""
    sync: str = key("merged", choices=("merged", "adapter"), when="trainer.policy.lora.rank")
    """What a weight sync sends: merged, weights with the adapters added; adapter, only the
    adapters. transformers adds them to its own weights, vllm computes them separately."""
    export: str = key("merged", choices=("merged", "adapter"), when="trainer.policy.lora.rank")
    """What an export contains: merged, weights with the adapters added; adapter, a folder of peft
    with the adapters."""


@dataclass
class TrainedModelConfig(SettingsGroup):
    """What policy and critic have in common."""

    model: ModelConfig = field(default_factory=ModelConfig)
    gradient_checkpointing: bool | str = key("auto", choices=("auto", True, False, "selective"))
    """Recompute activations in the backward pass to save memory; auto is on for GPUs. selective
    stores outputs of matrix products and attention, about half of all activations, and recomputes
    the cheap rest."""
    reduce_gradients: str = key("micro_batch", choices=("micro_batch", "update"))
    """When ranks sum their gradients: after each micro-batch, or once per update (plans that
    stream: once per part of it), for which each rank stores the whole gradient."""
    fsdp_size: int = key(0, low=0)
    """Number of neighbouring ranks that shard the weights. Groups of this size are replicas (HSDP)
    that exchange only gradients. 0 shards over all ranks."""
    cpu_offload: str = key("none", choices=("none", "optimizer", "parameters"))
    """What is in host memory during training. optimizer: the optimizer state, which moves to the
    device for each step. parameters: weights, gradients and optimizer state (FSDP2); a layer's
    weights move to the device when it computes, and the CPU makes the optimizer step."""


@dataclass
class PolicyConfig(TrainedModelConfig):
    head_dtype: str = key("model", choices=("model", "float32"))
    """Dtype in which trainer and engines compute logits. model: that of the model. float32: whatever
    the model's dtype is."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)
    torch_compile: bool = key(False)
    """Compile the policy's decoder layers except attention (torch.compile); the first passes then
    take minutes."""
    router_replay: str = key("none", choices=("none", "R3"))
    """For mixtures of experts. R3 (rollout routing replay): the trained model uses the experts that
    the engine chose in generation, weighted by the trained router. none: it chooses itself."""
    freeze: list[str] = key([])
    """Parts of the policy that are not trained and have no gradient or optimizer state: names of
    parameters or modules (model.embed_tokens), and vision_tower and projector of vision-language
    models."""
    threads: int = key(0, low=0)
    """CPU threads per policy rank; 0 shares the machine's cores according to the plan."""


@dataclass
class RefConfig(SettingsGroup):
    model: ModelConfig = field(default_factory=ModelConfig)
    fsdp_size: int = key(0, low=0, when=KL)
    """Neighbouring ranks over which these weights are sharded; groups of so many are replicas of
    each other (HSDP). 0 shards over all ranks."""
    cpu_offload: str = key("none", choices=("none", "parameters"), when=KL)
    """parameters: the reference's weights are in host memory, and a layer's weights move to the
    device when it computes."""


@dataclass
class CriticOptimizerConfig(OptimizerConfig):
    lr: float = key(5e-6, low=0.0)
    """Peak learning rate; 0 trains nothing (a control run)."""


@dataclass
class CriticConfig(TrainedModelConfig):
    backbone: str = key("own", choices=("own", "shared"))
    """own: the critic is a separate model with its own processes. shared: it is a linear map of the
    policy's last hidden states, computed and trained with the policy."""
    value_loss_coef: float = key(0.1, low=0.0, when=SHARED_CRITIC)
    """Share of the value loss's gradient that a shared critic sends to the policy's layers; 0 sends
    none. The head gets the whole gradient."""
    optimizer_config: CriticOptimizerConfig = field(default_factory=CriticOptimizerConfig)
    value_clip: float = key(0.2, low=0.0)
    """Maximum change of a value relative to its value before the update, in the value loss; 0 is
    off."""
    warmup_steps: int = key(0, low=0)
    """Number of first training steps in which only the critic is trained."""
    export_path: str = key("", open_ended=True)
    """Write the final critic here as a Hugging Face folder (sequence classification, one label);
    empty writes none."""
    threads: int = key(0, low=0)
    """CPU threads per critic rank; 0 takes as many as a policy rank has."""


@dataclass
class TeacherConfig(SettingsGroup):
    model: ModelConfig = field(default_factory=ModelConfig)
    weight: float = key(1.0, above=0.0)
    """Factor of the teacher's part of a token's advantage, log p_teacher - log p_policy. It is
    added to the advantage from rewards."""
    top_k: int = key(0, low=0, when=TEACHER)
    """Compare distributions instead of sampled tokens: each token's loss gets weight times the
    reverse KL over this many tokens that are most likely for the teacher, with all other tokens as
    one more. 0 compares sampled tokens."""
    threads: int = key(0, low=0)
    """CPU threads per rank of the teacher; 0 takes as many as a policy rank has."""


def check_models(cfg: Config) -> Iterator[str]:
    """Settings of a role that contradict each other, and roles that would learn nothing."""
    policy = cfg.trainer.policy
    critic = cfg.trainer.critic
    tensor = cfg.trainer.parallel.tensor
    has_critic = CRITIC(cfg)
    yield from _check_optimizer("trainer.policy", policy, tensor)
    if has_critic:
        placement = cfg.trainer.placement
        colocated = placement.colocate_policy_critic or placement.colocate_all
        yield from _check_optimizer("trainer.critic", critic, tensor if colocated else 1)
    if policy.lora.rank:
        yield from _check_adapters(policy, tensor)
    if policy.torch_compile and policy.gradient_checkpointing == "selective":
        yield (
            "trainer.policy.torch_compile=true decides by itself what a layer keeps for its backward pass, so "
            "trainer.policy.gradient_checkpointing=selective has no effect: set true, or false"
        )
    if has_critic and SHARED_CRITIC(cfg):
        yield from _check_shared_critic(cfg)
    steps = cfg.trainer.max_training_steps
    warmup = critic.warmup_steps
    if has_critic and 0 < steps <= warmup:
        yield (
            f"trainer.critic.warmup_steps={warmup} trains the critic alone to the end of "
            f"trainer.max_training_steps={steps}: lower the first, or raise the second"
        )
    teacher = cfg.trainer.teacher
    sampling = cfg.generator.sampling_params
    filters = {
        "top_k": sampling.top_k > 0,
        "top_p": sampling.top_p < 1,
        "min_p": sampling.min_p > 0,
    }
    filters |= {
        "logit_bias": bool(sampling.logit_bias),
        "allowed_token_ids": bool(sampling.allowed_token_ids),
    }
    filter_of = next((name for name, used in filters.items() if used), "")
    if teacher.model.path and teacher.top_k and filter_of and cfg.trainer.algorithm.filter_logprobs:
        yield (
            f"trainer.teacher.top_k={teacher.top_k} compares full distributions, and generator.sampling_params."
            f"{filter_of}={written(vars(sampling)[filter_of])} removes different tokens for policy and "
            f"teacher: remove one of the two, or set trainer.algorithm.filter_logprobs=false"
        )
    estimator = cfg.trainer.algorithm.advantage_estimator
    if not teacher.model.path and not ADVANTAGE_ESTIMATORS.about(estimator).can["rewarded"]:
        yield (
            f"trainer.algorithm.advantage_estimator={estimator} learns nothing from rewards, and there is no teacher "
            f"(every advantage would be 0): set trainer.teacher.model.path, or choose another estimator"
        )


def _check_optimizer(role: str, section: PolicyConfig | CriticConfig, tensor: int) -> Iterator[str]:
    name = f"{role}.optimizer_config"
    optimizer = section.optimizer_config
    if len(optimizer.adam_betas) != 2:
        yield f"{name}.adam_betas has {len(optimizer.adam_betas)} entries: AdamW takes two, [0.9,0.999]"
    if optimizer.name != "muon" and optimizer.muon_momentum != OptimizerConfig().muon_momentum:
        yield f"{name}.muon_momentum={optimizer.muon_momentum} has no effect with {name}.name={optimizer.name}"
    if optimizer.name == "muon" and optimizer.bf16_stochastic_round:
        yield (
            f"{name}.bf16_stochastic_round=true rounds AdamW's steps, and {name}.name=muon turns float32 masters: "
            f"choose adamw or adamw_8bit, or remove it"
        )
    if optimizer.num_warmup_steps and optimizer.warmup_ratio:
        yield (
            f"{name}.num_warmup_steps={optimizer.num_warmup_steps} and {name}.warmup_ratio={optimizer.warmup_ratio} "
            f"both say how long the warm-up is: set one of them to 0"
        )
    allowed = SCHEDULES[optimizer.scheduler]
    arguments = optimizer.scheduler_kwargs
    for word in arguments:
        if word not in allowed:
            if allowed:
                reason = unknown("setting", str(word), allowed)
            else:
                reason = f"{optimizer.scheduler} takes none"
            yield f"{name}.scheduler_kwargs.{word} has no effect with {name}.scheduler={optimizer.scheduler}: {reason}"
    if optimizer.scheduler.endswith("_with_min_lr") and ("min_lr" in arguments) == (
        "min_lr_rate" in arguments
    ):
        yield (
            f"{name}.scheduler={optimizer.scheduler} needs its final rate in one form: "
            f"{name}.scheduler_kwargs={{min_lr_rate: 0.1}} (of lr) or {{min_lr: 1e-7}}"
        )
    if optimizer.scheduler == "warmup_stable_decay" and "num_decay_steps" not in arguments:
        yield f"{name}.scheduler=warmup_stable_decay needs {name}.scheduler_kwargs={{num_decay_steps: 100}}"
    if optimizer.bf16_stochastic_round and section.model.dtype == "float32":
        yield (
            f"{name}.bf16_stochastic_round=true is for weights in bfloat16, and {role}.model.dtype=float32: set that "
            f"to bfloat16, or remove it"
        )
    if tensor > 1 and optimizer.name == "adamw_8bit":
        yield (
            f"{name}.name=adamw_8bit has blocks within whole rows of matrices, and trainer.parallel.tensor={tensor} "
            f"splits them: choose adamw or muon, or leave tensor at 1"
        )


def _check_adapters(policy: PolicyConfig, tensor: int) -> Iterator[str]:
    lora = policy.lora
    if policy.optimizer_config.bf16_stochastic_round:
        yield (
            f"trainer.policy.optimizer_config.bf16_stochastic_round=true spares float32 masters of weights that "
            f"trainer.policy.lora.rank={lora.rank} freezes; adapters are float32: remove one of them"
        )
    if policy.freeze:
        yield (
            f"trainer.policy.lora.rank={lora.rank} freezes all weights but its adapters, so trainer.policy.freeze="
            f"{written(policy.freeze)} has no effect: remove it, or list layers in trainer.policy.lora.exclude_modules"
        )
    if policy.torch_compile:
        yield (
            f"trainer.policy.torch_compile=true and trainer.policy.lora.rank={lora.rank}: adapters are switched off "
            f"for the reference and for engines, and compiled layers would not see it: remove one of them"
        )
    if not lora.base_dtype:
        return
    key = f"trainer.policy.lora.base_dtype={lora.base_dtype}"  # whose numbers no other process has
    for name, value in (("sync", lora.sync), ("export", lora.export)):
        if value == "adapter":
            yield (
                f"{key} trains adapters for rounded weights, and trainer.policy.lora.{name}=adapter adds them to the "
                f"weights of the model's files: set trainer.policy.lora.{name}=merged"
            )
    if policy.cpu_offload == "parameters":
        yield (
            f"{key} stores quantized weights, which trainer.policy.cpu_offload=parameters cannot offload: "
            f"remove one of them"
        )
    if tensor > 1:
        yield f"{key} quantizes whole rows, and trainer.parallel.tensor={tensor} splits matrices: set that to 1"


#: Settings of a critic with a model of its own.
_OF_A_MODEL = (
    "trainer.critic.model.",
    "trainer.critic.gradient_checkpointing",
    "trainer.critic.reduce_gradients",
    "trainer.critic.fsdp_size",
    "trainer.critic.cpu_offload",
    "trainer.critic.threads",
    "trainer.placement.colocate_policy_critic",
    "trainer.placement.critic_num_",
)
_OF_MATRICES = tuple(
    f"trainer.critic.optimizer_config.{n}"
    for n in ("name", "bf16_stochastic_round", "muon_momentum")
)


def _check_shared_critic(cfg: Config) -> Iterator[str]:
    for setting in Keys.of(type(cfg)):
        value = attrgetter(setting.path)(cfg)
        if value in (
            setting.default,
            *([cfg.trainer.policy.model.path] if setting.name == "path" else []),
        ):
            continue
        way = f"remove it (its default is {written(setting.default)}), or set trainer.critic.backbone=own"
        if setting.path.startswith(_OF_A_MODEL):
            yield f"{setting.path}={written(value)} is of a critic's own model, and {SHARED_CRITIC} has none: {way}"
        elif setting.path in _OF_MATRICES:
            reason = f"is for matrices of a model, and {SHARED_CRITIC} trains one vector"
            yield f"{setting.path}={written(value)} {reason}: {way}"
    offload = cfg.trainer.policy.cpu_offload
    if offload == "parameters":
        yield (
            f"{SHARED_CRITIC} is a vector on the policy's device, and trainer.policy.cpu_offload={offload} keeps its "
            f"layers on the host: set trainer.policy.cpu_offload=optimizer or none, or trainer.critic.backbone=own"
        )


#: There is a reward model, by itself or among several.
REWARD = When("trainer.reward.model.path", "trainer.reward.models")

REWARD_METRIC = "reward_model"
"""The one model's own score, unscaled, among an episode's metrics; ``reward_model/<name>`` are
those of several."""
_REWARD_MODELS = "trainer.reward.models"
_NAME = re.compile(r"[A-Za-z_][\w-]*")


@dataclass
class RewardConfig(SettingsGroup):
    model: ModelConfig = field(default_factory=ModelConfig)
    models: dict[str, Any] = key({})
    """Several reward models by name, each with path, dtype, weight, mean, std and clip. Their
    rewards are added."""
    weight: float = key(1.0, when="trainer.reward.model.path")
    """Factor of the reward model's normalised output, which is added to the reward."""
    mean: float = key(0.0, when="trainer.reward.model.path")
    """Mean of the model's outputs, measured beforehand: it is subtracted from each."""
    std: float = key(1.0, above=0.0, when="trainer.reward.model.path")
    """Standard deviation of the model's outputs: the difference is divided by it."""
    clip: float = key(0.0, low=0.0, when="trainer.reward.model.path")
    """Clamp the normalised outputs to plus or minus this; 0 is off."""
    threads: int = key(0, low=0)
    """CPU threads per rank of the reward model; 0 takes as many as a policy rank has."""


@dataclass(frozen=True)
class RewardModel:
    """One entry of ``trainer.reward.models``; the keys of the one model are the same."""

    path: str = key("")
    """Hugging Face name, local folder, or module:function that makes one and returns its path."""
    dtype: str = key("auto", choices=("auto", "float32", "bfloat16"))
    """Dtype of the model's weights."""
    weight: float = key(1.0)
    """Factor of the model's normalised output in the reward."""
    mean: float = key(0.0)
    """Mean that is subtracted from the model's outputs."""
    std: float = key(1.0, above=0.0)
    """Standard deviation by which the outputs are divided after the mean is subtracted."""
    clip: float = key(0.0, low=0.0)
    """Clamp the normalised outputs to plus or minus this; 0 is off."""

    def part(self, score: float) -> float:
        """The contribution of a score to the reward."""
        plain = (score - self.mean) / self.std
        return self.weight * (min(max(plain, -self.clip), self.clip) if self.clip else plain)


def reward_models(reward: RewardConfig) -> dict[str, RewardModel]:
    """All reward models by the names of their metrics."""
    single_model = reward.model
    reward_model = RewardModel(
        single_model.path, single_model.dtype, reward.weight, reward.mean, reward.std, reward.clip
    )
    several = {
        f"{REWARD_METRIC}/{name}": RewardModel(**entry) for name, entry in reward.models.items()
    }
    return ({REWARD_METRIC: reward_model} if single_model.path else {}) | several


def check_reward_models(cfg: Config) -> Iterator[str]:
    """Entries that are wrong, and groups that are decided before their rewards are known."""
    reward = cfg.trainer.reward
    for name, entry in reward.models.items():
        where = f"{_REWARD_MODELS}.{name}"
        if not _NAME.fullmatch(str(name)):
            yield f"{where}: a reward model's name has letters, digits, _ and - only"
        elif not isinstance(entry, Mapping):
            yield f"{where} must be a mapping with path, and weight, mean, std, clip, dtype as needed, found {entry!r}"
        elif not entry.get("path"):
            yield f"{where}.path is empty: name a model for sequence classification with one label"
        else:
            problems = {
                field_name: entry_problem(RewardModel, str(field_name), value)
                for field_name, value in entry.items()
            }
            yield from (
                f"{where}.{field_name}{problem}"
                for field_name, problem in problems.items()
                if problem
            )
    if REWARD(cfg) and cfg.trainer.algorithm.dynamic_sampling.early_end:
        if reward.model.path:
            models_text = f"model.path={reward.model.path}"
        else:
            models_text = f"models={written(reward.models)}"
        yield (
            f"trainer.algorithm.dynamic_sampling.early_end=true decides a group while it is played, and "
            f"trainer.reward.{models_text} scores it afterwards: remove one of them"
        )
