"""Axes of the policy's ranks that do not go together.

Invariant: what a model's own numbers say (heads, experts, kinds of layers) is asked where its folder is known.
"""

from __future__ import annotations

from collections.abc import Iterator

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
