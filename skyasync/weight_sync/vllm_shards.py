"""Which part of a whole tensor a rank of vLLM's tensor parallelism has.

Invariant: the part that vLLM's own loaders take for this rank, as far as it is one piece of the tensor; a layer that
divides otherwise compares as different, and is left to the probe.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding


def own_part(module: nn.Module, name: str, whole: Tensor) -> Tensor | None:
    """This rank's part of what was sent for a layer; None where it cannot be cut so.

    Args:
        name: of the tensor, ``....k_proj.weight``.
    """
    layer: Any = module
    if isinstance(module, VocabParallelEmbedding) and layer.tp_size > 1:
        own = layer.shard_indices
        return whole[own.org_vocab_start_index : own.org_vocab_end_index]
    if isinstance(module, RowParallelLinear) and name.endswith(".weight"):
        return _cut(whole, 1, layer.tp_rank, layer.tp_size)
    if isinstance(module, ColumnParallelLinear):
        return _cut(whole, 0, *_among(layer, name))
    return whole


def inputs_of(layer: LinearBase | ParallelLMHead) -> int:
    """How many inputs this rank's part of a linear layer has."""
    module: Any = layer
    if isinstance(layer, ParallelLMHead):
        return int(module.embedding_dim)
    return int(getattr(module, "input_size_per_partition", module.input_size))


def _among(layer: Any, name: str) -> tuple[int, int]:  # noqa: ANN401  (vLLM's, whose attributes its types leave out)
    """This rank's number, and of how many, where several ranks may have the same keys and values."""
    copies = 1
    if isinstance(layer, QKVParallelLinear) and name.rpartition(".")[0].rpartition(".")[2] in ("k_proj", "v_proj"):
        copies = layer.num_kv_head_replicas
    return layer.tp_rank // copies, layer.tp_size // copies


def _cut(whole: Tensor, dim: int, rank: int, ranks: int) -> Tensor | None:
    if ranks == 1:
        return whole
    if whole.dim() <= dim or whole.shape[dim] % ranks:
        return None
    size = whole.shape[dim] // ranks
    return whole.narrow(dim, rank * size, size)
