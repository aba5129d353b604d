"""A meter of meta tensors: bytes of the storages that are alive at the fullest moment, and operations.

Tensors on torch's meta device have shapes and storages, but no numbers.
"""

from __future__ import annotations

import weakref
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# The place that torch's notes on extending it name; there is no other.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from skyasync.models.rank_memory import ACTIVATIONS, LOGITS

_aten: Any = torch.ops.aten


class Meter(TorchDispatchMode):
    """Counts what is computed on meta tensors while it is entered, forward and backward.

    Args:
        model: its parameters and buffers are not counted.
        vocabulary: size of the last dimension by which logits are recognized.

    Attributes:
        operations: of matrix products.
    """

    def __init__(self, model: nn.Module, vocabulary: int) -> None:
        super().__init__()
        self.operations = 0
        self._vocabulary = vocabulary
        self._live: Counter[str] = Counter()
        self._peak: Counter[str] = Counter()
        self._peak_total = 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            storage = tensor.untyped_storage()
            self._storages[id(storage)] = weakref.ref(storage)

    def take_peak(self) -> Counter[str]:
        """Bytes of the fullest moment since the previous call, by line."""
        peak = self._peak
        self._peak = self._live.copy()
        self._peak_total = self._live.total()
        return peak

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func is _aten._local_scalar_dense.default and args[0].is_meta:
            # There is no number. transformers asks whether positions follow each other: yes.
            return True if args[0].dtype == torch.bool else 0
        if func is _aten._grouped_mm.default:
            result: Any = _grouped_product(*args[:3])
            self.operations += 2 * args[0].numel() * args[1].shape[-1]
        else:
            result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.operations += formula(*args, **(kwargs or {}), out_val=result)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self._count(tensor)
        return result

    def _count(self, tensor: Tensor) -> None:
        # The Python object of a storage is the same one as long as the storage exists.
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._storages:
            return
        size = storage.nbytes()
        is_logits = tensor.dim() > 1 and tensor.shape[-1] == self._vocabulary
        line = LOGITS if is_logits else ACTIVATIONS
        self._storages[key] = weakref.ref(storage, partial(self._freed, key, line, size))
        self._live[line] += size
        total = self._live.total()
        if total > self._peak_total:
            self._peak = self._live.copy()
            self._peak_total = total

    def _freed(self, key: int, line: str, size: int, _: object) -> None:
        del self._storages[key]
        self._live[line] -= size


def _grouped_product(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """The result of a grouped matrix product; torch 2.13 has it on the meta device in bfloat16 alone.

    Tokens ``[tokens, size]`` by experts ``[experts, size, width]``, or, for the experts' gradient,
    ``[size, tokens]`` by ``[tokens, width]``.
    """
    if right.dim() == 3:
        return left.new_empty(len(left), right.shape[-1])
    return left.new_empty(len(offsets), len(left), right.shape[-1])
