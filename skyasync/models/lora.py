"""Low-rank adapters (LoRA, arXiv 2106.09685) on a frozen model, by peft.

This module has their targets, initialization and merging.

Invariant: while the adapters are detached, the model and the names of its weights are those of its
files. In this state it is loaded, sent to engines (with the adapters added to its weights), and
used as the reference of a KL term. New adapters are the same on any number of ranks, and add
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from skyasync.config.schema import LoraConfig
from skyasync.errors import MissingExtraError, UserError, unknown
from skyasync.models.fsdp.checkpoint import ADAPTER, full_weights, own_tensors
from skyasync.models.heads import HEADS, VOCABULARY, copy_own_part, load_causal_lm
from skyasync.weight_sync.adapters import Adapter, frozen_weights_id, with_added
from skyasync.weight_sync.full_tensors import gathered, specs_in
from skyasync.weight_sync.tensors import digest

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

KEY = "trainer.policy.lora"
ALL = "all-linear"
NAME = "default"  # peft's for the one adapter that a layer has


class Adapters:
    """Adds adapters to a model and freezes its other weights.

    Args:
        model: may have no memory yet; it is not sharded yet.
        path: what the model is loaded from.
    """

    def __init__(self, model: PreTrainedModel, settings: LoraConfig, path: str) -> None:
        try:
            import peft
        except ImportError as error:
            raise MissingExtraError("peft", "lora") from error
        self._model = model
        self._base = ""
        self.dtype = next(p.dtype for p in model.parameters())  # of what is frozen
        self.config: Any = peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # type: ignore[arg-type]  # it takes floats
            lora_dropout=settings.dropout,
            target_modules=_targets(model, settings),
            task_type="CAUSAL_LM",
            base_model_name_or_path=path,
        )
        try:
            peft.inject_adapter_in_model(self.config, model, NAME, low_cpu_mem_usage=True)
        except ValueError as error:
            raise UserError(
                f"{KEY}.target_modules: {error}: list it in {KEY}.exclude_modules"
            ) from error
        self._layers: list[_AdaptedLayer] = []
        for name, module in model.named_modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                parent, _, child = name.rpartition(".")
                layer = _AdaptedLayer(model.get_submodule(parent), child, name, module)
                self._layers.append(layer)
                for half in layer.halves:
                    half.to(torch.float32)  # master weights, as of anything that is trained

    def split(self, mesh: DeviceMesh) -> None:
        """Split the adapters over the tensor dimension of the mesh, as the adapted layers."""
        from skyasync.models.parallel.tensor import split_adapters

        layers = [(adapted_layer.name, adapted_layer.layer) for adapted_layer in self._layers]
        split_adapters(layers, self._model, mesh)

    def begin(self, seed: int, device: torch.device) -> None:
        """Initialize the adapters in memory of ``device``, and freeze all else."""
        for parameter in self._model.parameters():
            parameter.requires_grad_(False)
        for adapted_layer in self._layers:
            for half in adapted_layer.halves:
                half.to_empty(device=device).requires_grad_(True)
        self.initialize(seed)

    def initialize(self, seed: int, rank: int | None = None) -> None:
        """Initialize A uniformly, as peft does, and B with 0.

        Args:
            rank: how many rows of A are not zero, by default all: the others, and their columns of
                B, stay zero in training, so that the adapters have this rank.
        """
        # On the CPU and whole: the same numbers on any number of ranks, and on any device.
        generator = torch.Generator().manual_seed(seed)
        for adapted_layer in self._layers:
            half_a, half_b = adapted_layer.halves
            shape = half_a.weight.shape  # [rank, in]
            bound = 1 / math.sqrt(shape[1])
            weight = (2 * torch.rand(shape, generator=generator) - 1) * bound
            if rank is not None:
                weight[rank:] = 0
            copy_own_part(half_a.weight, weight)
            copy_own_part(half_b.weight, torch.zeros(half_b.weight.shape))

    def detach_adapters(self) -> None:
        for adapted_layer in self._layers:
            setattr(adapted_layer.parent, adapted_layer.child, adapted_layer.layer.base_layer)

    def attach_adapters(self) -> None:
        for adapted_layer in self._layers:
            setattr(adapted_layer.parent, adapted_layer.child, adapted_layer.layer)

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Make the model that of its files, inside this context."""
        self.detach_adapters()
        try:
            yield
        finally:
            self.attach_adapters()

    @contextmanager
    def dropping(self, seed: int) -> Iterator[None]:
        """Let the adapters' dropout act inside this context, if they have any, by this seed."""
        if not self.config.lora_dropout:
            yield
            return
        with torch.random.fork_rng():  # the generator continues after it as if nothing was drawn
            torch.manual_seed(seed)
            self.set_dropout(True)
            try:
                yield
            finally:
                self.set_dropout(False)

    def set_dropout(self, on: bool) -> None:
        for adapted_layer in self._layers:
            adapted_layer.layer.lora_dropout.train(on)

    def merged(self) -> dict[str, Any]:
        """Weights and saved buffers by their names in the files.

        Those with an adapter are ``Merged``.
        """
        with self.detached():
            tensors: dict[str, Any] = own_tensors(self._model)
        for adapted_layer in self._layers:
            name = f"{adapted_layer.name}.weight"
            if name in tensors:  # a tied weight has another name here
                tensors[name] = Merged(tensors[name], adapted_layer)
        return tensors

    def adapter_weights(self) -> dict[str, Tensor]:
        """The adapters' weights, whole, on the CPU, by the names that peft's folders have.

        All ranks call it.
        """
        weights = {}
        for name, value in own_tensors(self._model).items():
            if ADAPTER in name:
                peft_name = f"base_model.model.{name.replace(f'.{NAME}.weight', '.weight')}"
                weights[peft_name] = whole(value).cpu().contiguous()
        return weights

    def alone(self) -> Adapter:
        """The adapters for engines that have the frozen weights.

        All ranks call it; the frozen weights are read once.
        """
        if not self._base:
            with self.detached():
                frozen_weights = own_tensors(self._model)
            specs = specs_in(frozen_weights, self.dtype)
            digests = {}
            for name, weight in gathered(frozen_weights):
                dtype, _ = specs[name]
                digests[name] = digest(weight.to(dtype))
            self._base = frozen_weights_id(self.dtype, digests)
        config: dict[str, Any] = {
            "peft_type": "LORA",
            "r": self.config.r,
            "lora_alpha": self.config.lora_alpha,
            "target_modules": sorted({adapted_layer.child for adapted_layer in self._layers}),
        }
        scale = self._layers[0].layer.scaling[NAME]
        transposed_layers = [
            adapted_layer.name
            for adapted_layer in self._layers
            if adapted_layer.layer.fan_in_fan_out
        ]
        return Adapter(self.adapter_weights(), config, scale, transposed_layers, self._base)

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write ``adapter_weights`` as a folder that peft loads."""
        folder.mkdir(parents=True, exist_ok=True)
        self.config.save_pretrained(str(folder))
        save_file(dict(weights), folder / "adapter_model.safetensors", metadata={"format": "pt"})


@dataclass(frozen=True)
class _AdaptedLayer:
    """peft's ``layer`` holds a linear layer of the model, ``name``, and its adapter."""

    parent: nn.Module
    child: str
    name: str
    layer: Any

    @property
    def halves(self) -> tuple[nn.Linear, nn.Linear]:
        """A, ``[rank, in]``, and B, ``[out, rank]``."""
        return self.layer.lora_A[NAME], self.layer.lora_B[NAME]


class Merged:
    """A weight with its adapter added, with the interface of a sharded tensor.

    It is computed when it is gathered: one at a time needs memory.
    """

    def __init__(self, weight: Tensor, adapted_layer: _AdaptedLayer) -> None:
        self._weight = weight
        self._adapted_layer = adapted_layer
        self.shape = weight.shape
        self.dtype = weight.dtype

    def full_tensor(self) -> Tensor:
        """Compute W + alpha / rank * B A, rounded to the weight's dtype once.

        All ranks call it.
        """
        half_a, half_b = self._adapted_layer.halves
        a = whole(half_a.weight)  # [rank, in]
        b = whole(half_b.weight)  # [out, rank]
        layer = self._adapted_layer.layer
        return with_added(
            whole(self._weight),
            (a, b),
            layer.scaling[NAME],
            transposed=layer.fan_in_fan_out,
        )


def merge(
    adapters: Mapping[str, Tensor],
    path: str,
    settings: Mapping[str, Any],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Add a checkpoint's adapters to the weights of the model in ``path``, as a run does.

    Args:
        adapters: by their names in the checkpoint, whole.
        settings: ``trainer.policy.lora`` of its run.
    """
    model = load_causal_lm(path, dtype)
    lora = LoraConfig(**settings)
    if lora.base_dtype:
        from skyasync.models.fsdp.quantized_base import round_to_quantized

        round_to_quantized(model.requires_grad_(requires_grad=False), lora.base_dtype)
    new_adapters = Adapters(model, lora, path)
    new_adapters.begin(0, torch.device("cpu"))
    parameters = {name: value for name, value in own_tensors(model).items() if ADAPTER in name}
    mismatches = parameters.keys() ^ adapters.keys()
    if mismatches:
        raise UserError(
            f"the checkpoint's adapters are not those of {path}: {min(mismatches)} is in one alone"
        )
    for name, parameter in parameters.items():
        copy_own_part(parameter, adapters[name])
    return full_weights(new_adapters.merged(), dtype)


def whole(value: Any) -> Tensor:  # noqa: ANN401
    """Gather a tensor if it is sharded; without gradient."""
    tensor: Tensor = value.full_tensor() if isinstance(value, DTensor | Merged) else value
    return tensor.detach()


def check_targets(path: str, config_kwargs: Mapping[str, Any], settings: LoraConfig) -> None:
    """Raise ``UserError`` for layers that the model of this folder or hub name lacks.

    Its weights are not read.
    """
    model = HEADS[VOCABULARY].with_config(config_kwargs).empty(path, torch.float32)
    _targets(model, settings)


# Not the classes alone: a router may be a subclass that returns something else.
_PRODUCTS = (nn.Linear.forward, Conv1D.forward)


def _targets(model: PreTrainedModel, settings: LoraConfig) -> list[str]:
    """Select the layers that get an adapter, by their full names.

    By the last parts alone peft would match experts' matrices. The layers are in the language model
    and in its head, not in a tower for other inputs.

    Raises:
        UserError: naming a layer that the model lacks and the nearest, or one that cannot have an
            adapter of its own.
    """
    head = model.get_output_embeddings()
    decoder = model.get_decoder() or model
    language_modules = {*decoder.modules(), head}
    layers = {}
    for name, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear | Conv1D) and type(module).forward in _PRODUCTS
        if is_linear and module in language_modules:
            layers[name] = module
    short_names = {name.rpartition(".")[2] for name in layers}
    allowed_names = {
        "target_modules": (settings.target_modules, short_names | {ALL}),
        "exclude_modules": (settings.exclude_modules, short_names),
    }
    for key, (names, options) in allowed_names.items():
        for name in names:
            if name not in options and not any(_matches(layer, [name]) for layer in layers):
                raise UserError(f"{KEY}.{key}: {unknown('linear layer', name, options)}")
    targets = []
    for layer, module in layers.items():
        is_target = _matches(layer, settings.target_modules)
        if ALL in settings.target_modules and module is not head:  # peft leaves the head out too
            is_target = True
        if not is_target or _matches(layer, settings.exclude_modules):
            continue
        if module is head and head.weight is model.get_input_embeddings().weight:
            raise UserError(
                f"{KEY}.target_modules: {layer} shares its weight with the embeddings: remove it"
            )
        targets.append(layer)
    if not targets:
        raise UserError(
            f"{KEY}: target_modules less exclude_modules leave no layer of {type(model).__name__}"
        )
    return targets


def _matches(layer: str, names: list[str]) -> bool:
    """Whether the layer's name ends with one of ``names``."""
    return any(f".{layer}".endswith(f".{name}") for name in names)
