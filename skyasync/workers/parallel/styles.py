"""Ways to split a module over the tensor axis which transformers lacks, or has for inference only.

Invariant: the module answers on every rank what it would answer whole, and its gradients are those of the whole, over
any number of micro-batches. Every part of a weight is one piece of it without gaps, so that checkpoints of shards can
be read by any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    MoeExpertsParallel,
    TensorParallelLayer,
    _use_local_dtensor_params,
)

from skyasync.workers.parallel.collectives import spread, summed

NORM, EMBEDDING, EXPERTS = "skyasync_norm_of_own_heads", "skyasync_vocabulary_embedding", "skyasync_whole_experts"


class NormOfOwnHeads(TensorParallelLayer):
    """A norm that each rank applies to its own heads, with weights that all have.

    The library's adds up gradients in a hook, once per backward pass, what has been added up before included: with
    several micro-batches that is too much.
    """

    @contextmanager
    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
        own = dict(module._parameters)
        shared = {name: spread(p, mesh.get_group()) for name, p in own.items() if p is not None}
        module._parameters.update(shared)  # type: ignore[arg-type]
        try:
            yield
        finally:
            module._parameters.update(own)


class VocabularyEmbedding(TensorParallelLayer):
    """Embeddings of which each rank holds those of a part of the vocabulary, as a head that is tied to them does."""

    def shard_param(self, module: nn.Embedding, param: str, mesh: DeviceMesh) -> None:
        whole = module._parameters[param]
        assert whole is not None
        split = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        module._parameters[param] = nn.Parameter(split, requires_grad=whole.requires_grad)

    def install_forward(self, module: nn.Embedding, mesh: DeviceMesh) -> nn.Embedding:
        look_up, group = module.forward, mesh.get_group()
        size = module.num_embeddings // mesh.size()
        first = size * mesh.get_local_rank()
        padding = module.padding_idx
        if padding is not None:
            module.padding_idx = padding - first if first <= padding < first + size else None

        def forward(tokens: Tensor) -> Tensor:
            own = tokens - first
            others = (own < 0) | (own >= size)
            with _use_local_dtensor_params(module):
                found = look_up(own.masked_fill(others, 0))
            return summed(found.masked_fill(others[..., None], 0.0), group)

        module.forward = forward  # type: ignore[method-assign, assignment]
        return module


class WholeExperts(MoeExpertsParallel):
    """Experts of which each rank has some, whole; all ranks see all tokens, and their answers are added up.

    A token's experts on other ranks become the number behind the last of this rank's, which the library's experts leave
    out.
    """

    def transform_inputs_pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh, **options: object
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden, chosen, weights, *more = args
        group, own = mesh.get_group(), int(module.num_experts)  # type: ignore[arg-type]
        others = torch.div(chosen, own, rounding_mode="floor") != mesh.get_local_rank()
        weights = spread(weights, group).masked_fill(others, 0.0)
        return (spread(hidden, group), (chosen % own).masked_fill(others, own), weights, *more), kwargs

    def transform_output_post_forward(
        self, module: nn.Module, output: Tensor, mesh: DeviceMesh, source: object = None
    ) -> Tensor:
        return summed(output, mesh.get_group())


for _name, _style in ((NORM, NormOfOwnHeads()), (EMBEDDING, VocabularyEmbedding()), (EXPERTS, WholeExperts())):
    ALL_PARALLEL_STYLES.register(_name, _style)  # type: ignore[arg-type]
