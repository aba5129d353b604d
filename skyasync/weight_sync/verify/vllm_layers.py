"""What a vLLM worker computes with, tensor by tensor, whatever layout its kernels have packed it
into.

Invariant: a check that has held once for a tensor must hold at every later update, or the update is
an error. A tensor for which it has never held is in another layout (quantised, a layer of experts,
transposed) and named by ``unproven``: the verification prompts are then scored after every sync.

A packed linear layer cannot be read, but its product with rows of the identity is columns of its
weight, exactly: 1 * w + 0 + ... is w in every dtype. Each update computes the next ``COLUMNS``
columns of every layer once, for all parts of a fused one together. That costs about as much as
decoding one token for as many requests: each weight is read once. Of several ranks each is compared
with the part that vLLM's own loaders give it, if that is one slice of the tensor; another layer is
``unproven``.

Of a tensor that is checked:

| fault                                         | is found                                                          |
|-----------------------------------------------|-------------------------------------------------------------------|
| it is not what was sent (stale, swapped)      | at this update, if a computed column differs; certainly by the    |
|                                               | update that comes to one that does (input size / 8 updates)       |
| an output layer's packed copy left behind     | the same                                                          |
| norms, biases and embeddings, which are whole | at this update, byte by byte                                      |

An optimizer's step changes nearly every element in float32, and in bfloat16 about one in a hundred:
a stale layer has thousands of elements among the computed columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.interfaces import supports_multimodal

from skyasync.weight_sync.tensors import digest, holds, refuse

COLUMNS = 8  # of each linear layer, per update


class LayerCheck:
    """Checks a model after each update.

    Args:
        heads: output layers and the names of the tensors that they are tied to.
    """

    def __init__(self, model: nn.Module, heads: Sequence[tuple[nn.Module, str]]) -> None:
        self._modules = dict(model.named_modules())
        self._parts: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        self._heads = heads
        self._mapper: Any = (
            getattr(model, "hf_to_vllm_mapper", None) if supports_multimodal(model) else None
        )
        self._checked: set[str] = set()  # tensors for which a check has held
        self._columns: dict[nn.Module, Columns | None] = {}  # of this update
        self._updates = 0
        self.unproven: list[str] = []  # tensors of the last update for which no check has ever held

    def check(self, weights: Mapping[str, Tensor], digests: Mapping[str, str]) -> None:
        """Raises WeightSyncError naming the tensors that are not what was sent."""
        if self._mapper is not None:
            weights, digests = (
                dict(self._mapper.apply(each.items())) for each in (weights, digests)
            )
        try:
            results = dict(self._results(weights, digests))
        finally:
            self._columns.clear()
        refuse(
            [name for name in results if name in self._checked and not results[name]],
            "the vLLM engine holds",
        )
        self._checked.update(name for name, right in results.items() if right)
        self.unproven = [name for name in {**weights, **results} if name not in self._checked]
        self._updates += 1

    def _results(
        self, weights: Mapping[str, Tensor], digests: Mapping[str, str]
    ) -> Iterator[tuple[str, bool]]:
        """By name, whether what was sent is there; nothing for what cannot be looked up."""
        for name, whole in weights.items():
            module, first = self._place(name, weights)
            if module is None:
                sent = None
            else:
                sent = own_part(module, name, whole)
            if module is None or sent is None:
                continue
            if isinstance(module, LinearBase | ParallelLMHead) and name.endswith(".weight"):
                yield name, self._columns_are(module, first, sent)
            else:
                leaf = name.rpartition(".")[2]
                current = module._parameters.get(leaf, module._buffers.get(leaf))
                if current is not None:
                    own = current[first : first + len(sent)]
                    yield name, holds(own, sent, digests[name] if sent is whole else digest(sent))
        for head, name in self._heads:
            sent = own_part(head, name, weights[name])
            yield (
                f"the output layer tied to {name}",
                sent is not None and self._columns_are(head, 0, sent),
            )

    def _place(self, name: str, weights: Mapping[str, Tensor]) -> tuple[nn.Module | None, int]:
        """The module that holds a tensor, perhaps fused with its neighbours, and the tensor's first
        row in it."""
        path, _, leaf = name.rpartition(".")
        if path in self._modules:
            return self._modules[path], 0
        parent, _, part = path.rpartition(".")
        for fused, parts in self._parts.items():
            module = self._modules.get(f"{parent}.{fused}")
            if part in parts and module is not None:
                before = [f"{parent}.{other}.{leaf}" for other in parts[: parts.index(part)]]
                owned = [
                    own_part(module, other, weights[other]) for other in before if other in weights
                ]
                return module, sum(len(each) for each in owned if each is not None)
        return None, 0

    def _columns_are(self, module: nn.Module, first: int, sent: Tensor) -> bool:
        """Whether a linear layer has the next columns of ``sent``, ``[out, in]``, at its outputs
        from ``first`` on."""
        if sent.dim() != 2:
            return False
        if module not in self._columns:
            self._columns[module] = self._next_columns(module, sent.shape[1])
        columns = self._columns[module]
        if columns is None or sent.shape[1] != columns.inputs:
            return False
        expected = sent[:, columns.start : columns.stop].T.to(columns.values.dtype)
        return torch.equal(columns.values[:, first : first + len(sent)], expected)

    @torch.no_grad()
    def _next_columns(self, module: nn.Module, inputs: int) -> Columns | None:
        """The next columns of a linear layer, of all its outputs; None of one that computes
        otherwise.

        Args:
            inputs: how many it has, by what was sent.
        """
        layer: Any = module
        if isinstance(module, ParallelLMHead):
            own_inputs = layer.embedding_dim
        else:
            if isinstance(layer, RowParallelLinear):
                own_inputs = layer.input_size_per_partition
            else:
                own_inputs = layer.input_size
        known = isinstance(layer.quant_method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
        if not known or inputs != own_inputs:
            return None
        start = self._updates * COLUMNS % inputs
        stop = min(start + COLUMNS, inputs)
        rows = torch.zeros(
            stop - start, inputs, dtype=layer.weight.dtype, device=layer.weight.device
        )
        rows[torch.arange(stop - start), torch.arange(start, stop)] = 1.0  # of the identity
        return Columns(inputs, start, stop, layer.quant_method.apply(layer, rows).cpu())


class Columns(NamedTuple):
    """Some of a linear layer: ``start`` to ``stop`` of its ``inputs``; ``values`` are
    ``[stop - start, out]``."""

    inputs: int
    start: int
    stop: int
    values: Tensor


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
        return _slice(whole, 1, layer.tp_rank, layer.tp_size)
    if isinstance(module, ColumnParallelLinear):
        copies = 1  # ranks that have the same keys and values
        if isinstance(module, QKVParallelLinear) and name.rpartition(".")[0].rpartition(".")[2] in (
            "k_proj",
            "v_proj",
        ):
            copies = layer.num_kv_head_replicas
        return _slice(whole, 0, layer.tp_rank // copies, layer.tp_size // copies)
    return whole


def _slice(whole: Tensor, dim: int, rank: int, ranks: int) -> Tensor | None:
    if ranks == 1:
        return whole
    if whole.dim() <= dim or whole.shape[dim] % ranks:
        return None
    size = whole.shape[dim] // ranks
    return whole.narrow(dim, rank * size, size)
