"""Checks of the tensors that a vLLM worker computes with, in any layout of its kernels.

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

# Of each linear layer, per update: a product that costs about as much as one decoded token.
COLUMNS = 8


class LayerCheck:
    """Checks a model after each update.

    Args:
        heads: output layers and the names of the tensors that they are tied to.
    """

    def __init__(self, model: nn.Module, heads: Sequence[tuple[nn.Module, str]]) -> None:
        self._modules = dict(model.named_modules())
        self._fused_names: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        self._heads = heads
        # Multimodal models name modules otherwise than their checkpoints name tensors.
        self._mapper: Any = None
        if supports_multimodal(model):
            self._mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._checked_names: set[str] = set()  # tensors for which a check has held
        self._columns: dict[nn.Module, Columns | None] = {}  # of this update
        self._updates = 0
        self.unproven: list[str] = []  # tensors of the last update for which no check has ever held

    def check(self, weights: Mapping[str, Tensor], digests: Mapping[str, str]) -> None:
        """Raises WeightSyncError naming the tensors that are not what was sent."""
        if self._mapper is not None:
            weights = dict(self._mapper.apply(weights.items()))
            digests = dict(self._mapper.apply(digests.items()))
        try:
            results = dict(self._results(weights, digests))
        finally:
            self._columns.clear()  # of these weights
        equal = {name for name, is_equal in results.items() if is_equal}
        # A check that has never held may be of a layout that it cannot read: that is no error.
        differing = [name for name in results if name in self._checked_names and name not in equal]
        refuse(differing, "the vLLM engine holds")
        self._checked_names |= equal
        self.unproven = [name for name in {**weights, **results} if name not in self._checked_names]
        self._updates += 1

    def _results(
        self, weights: Mapping[str, Tensor], digests: Mapping[str, str]
    ) -> Iterator[tuple[str, bool]]:
        """By name, whether a tensor is there as it was sent; none that cannot be looked up."""
        for name, full_tensor in weights.items():
            module, start_row = self._place(name, weights)
            if module is None:
                continue
            sent = own_part(module, name, full_tensor)
            if sent is None:
                continue
            if isinstance(module, LinearBase | ParallelLMHead) and name.endswith(".weight"):
                yield name, self._columns_are(module, start_row, sent)
                continue
            leaf = name.rpartition(".")[2]
            current = module._parameters.get(leaf, module._buffers.get(leaf))
            if current is None:
                continue
            # the trainer's digest is of the full tensor
            sent_digest = digests[name] if sent is full_tensor else digest(sent)
            rows = current[start_row : start_row + len(sent)]
            yield name, holds(rows, sent, sent_digest)
        for head, name in self._heads:
            sent = own_part(head, name, weights[name])
            equal = sent is not None and self._columns_are(head, 0, sent)
            yield f"the output layer tied to {name}", equal

    def _place(self, name: str, weights: Mapping[str, Tensor]) -> tuple[nn.Module | None, int]:
        """The module that has a tensor, perhaps fused with others, and the tensor's start row."""
        path, _, leaf = name.rpartition(".")
        if path in self._modules:
            return self._modules[path], 0
        parent, _, layer_name = path.rpartition(".")
        for fused_name, layer_names in self._fused_names.items():
            module = self._modules.get(f"{parent}.{fused_name}")
            if layer_name not in layer_names or module is None:
                continue
            # The fused layers lie in the order of their names: q, k, v.
            start_row = 0
            for preceding in layer_names[: layer_names.index(layer_name)]:
                tensor_name = f"{parent}.{preceding}.{leaf}"
                if tensor_name in weights:
                    shard = own_part(module, tensor_name, weights[tensor_name])
                    if shard is not None:
                        start_row += len(shard)
            return module, start_row
        return None, 0

    def _columns_are(self, module: nn.Module, start_row: int, sent: Tensor) -> bool:
        """Whether a linear layer has the next columns of ``sent``, ``[out, in]``.

        Args:
            start_row: the first of the layer's outputs that are of ``sent``.
        """
        if sent.dim() != 2:
            return False
        # Once for all tensors of a fused layer.
        if module not in self._columns:
            self._columns[module] = self._next_columns(module, sent.shape[1])
        columns = self._columns[module]
        if columns is None or sent.shape[1] != columns.inputs:
            return False
        # [columns, out]
        sent_columns = sent[:, columns.start : columns.stop].T.to(columns.values.dtype)
        current = columns.values[:, start_row : start_row + len(sent)]
        return torch.equal(current, sent_columns)

    @torch.no_grad()
    def _next_columns(self, module: nn.Module, inputs: int) -> Columns | None:
        """The next columns of all outputs of a linear layer; None if a product is not columns.

        Args:
            inputs: of the tensor that was sent.
        """
        layer: Any = module
        if isinstance(module, ParallelLMHead):
            layer_inputs = layer.embedding_dim
        elif isinstance(module, RowParallelLinear):
            layer_inputs = layer.input_size_per_partition
        else:
            layer_inputs = layer.input_size
        is_plain = isinstance(
            layer.quant_method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod
        )
        if not is_plain or inputs != layer_inputs:
            return None
        start = self._updates * COLUMNS % inputs
        stop = min(start + COLUMNS, inputs)
        dtype = layer.weight.dtype
        device = layer.weight.device
        # Rows ``start`` to ``stop`` of the identity: [columns, inputs]
        identity_rows = torch.zeros(stop - start, inputs, dtype=dtype, device=device)
        identity_rows[torch.arange(stop - start), torch.arange(start, stop)] = 1.0
        values = layer.quant_method.apply(layer, identity_rows)  # [columns, out]
        return Columns(inputs, start, stop, values.cpu())


class Columns(NamedTuple):
    """Columns ``start`` to ``stop`` of a linear layer's ``inputs``.

    ``values`` are ``[stop - start, out]``.
    """

    inputs: int
    start: int
    stop: int
    values: Tensor


def own_part(module: nn.Module, name: str, full_tensor: Tensor) -> Tensor | None:
    """This rank's part of a layer's tensor; None if it is not one slice of it.

    Args:
        name: of the tensor, ``....k_proj.weight``.
    """
    layer: Any = module
    if isinstance(module, VocabParallelEmbedding) and layer.tp_size > 1:
        vocabulary = layer.shard_indices
        return full_tensor[vocabulary.org_vocab_start_index : vocabulary.org_vocab_end_index]
    if isinstance(module, RowParallelLinear) and name.endswith(".weight"):
        return _slice(full_tensor, 1, layer.tp_rank, layer.tp_size)
    if isinstance(module, ColumnParallelLinear):
        copies = 1  # ranks that have the same keys and values
        layer_name = name.split(".")[-2]
        if isinstance(module, QKVParallelLinear) and layer_name in ("k_proj", "v_proj"):
            copies = layer.num_kv_head_replicas
        return _slice(full_tensor, 0, layer.tp_rank // copies, layer.tp_size // copies)
    return full_tensor


def _slice(full_tensor: Tensor, dim: int, rank: int, ranks: int) -> Tensor | None:
    if ranks == 1:
        return full_tensor  # the tensor itself, by which a caller sees that its digest holds
    if full_tensor.dim() <= dim or full_tensor.shape[dim] % ranks:
        return None
    size = full_tensor.shape[dim] // ranks
    return full_tensor.narrow(dim, rank * size, size)
