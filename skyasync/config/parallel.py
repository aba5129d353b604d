"""Axes of the policy's ranks that do not go together.

Invariant: what a model's own numbers say (heads, experts, kinds of layers) is asked where its folder is known.
"""

from __future__ import annotations

from collections.abc import Iterator

from skyasync.config.algorithm import CRITIC, KL
from skyasync.config.conditions import holds
from skyasync.config.schema import Config


def check_parallel(cfg: Config) -> Iterator[str]:
    """Axes that are not the ranks there are, or that nothing can be divided over."""
    parallel, placement = cfg.trainer.parallel, cfg.trainer.placement
    ranks = placement.policy_num_nodes * placement.policy_num_gpus_per_node
    sharing = parallel.context * parallel.tensor
    told = (
        f"trainer.placement.policy_num_nodes={placement.policy_num_nodes} times "
        f"trainer.placement.policy_num_gpus_per_node={placement.policy_num_gpus_per_node}"
    )
    axes = f"trainer.parallel.context={parallel.context} times trainer.parallel.tensor={parallel.tensor}"
    if ranks % sharing:
        more = -(-ranks // sharing) * sharing
        yield f"{axes} does not divide the {ranks} ranks of {told}: make them {more}, or the axes divisors of {ranks}"
    elif parallel.data and parallel.data * sharing != ranks:
        yield (
            f"trainer.parallel.data={parallel.data} times {axes} is {parallel.data * sharing}, and {told} is {ranks}: "
            f"set trainer.parallel.data={ranks // sharing}, or 0 for what the other axes leave"
        )
    if parallel.expert not in (0, parallel.tensor):
        yield (
            f"trainer.parallel.expert={parallel.expert} is not trainer.parallel.tensor={parallel.tensor}: experts are "
            f"divided among the ranks of the tensor axis, which see the same tokens: set trainer.parallel.expert=0, "
            f"and trainer.parallel.tensor={parallel.expert} for as many"
        )
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


def check_replicas(cfg: Config) -> Iterator[str]:
    """Groups that shard weights, of the policy and of the roles that have such a key."""
    trainer, placement = cfg.trainer, cfg.trainer.placement
    policy = placement.policy_num_nodes * placement.policy_num_gpus_per_node
    yield from _check_groups(cfg, "policy", trainer.policy.fsdp_size, policy, beside=True)
    if holds(CRITIC, cfg):
        beside = placement.colocate_policy_critic or placement.colocate_all
        own = placement.critic_num_nodes * placement.critic_num_gpus_per_node
        yield from _check_groups(cfg, "critic", trainer.critic.fsdp_size, policy if beside else own, beside=beside)
    if holds(KL, cfg):
        beside = placement.colocate_policy_ref
        own = placement.ref_num_nodes * placement.ref_num_gpus_per_node
        yield from _check_groups(cfg, "ref", trainer.ref.fsdp_size, policy if beside else own, beside=beside)


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
