"""The full (unsharded) weights of a model, one tensor at a time, as engines and files need them.

Invariant: names, dtypes and shapes are known before the first tensor comes. All ranks iterate in
the same order and to the end, and gather each parameter when its turn comes. So no rank needs
memory for more than one full parameter, and the tensors that it is split into.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from skyasync.weight_sync.tensors import TensorSpec, TensorSpecs, meta_tensors, specs_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@runtime_checkable
class Sharded(Protocol):
    """A weight of which this rank has a shard. ``full_tensor`` is collective."""

    def full_tensor(self) -> Tensor: ...


@runtime_checkable
class Quantized(Protocol):
    """A weight that is stored as codes."""

    def numbers(self) -> Tensor: ...


class FullTensors:
    """Full tensors by name, in the order of ``specs``; their dtypes may still be the model's own.

    Args:
        weights: tensors or ``Sharded`` ones, by the names of the model's parameters.
        dtype: of floating-point tensors in ``specs``.
        layout: the names and shapes of files; None sends the model's own.
    """

    def __init__(
        self, weights: Mapping[str, Any], dtype: torch.dtype, layout: FileLayout | None = None
    ) -> None:
        self._weights = weights
        self._dtype = dtype
        self._layout = layout
        self.specs: TensorSpecs = layout.specs if layout else specs_in(weights, dtype)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        layout = self._layout
        if layout is None:
            yield from gathered(self._weights, self._dtype)
        elif layout.one_by_one:
            for name, tensor in gathered(self._weights, self._dtype):
                if name in layout.unchanged:
                    yield name, tensor
                else:
                    yield from layout.split({name: tensor}).items()
        else:
            # All at once, so in host memory: a device may not have room for a second copy.
            weights: dict[str, Tensor] = {}
            for name, tensor in gathered(self._weights, self._dtype):
                if tensor.is_floating_point():
                    tensor = tensor.to(self._dtype)
                weights[name] = tensor.cpu().contiguous()
            yield from layout.split(weights).items()

    def only_gather(self) -> None:
        """Take part in the gathers of all tensors, on a rank that keeps none."""
        for _ in gathered(self._weights, self._dtype):
            pass


class FileLayout:
    """Weights under the names of the model's files. Names and tensors are those of an export.

    transformers joins a layer's experts when it loads them. The library itself undoes that here:
    parameter by parameter if this gives the same tensors as all parameters at once (tried once,
    without memory), else all at once.

    Args:
        specs: of the full weights, by the names of the model's parameters.
        adapters: LoRA layers in the model, if it has some (``skyasync.models.lora.Adapters``).
    """

    def __init__(self, model: PreTrainedModel, specs: TensorSpecs, adapters: Any = None) -> None:  # noqa: ANN401
        self._model = model
        self._adapters = adapters
        tensors = meta_tensors(specs)
        at_once = specs_of(self.split(tensors))
        one_by_one = dict[str, TensorSpec]()
        self.unchanged = set[str]()  # parameters that are tensors of a file as they are
        for name, tensor in tensors.items():
            split = specs_of(self.split({name: tensor}))
            one_by_one |= split
            if split == {name: specs[name]}:
                self.unchanged.add(name)
        self.one_by_one = one_by_one == at_once
        # Equal, but in the order in which the tensors come.
        self.specs: TensorSpecs = one_by_one if self.one_by_one else at_once

    @staticmethod
    def differs(model: PreTrainedModel) -> bool:
        """Whether the model may join or rename anything of its files."""
        from transformers.conversion_mapping import get_model_conversion_mapping

        return bool(get_model_conversion_mapping(model))

    def split(self, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
        """Convert parameters to the tensors of files."""
        # Imported here: the controller's process uses this module and no model.
        from transformers.core_model_loading import revert_weight_conversion

        # transformers looks at the model's layers, and does not know LoRA's.
        plain_model = self._adapters.detached() if self._adapters else nullcontext()
        with plain_model:
            tensors: Mapping[str, Tensor] = revert_weight_conversion(self._model, weights)
        return tensors


def specs_in(weights: Mapping[str, Any], dtype: torch.dtype) -> TensorSpecs:
    """Specs of full weights, floating-point ones converted to ``dtype``."""
    specs = {}
    for name, weight in weights.items():
        sent_dtype = dtype if weight.dtype.is_floating_point else weight.dtype
        specs[name] = (sent_dtype, tuple(weight.shape))
    return specs


class StageTensor:
    """A weight of one pipeline stage, with the interface of a sharded tensor: all stages gather it.

    Args:
        shard: of this rank, or None on other stages.
        device: where it is received.
        source: the rank of the pipeline that has it.
    """

    def __init__(
        self,
        spec: TensorSpec,
        shard: Tensor | None,
        device: torch.device,
        source: int,
        group: dist.ProcessGroup,
    ) -> None:
        self.dtype, self.shape = spec
        self._shard = shard
        self._device = device
        self._source = source
        self._group = group

    def to(self, dtype: torch.dtype) -> StageTensor:
        if self._shard is None:
            shard = None
        else:
            shard = self._shard.detach().to(dtype)
        return StageTensor((dtype, self.shape), shard, self._device, self._source, self._group)

    def full_tensor(self) -> Tensor:
        if self._shard is None:
            tensor = torch.empty(self.shape, dtype=self.dtype, device=self._device)
        else:
            tensor = self._shard.detach()
            if isinstance(tensor, DTensor):
                tensor = tensor.full_tensor()
            tensor = tensor.to(self.dtype).contiguous()
        # Within the stage the shards are gathered first; then its rank sends to the other stages.
        dist.broadcast(tensor, src=self._source, group=self._group)
        return tensor


def gathered(
    tensors: Mapping[str, Any], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Full tensors, one at a time. Collective: all ranks iterate.

    Args:
        dtype: shards of a wider floating-point dtype travel as this one, in fewer bytes.
    """
    for name, value in tensors.items():
        if (
            dtype
            and isinstance(value, DTensor | StageTensor)
            and value.dtype.is_floating_point
            and value.dtype.itemsize > dtype.itemsize
        ):
            # Before the gather, so that it moves fewer bytes. A StageTensor detaches by itself.
            if isinstance(value, DTensor):
                value = value.detach()
            value = value.to(dtype)
        if isinstance(value, Sharded):
            value = value.full_tensor()
        if isinstance(value, Quantized):
            value = value.numbers()
        yield name, value.detach()
