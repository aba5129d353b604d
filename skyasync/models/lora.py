"""Low-rank adapters (LoRA, arXiv 2106.09685) on a frozen model, by peft: targets, initialization,
merging.

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
        self._layers = [
            _AdaptedLayer(
                model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], name, module
            )
            for name, module in model.named_modules()
            if isinstance(module, peft.tuners.lora.LoraLayer)
        ]
        for adapted in self._layers:
            for half in adapted.halves:
                half.to(torch.float32)  # master weights, as of anything that is trained

    def split(self, mesh: DeviceMesh) -> None:
        """Over the tensor dimension of the mesh, as the adapted layers."""
        from skyasync.models.parallel.tensor import split_adapters

        split_adapters(
            ((adapted.name, adapted.layer) for adapted in self._layers), self._model, mesh
        )

    def begin(self, seed: int, device: torch.device) -> None:
        """Initialize them, in memory of ``device``."""
        for parameter in self._model.parameters():
            parameter.requires_grad_(False)
        for adapted in self._layers:
            for half in adapted.halves:
                half.to_empty(device=device).requires_grad_(True)
        self.initialize(seed)

    def initialize(self, seed: int, rank: int | None = None) -> None:
        """A is uniform as peft's, B is 0.

        Args:
            rank: how many rows of A are not zero, by default all: the others, and their columns of
                B, stay zero in training, so that the adapters have this rank.
        """
        generator = torch.Generator().manual_seed(seed)
        for adapted in self._layers:
            first, second = (half.weight for half in adapted.halves)
            bound = 1 / math.sqrt(first.shape[1])
            whole = (2 * torch.rand(first.shape, generator=generator) - 1) * bound
            if rank is not None:
                whole[rank:] = 0
            copy_own_part(first, whole)
            copy_own_part(second, torch.zeros(second.shape))

    def detach_adapters(self) -> None:
        for adapted in self._layers:
            setattr(adapted.parent, adapted.child, adapted.layer.base_layer)

    def attach_adapters(self) -> None:
        for adapted in self._layers:
            setattr(adapted.parent, adapted.child, adapted.layer)

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Meanwhile the model is that of its files."""
        self.detach_adapters()
        try:
            yield
        finally:
            self.attach_adapters()

    @contextmanager
    def dropping(self, seed: int) -> Iterator[None]:
        """Meanwhile their dropout acts, if they have any, by this seed alone."""
        if not self.config.lora_dropout:
            yield
            return
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.set_dropout(True)
            try:
                yield
            finally:
                self.set_dropout(False)

    def set_dropout(self, on: bool) -> None:
        for adapted in self._layers:
            adapted.layer.lora_dropout.train(on)

    def merged(self) -> dict[str, Any]:
        """Weights and saved buffers by their names in the files; those with an adapter as
        ``Merged``."""
        layers = {f"{adapted.name}.weight": adapted for adapted in self._layers}
        with self.detached():
            tensors = own_tensors(self._model)
        return {
            name: Merged(value, layers[name]) if name in layers else value
            for name, value in tensors.items()
        }

    def adapter_weights(self) -> dict[str, Tensor]:
        """The adapters' weights, whole, on the CPU, by the names that peft's folders have. All
        ranks call it."""
        return {
            f"base_model.model.{name.replace(f'.{NAME}.weight', '.weight')}": whole(value)
            .cpu()
            .contiguous()
            for name, value in own_tensors(self._model).items()
            if ADAPTER in name
        }

    def alone(self) -> Adapter:
        """For engines that have the frozen weights. All ranks call it; the frozen weights are read
        once."""
        if not self._base:
            with self.detached():
                frozen = own_tensors(self._model)
            specs = specs_in(frozen, self.dtype)
            self._base = frozen_weights_id(
                self.dtype, {n: digest(w.to(specs[n][0])) for n, w in gathered(frozen)}
            )
        config: dict[str, Any] = {
            "peft_type": "LORA",
            "r": self.config.r,
            "lora_alpha": self.config.lora_alpha,
        }
        config["target_modules"] = sorted({adapted.child for adapted in self._layers})
        scale = self._layers[0].layer.scaling[NAME]
        transposed = [adapted.name for adapted in self._layers if adapted.layer.fan_in_fan_out]
        return Adapter(self.adapter_weights(), config, scale, transposed, self._base)

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
    """A weight with its adapter added, with the interface of a sharded tensor; it is computed when
    it is gathered."""

    def __init__(self, weight: Tensor, adapted: _AdaptedLayer) -> None:
        self._weight = weight
        self._adapted = adapted
        self.shape = weight.shape
        self.dtype = weight.dtype

    def full_tensor(self) -> Tensor:
        """W + alpha / rank * B A, rounded to the weight's dtype once. All ranks call it."""
        first, second = (whole(half.weight) for half in self._adapted.halves)
        layer = self._adapted.layer
        return with_added(
            whole(self._weight),
            (first, second),
            layer.scaling[NAME],
            transposed=layer.fan_in_fan_out,
        )


def merge(
    adapters: Mapping[str, Tensor], path: str, settings: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The weights of the model in ``path`` with a checkpoint's adapters added, as a run publishes
    them.

    Args:
        adapters: by their names in the checkpoint, whole.
        settings: ``trainer.policy.lora`` of its run.
    """
    model = load_causal_lm(path, dtype)
    lora = LoraConfig(**settings)
    if lora.base_dtype:
        from skyasync.models.fsdp.quantized_base import round_to_quantized

        round_to_quantized(model.requires_grad_(requires_grad=False), lora.base_dtype)
    placed = Adapters(model, lora, path)
    placed.begin(0, torch.device("cpu"))
    own = {name: value for name, value in own_tensors(model).items() if ADAPTER in name}
    strange = sorted(own.keys() ^ adapters.keys())
    if strange:
        raise UserError(
            f"the checkpoint's adapters are not those of {path}: {strange[0]} is in one alone"
        )
    for name, value in own.items():
        copy_own_part(value, adapters[name])
    return full_weights(placed.merged(), dtype)


def whole(value: Any) -> Tensor:  # noqa: ANN401
    """A tensor, gathered if it is sharded, without gradient."""
    tensor: Tensor = value.full_tensor() if isinstance(value, DTensor | Merged) else value
    return tensor.detach()


def check_targets(path: str, config_kwargs: Mapping[str, Any], settings: LoraConfig) -> None:
    """Raises ``UserError`` for layers that the model of this folder or hub name lacks. Its weights
    are not read."""
    _targets(HEADS[VOCABULARY].with_config(config_kwargs).empty(path, torch.float32), settings)


_PRODUCTS = (
    nn.Linear.forward,
    Conv1D.forward,
)  # a router may be a subclass that returns something else


def _targets(model: PreTrainedModel, settings: LoraConfig) -> list[str]:
    """The layers that get an adapter, by their full names: peft would match experts' matrices by
    the last parts alone. They are in the language model and in its head, not in a tower for other
    inputs.

    Raises:
        UserError: naming a layer that the model lacks and the nearest, or one that cannot have an
            adapter of its own.
    """
    head = model.get_output_embeddings()
    decoder = model.get_decoder() or model
    own = {*decoder.modules(), head}
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and module in own
        and type(module).forward in _PRODUCTS
    }
    options = {layer.rpartition(".")[2] for layer in layers}
    for key, names in (
        ("target_modules", settings.target_modules),
        ("exclude_modules", settings.exclude_modules),
    ):
        known = options | {ALL} if key == "target_modules" else options
        for name in names:
            if name not in known and not any(_matches(layer, [name]) for layer in layers):
                raise UserError(f"{KEY}.{key}: {unknown('linear layer', name, known)}")
    targets = []
    for layer, module in layers.items():
        named = _matches(layer, settings.target_modules)
        all_linear = ALL in settings.target_modules
        if _matches(layer, settings.exclude_modules) or not (
            named or (all_linear and module is not head)
        ):
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
