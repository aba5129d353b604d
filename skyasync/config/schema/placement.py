"""Which ranks there are, on which devices, and what they divide among them.

Invariant: what a model's own numbers say (heads, experts, kinds of layers) is asked where its
folder is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from skyasync.config.frozen import SettingsGroup
from skyasync.config.keys import When, key
from skyasync.config.schema.algorithm import CRITIC, KL
from skyasync.config.schema.models import REWARD, TEACHER

if TYPE_CHECKING:
    from skyasync.config.schema import Config


_OWN_REF = When("trainer.placement.colocate_policy_ref=false")
_OWN_CRITIC = When("trainer.placement.colocate_policy_critic=false")
_OWN_TEACHER = When("trainer.placement.colocate_policy_teacher=false")


#: Roles on devices of their own.
OWN_DEVICES = (_OWN_REF, _OWN_CRITIC, _OWN_TEACHER)


@dataclass
class ParallelConfig(SettingsGroup):
    pipeline: int = key(1, low=1)
    """Number of pipeline stages: consecutive layers on separate ranks, which compute micro-batches
    in turn (1F1B)."""
    context: int = key(1, low=1)
    """Number of ranks that divide each sequence, for long sequences."""
    context_kind: str = key("ulysses", choices=("ulysses", "ring"))
    """Attention under trainer.parallel.context. ulysses exchanges the sequence dimension for heads;
    the ranks must divide the heads. ring passes keys and values from rank to rank, for any number
    of heads (no shared prefixes, no sliding windows; not run on GPUs)."""
    expert: int = key(0, low=0)
    """Number of ranks of the data dimension that divide the experts and exchange tokens
    (all-to-all); 0 leaves whole experts to trainer.parallel.tensor."""
    tensor: int = key(1, low=1)
    """Number of ranks that divide the matrices of each layer, by transformers' plan for the model,
    and whole experts."""


@dataclass
class PlacementConfig(SettingsGroup):
    colocate_all: bool = key(False, when="not generator.engines")
    """Engines and workers use the same devices in turn (plans sync and colocated_async)."""
    colocate_policy_ref: bool = key(True, when=KL)
    """The reference model shares the policy's devices."""
    policy_num_nodes: int = key(1, low=1)
    """Nodes for the policy."""
    policy_num_gpus_per_node: int = key(1, low=1)
    """Policy ranks per node: one per GPU, or processes on CPUs if there are no GPUs."""
    ref_num_nodes: int = key(1, low=1, when=_OWN_REF)
    """Nodes for the reference model."""
    ref_num_gpus_per_node: int = key(1, low=1, when=_OWN_REF)
    """Reference ranks per node."""
    colocate_policy_critic: bool = key(True, when=CRITIC)
    """The critic shares the policy's devices; always the case with colocate_all."""
    critic_num_nodes: int = key(1, low=1, when=_OWN_CRITIC)
    """Nodes for the critic."""
    critic_num_gpus_per_node: int = key(1, low=1, when=_OWN_CRITIC)
    """Critic ranks per node."""
    reward_num_nodes: int = key(1, low=1, when=REWARD)
    """Nodes for the reward model, which has its own devices."""
    reward_num_gpus_per_node: int = key(1, low=1, when=REWARD)
    """Reward model ranks per node."""
    colocate_policy_teacher: bool = key(True, when=TEACHER)
    """The teacher shares the policy's devices."""
    teacher_num_nodes: int = key(1, low=1, when=_OWN_TEACHER)
    """Nodes for the teacher."""
    teacher_num_gpus_per_node: int = key(1, low=1, when=_OWN_TEACHER)
    """Teacher ranks per node."""
    timeout_s: float = key(180.0, above=0.0)
    """Maximum number of seconds to wait for the devices of the cluster."""

    @property
    def policy_ranks(self) -> int:
        """Ranks of the policy on all nodes."""
        return self.policy_num_nodes * self.policy_num_gpus_per_node


def check_placement(cfg: Config) -> Iterator[str]:
    """Mesh dimensions that do not multiply to the ranks, or that nothing can be divided over."""
    trainer = cfg.trainer
    parallel = cfg.trainer.parallel
    placement = cfg.trainer.placement
    ranks = placement.policy_ranks
    sizes = {name: vars(parallel)[name] for name in ("pipeline", "context", "tensor")}
    if ranks % (sharing := prod(sizes.values())):
        product = " times ".join(
            f"trainer.parallel.{n}={v}" for n, v in sizes.items() if v > 1 or n != "pipeline"
        )
        yield (
            f"{product} does not divide the {ranks} ranks of "
            f"trainer.placement.policy_num_nodes={placement.policy_num_nodes} times "
            f"trainer.placement.policy_num_gpus_per_node={placement.policy_num_gpus_per_node}: make them "
            f"{-(-ranks // sharing) * sharing}, or the axes divisors of {ranks}"
        )
    if parallel.context_kind != "ulysses" and parallel.context == 1:
        yield (
            f"trainer.parallel.context_kind={parallel.context_kind} has no effect with trainer.parallel.context=1, "
            f"which splits no sequences: raise it, or leave the kind at ulysses"
        )
    if parallel.pipeline > 1:
        yield from _check_pipeline(cfg)
    if parallel.expert > 1:
        yield from _check_expert(cfg, ranks)
    dimensions = {**sizes, "expert": parallel.expert}
    split = [f"trainer.parallel.{name}={v}" for name, v in dimensions.items() if v > 1]
    if split and trainer.policy.torch_compile:
        yield f"trainer.policy.torch_compile=true does not compile what {split[0]} divides: remove one of them"

    own_critic = placement.critic_num_nodes * placement.critic_num_gpus_per_node
    own_ref = placement.ref_num_nodes * placement.ref_num_gpus_per_node
    # Per role: the size of its groups, whether it shares the policy's ranks, the count of its own ranks.
    groups = [("policy", trainer.policy.fsdp_size, True, ranks)]
    if CRITIC(cfg):
        colocated = placement.colocate_policy_critic or placement.colocate_all
        groups.append(("critic", trainer.critic.fsdp_size, colocated, own_critic))
    if KL(cfg):
        groups.append(("ref", trainer.ref.fsdp_size, placement.colocate_policy_ref, own_ref))
    for role, size, colocated, separate_count in groups:
        key = f"trainer.{role}.fsdp_size={size}"
        count = ranks if colocated else separate_count
        if size and count % size:
            fitting = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            yield (
                f"{key} makes no groups of equal size of {count} ranks (trainer.placement): it is one of {fitting}, or "
                f"0 for all of them"
            )
        if size and colocated and split:
            yield f"{key} and {split[0]} both cut the ranks into groups: choose one"


def _check_pipeline(cfg: Config) -> Iterator[str]:
    """Settings that pipeline stages do not support; further checks are in
    ``skyasync.models.parallel.pipeline``."""
    trainer = cfg.trainer
    policy = cfg.trainer.policy
    of_critic = CRITIC(cfg) and (
        trainer.placement.colocate_policy_critic or trainer.placement.colocate_all
    )
    refused = {
        f"trainer.policy.lora.rank={policy.lora.rank}": (
            policy.lora.rank,
            "puts adapters on all layers at once",
        ),
        f"trainer.policy.router_replay={policy.router_replay}": (
            policy.router_replay != "none",
            "has one micro-batch's experts, and stages compute several at once",
        ),
        f"trainer.critic.backbone={trainer.critic.backbone}": (
            CRITIC(cfg) and trainer.critic.backbone == "shared",
            "trains a head that only one stage has",
        ),
    }
    for role, section, used in (("policy", policy, True), ("critic", trainer.critic, of_critic)):
        refused[f"trainer.{role}.optimizer_config.bf16_stochastic_round=true"] = (
            used and section.optimizer_config.bf16_stochastic_round,
            "rounds the two copies of tied embeddings, of the first and the last stage, apart",
        )
    for setting, (is_set, reason) in refused.items():
        if is_set:
            pipeline = f"trainer.parallel.pipeline={trainer.parallel.pipeline}"
            yield f"{setting} {reason}, so it does not go with {pipeline}: remove one of them"


def _check_expert(cfg: Config, ranks: int) -> Iterator[str]:
    """Settings that expert parallelism does not support."""
    parallel = cfg.trainer.parallel
    policy = cfg.trainer.policy
    setting = f"trainer.parallel.expert={parallel.expert}"
    for name in ("pipeline", "context", "tensor"):
        size = vars(parallel)[name]
        if size > 1:
            yield (
                f"{setting} sends tokens only between ranks of the data dimension, and trainer.parallel.{name}={size} "
                f"has not been tried with it: set {setting.partition('=')[0]}=0, or the other to 1"
            )
    if ranks % parallel.expert:
        yield f"{setting} does not divide the {ranks} ranks of trainer.placement: choose a divisor of {ranks}"
    refused = {
        f"trainer.policy.lora.rank={policy.lora.rank}": policy.lora.rank,
        "trainer.policy.optimizer_config.name=adamw_8bit": policy.optimizer_config.name
        == "adamw_8bit",
        "trainer.policy.optimizer_config.bf16_stochastic_round=true": policy.optimizer_config.bf16_stochastic_round,
    }
    for other_setting, is_set in refused.items():
        if is_set:
            yield f"{other_setting} goes by rows of whole matrices or frozen ones, and {setting} divides experts: remove one"
