"""Which ranks there are, on which devices, and what they divide among them.

Invariant: what a model's own numbers say (heads, experts, kinds of layers) is asked where its folder is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyasync.config.keys import When, key
from skyasync.config.schema.algorithm import CRITIC, KL
from skyasync.config.schema.models import TEACHER
from skyasync.config.schema.reward_models import REWARD

if TYPE_CHECKING:
    from skyasync.config.schema import Config


_OWN_REF = When("trainer.placement.colocate_policy_ref=false")
_OWN_CRITIC = When("trainer.placement.colocate_policy_critic=false")
_OWN_TEACHER = When("trainer.placement.colocate_policy_teacher=false")


#: Roles on devices of their own.
OWN_DEVICES = (_OWN_REF, _OWN_CRITIC, _OWN_TEACHER)


@dataclass
class ParallelConfig:
    context: int = key(1, low=1)
    """Ranks that split each sequence of the same rows, for long ones (Ulysses)."""
    context_kind: str = key("ulysses", choices=("ulysses", "ring"))
    """How they attend: ulysses exchanges the sequence dimension for heads, which the axis must divide; ring passes keys
    and values from rank to rank, for any number of heads (no shared prefixes, no windows; on a GPU in bfloat16 it has
    not been run)."""
    tensor: int = key(1, low=1)
    """Ranks that split the matrices of the same rows, by transformers' plan for the model, and divide a mixture's
    experts."""


@dataclass
class PlacementConfig:
    colocate_all: bool = key(False)
    """Engines and workers share devices, taking turns (synchronous plan only)."""
    colocate_policy_ref: bool = key(True, when=KL)
    """The reference model shares the policy's devices."""
    policy_num_nodes: int = key(1, low=1)
    """Nodes for the policy."""
    policy_num_gpus_per_node: int = key(1, low=1)
    """Policy ranks per node: one per GPU, or per CPU process without GPUs."""
    ref_num_nodes: int = key(1, low=1, when=_OWN_REF)
    """Nodes for the reference model."""
    ref_num_gpus_per_node: int = key(1, low=1, when=_OWN_REF)
    """Reference ranks per node."""
    colocate_policy_critic: bool = key(True, when=CRITIC)
    """The critic shares the policy's devices; with colocate_all it does in any case."""
    critic_num_nodes: int = key(1, low=1, when=_OWN_CRITIC)
    """Nodes for the critic."""
    critic_num_gpus_per_node: int = key(1, low=1, when=_OWN_CRITIC)
    """Critic ranks per node."""
    reward_num_nodes: int = key(1, low=1, when=REWARD)
    """Nodes for the reward model, whose devices are its own."""
    reward_num_gpus_per_node: int = key(1, low=1, when=REWARD)
    """Reward model ranks per node."""
    colocate_policy_teacher: bool = key(True, when=TEACHER)
    """The teacher shares the policy's devices."""
    teacher_num_nodes: int = key(1, low=1, when=_OWN_TEACHER)
    """Nodes for the teacher."""
    teacher_num_gpus_per_node: int = key(1, low=1, when=_OWN_TEACHER)
    """Teacher ranks per node."""
    timeout_s: float = key(180.0, above=0.0)
    """Seconds to wait for the cluster to grant the devices."""


def check_placement(cfg: Config) -> Iterator[str]:
    """Axes that are not the ranks there are, or that nothing can be divided over."""
    parallel, placement = cfg.trainer.parallel, cfg.trainer.placement
    ranks = placement.policy_num_nodes * placement.policy_num_gpus_per_node
    sharing = parallel.context * parallel.tensor
    placed = (
        f"trainer.placement.policy_num_nodes={placement.policy_num_nodes} times "
        f"trainer.placement.policy_num_gpus_per_node={placement.policy_num_gpus_per_node}"
    )
    axes = f"trainer.parallel.context={parallel.context} times trainer.parallel.tensor={parallel.tensor}"
    if ranks % sharing:
        more = -(-ranks // sharing) * sharing
        yield f"{axes} does not divide the {ranks} ranks of {placed}: make them {more}, or the axes divisors of {ranks}"
    if parallel.context_kind != "ulysses" and parallel.context == 1:
        yield (
            f"trainer.parallel.context_kind={parallel.context_kind} has no effect with trainer.parallel.context=1, "
            f"which splits no sequences: raise it, or leave the kind at ulysses"
        )
    split = next((f"{name}={size}" for name, size in (("context", parallel.context), ("tensor", parallel.tensor))
                  if size > 1), "")  # fmt: skip
    if split and cfg.trainer.policy.torch_compile:
        yield (
            f"trainer.policy.torch_compile=true does not compile what trainer.parallel.{split} divides: remove one of "
            f"them"
        )
    trainer = cfg.trainer
    yield from _check_groups(cfg, "policy", trainer.policy.fsdp_size, ranks, beside=True)
    if CRITIC(cfg):
        beside = placement.colocate_policy_critic or placement.colocate_all
        own = placement.critic_num_nodes * placement.critic_num_gpus_per_node
        yield from _check_groups(cfg, "critic", trainer.critic.fsdp_size, ranks if beside else own, beside=beside)
    if KL(cfg):
        beside = placement.colocate_policy_ref
        own = placement.ref_num_nodes * placement.ref_num_gpus_per_node
        yield from _check_groups(cfg, "ref", trainer.ref.fsdp_size, ranks if beside else own, beside=beside)


def _check_groups(cfg: Config, section: str, size: int, ranks: int, *, beside: bool) -> Iterator[str]:
    """``beside``: its ranks are the policy's in number, and divided like them."""
    key = f"trainer.{section}.fsdp_size={size}"
    if size and ranks % size:
        fitting = [str(n) for n in range(1, ranks + 1) if ranks % n == 0]
        yield (
            f"{key} makes no groups of equal size of {ranks} ranks (trainer.placement): it is one of "
            f"{', '.join(fitting)}, or 0 for all of them"
        )
    parallel = cfg.trainer.parallel
    for name, axis in (("context", parallel.context), ("tensor", parallel.tensor)):
        if size and beside and axis > 1:
            yield f"{key} and trainer.parallel.{name}={axis} both cut the ranks into groups: choose one"
            return
