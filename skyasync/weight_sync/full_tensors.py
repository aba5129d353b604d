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
    """A weight of which this rank has a part, or what it is computed from; ``full_tensor`` is
    collective."""

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
            for name, whole in gathered(self._weights, self._dtype):
                yield from (
                    [(name, whole)]
                    if name in layout.unchanged
                    else layout.split({name: whole}).items()
                )
        else:
            weights: dict[str, Tensor] = {}
            for name, whole in gathered(self._weights, self._dtype):
                weights[name] = (
                    (whole.to(self._dtype) if whole.is_floating_point() else whole)
                    .cpu()
                    .contiguous()
                )
            yield from layout.split(weights).items()

    def only_gather(self) -> None:
        """For a rank that keeps nothing."""
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
        of_each = {name: specs_of(self.split({name: tensor})) for name, tensor in tensors.items()}
        one_by_one = {name: spec for split in of_each.values() for name, spec in split.items()}
        self.one_by_one = one_by_one == at_once
        self.specs: TensorSpecs = one_by_one if self.one_by_one else at_once
        self.unchanged = {name for name, split in of_each.items() if split == {name: specs[name]}}

    @staticmethod
    def differs(model: PreTrainedModel) -> bool:
        """Whether the model may join or rename anything of its files."""
        from transformers.conversion_mapping import get_model_conversion_mapping

        return bool(get_model_conversion_mapping(model))

    def split(self, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
        """These parameters as the tensors of files."""
        # Imported here: the controller's process uses this module and no model.
        from transformers.core_model_loading import revert_weight_conversion

        with (
            self._adapters.detached() if self._adapters else nullcontext()
        ):  # transformers looks at the model's layers
            tensors: Mapping[str, Tensor] = revert_weight_conversion(self._model, weights)
        return tensors


def specs_in(weights: Mapping[str, Any], dtype: torch.dtype) -> TensorSpecs:
    """Of full weights, floating-point ones converted to ``dtype``."""
    return {
        name: (dtype if w.dtype.is_floating_point else w.dtype, tuple(w.shape))
        for name, w in weights.items()
    }


class StageTensor:
    """A weight of one stage of a pipeline, with the interface of a sharded tensor: all stages
    gather it.

    Args:
        own: this rank's shard, or None on other stages.
        device: where it is received.
        source: the rank of the pipeline that has it.
    """

    def __init__(
        self,
        spec: TensorSpec,
        own: Tensor | None,
        device: torch.device,
        source: int,
        group: dist.ProcessGroup,
    ) -> None:
        self.dtype, self.shape = spec
        self._own = own
        self._device = device
        self._source = source
        self._group = group

    def to(self, dtype: torch.dtype) -> StageTensor:
        if self._own is None:
            own = None
        else:
            own = self._own.detach().to(dtype)
        return StageTensor((dtype, self.shape), own, self._device, self._source, self._group)

    def full_tensor(self) -> Tensor:
        if self._own is None:
            whole = torch.empty(self.shape, dtype=self.dtype, device=self._device)
        else:
            own = self._own.detach()
            whole = (
                (own.full_tensor() if isinstance(own, DTensor) else own).to(self.dtype).contiguous()
            )
        dist.broadcast(whole, src=self._source, group=self._group)
        return whole


def gathered(
    tensors: Mapping[str, Any], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Full tensors, one at a time. Collective: all ranks iterate.

    Args:
        dtype: shards of a wider floating-point dtype travel as this one, in fewer bytes.
    """
    for name, value in tensors.items():
        sharded = isinstance(value, DTensor | StageTensor)
        if (
            dtype
            and sharded
            and value.dtype.is_floating_point
            and value.dtype.itemsize > dtype.itemsize
        ):
            value = (value.detach() if isinstance(value, DTensor) else value).to(dtype)
        if isinstance(value, Sharded):
            whole = value.full_tensor()
        else:
            whole = value
        yield name, (whole.numbers() if isinstance(whole, Quantized) else whole).detach()
