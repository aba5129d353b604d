"""What a vLLM worker really holds, tensor by tensor, whatever layout its kernels have packed it into.

Invariant: a check that has held once for a tensor must hold at every later update, or the update is an error. A
tensor for which it has never held is in another layout (sharded, transposed, quantised) and left to the probe.

A packed linear layer cannot be read, but it can be asked: its product with rows of the identity is columns of its
weight, exactly, because 1 * w + 0 + ... is w in every dtype. Each update asks every layer once for the next ``COLUMNS``
of its columns, all parts of a fused one together, which costs about as much as decoding one token for as many requests:
each weight is read once. So, of a tensor that is checked:

| fault                                         | is found                                                          |
|-----------------------------------------------|-------------------------------------------------------------------|
| it is not what was sent (stale, swapped)      | at this update, if a column asked for differs; certainly by the   |
|                                               | update that comes round to one that does (input size / 8 updates) |
| an output layer's packed copy left behind     | the same                                                          |
| norms, biases and embeddings, which are whole | at this update, down to the bit                                   |

An optimizer's step changes nearly every element in float32, and in bfloat16 about one in a hundred: a stale layer has
thousands of elements among those asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from skyasync.weight_sync.digests import holds, refuse

COLUMNS = 8  # of each linear layer, per update


class HeldWeights:
    """Checks a model after each update.

    Args:
        heads: output layers and the names of the tensors that they are tied to.
    """

    def __init__(self, model: nn.Module, heads: Sequence[tuple[nn.Module, str]]) -> None:
        self._modules = dict(model.named_modules())
        self._parts: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        self._heads = heads
        self._checked: set[str] = set()  # tensors that have been found right
        self._asked: dict[nn.Module, Columns | None] = {}  # in this update
        self._updates = 0

    def check(self, weights: Mapping[str, Tensor], digests: Mapping[str, str]) -> None:
        """Raises WeightSyncError naming the tensors that are not what was sent."""
        try:
            found = dict(self._answers(weights, digests))
        finally:
            self._asked.clear()
        refuse([name for name in found if name in self._checked and not found[name]], "the vLLM engine holds")
        self._checked.update(name for name, right in found.items() if right)
        self._updates += 1

    def _answers(self, weights: Mapping[str, Tensor], digests: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
        """By name, whether what was sent is there; nothing for what cannot be looked up."""
        for name, sent in weights.items():
            module, first = self._place(name, weights)
            if isinstance(module, LinearBase | ParallelLMHead) and name.endswith(".weight"):
                yield name, self._columns_are(module, first, sent)
            elif module is not None:
                held = getattr(module, name.rpartition(".")[2], None)
                if isinstance(held, Tensor):
                    yield name, holds(held[first : first + len(sent)], sent, digests[name])
        for head, name in self._heads:
            yield f"the output layer tied to {name}", self._columns_are(head, 0, weights[name])

    def _place(self, name: str, weights: Mapping[str, Tensor]) -> tuple[nn.Module | None, int]:
        """The module that holds a tensor, perhaps fused with its neighbours, and the tensor's first row in it."""
        path, _, leaf = name.rpartition(".")
        if path in self._modules:
            return self._modules[path], 0
        parent, _, part = path.rpartition(".")
        for fused, parts in self._parts.items():
            if part in parts and f"{parent}.{fused}" in self._modules:
                before = [weights.get(f"{parent}.{other}.{leaf}") for other in parts[: parts.index(part)]]
                return self._modules[f"{parent}.{fused}"], sum(len(w) for w in before if w is not None)
        return None, 0

    def _columns_are(self, module: nn.Module, first: int, sent: Tensor) -> bool:
        """Whether a linear layer has the next columns of ``sent``, ``[out, in]``, at its outputs from ``first`` on."""
        if module not in self._asked:
            self._asked[module] = self._ask(module)
        asked = self._asked[module]
        if asked is None or sent.dim() != 2 or sent.shape[1] != asked.inputs:
            return False
        columns = sent[:, asked.start : asked.stop].T.to(asked.values.dtype)
        return torch.equal(asked.values[:, first : first + len(sent)], columns)

    @torch.no_grad()
    def _ask(self, module: nn.Module) -> Columns | None:
        """The next columns of a linear layer, of all its outputs; None of one that computes otherwise."""
        layer: Any = module
        known = isinstance(layer.quant_method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
        if not known or layer.tp_size > 1:
            return None
        inputs = layer.embedding_dim if isinstance(layer, ParallelLMHead) else layer.input_size
        start = self._updates * COLUMNS % inputs
        stop = min(start + COLUMNS, inputs)
        rows = _unit_rows(start, stop, inputs, like=layer.weight)
        return Columns(inputs, start, stop, layer.quant_method.apply(layer, rows).cpu())


class Columns(NamedTuple):
    """Some of a linear layer: ``start`` to ``stop`` of its ``inputs``; ``values`` are ``[stop - start, out]``."""

    inputs: int
    start: int
    stop: int
    values: Tensor


def _unit_rows(start: int, stop: int, size: int, *, like: Tensor) -> Tensor:
    """Rows ``start`` to ``stop`` of the identity, ``[stop - start, size]``; ``like``: of this dtype and device."""
    rows = torch.zeros(stop - start, size, dtype=like.dtype, device=like.device)
    rows[torch.arange(stop - start), torch.arange(start, stop)] = 1.0
    return rows
