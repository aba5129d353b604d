"""A model's shape, by transformers: its config.json is read, and its modules are built without
memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyasync.config.model_files import CONFIG, config_file, model_path, read_json
from skyasync.errors import UserError
from skyasync.models import VOCABULARY
from skyasync.preflight.model import hub_folder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class ModelShape:
    """Counts are of parameters.

    Args:
        path: of the folder with its config.json.
        intermediate: of one MLP, or of one expert.
        expert_parameters: of all experts, in the layers that have some.
        depths: numbers of layers that show what all layers need.
    """

    name: str
    path: str
    parameters: int
    largest_tensor: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    experts: int = 0
    experts_per_token: int = 0
    expert_parameters: int = 0
    shared_intermediate: int = 0
    depths: tuple[int, ...] = ()


def read_shape(
    path: str,
    key: str = "trainer.policy.model.path",
    head: str = VOCABULARY,
    config_kwargs: Mapping[str, Any] | None = None,
) -> ModelShape:
    """The shape of the model in a local folder, or on the hub.

    Args:
        key: that names the model, for errors.

    Raises:
        UserError: if there is no readable config.json, or transformers has no such model.
    """
    name = model_path(path, key)
    file = config_file(name) or _fetched(name, key)
    kind = read_json(file, f"{key}={name}").get("model_type")
    if not kind:
        raise UserError(
            f"{name}: its {CONFIG} names no model_type, so its memory cannot be planned"
        )
    overrides = json.dumps(dict(config_kwargs or {}))
    try:
        return _shape(name, str(file.parent), file.stat().st_mtime_ns, head, overrides)
    except (ValueError, AttributeError, TypeError, KeyError, ZeroDivisionError) as error:
        line = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{name}: transformers cannot build a model of type {kind!r} ({line})"
        ) from error


def config_of(path: str, head: str, config_kwargs: Mapping[str, Any]) -> PreTrainedConfig:
    from skyasync.models.heads import HEADS

    return HEADS[head].with_config(config_kwargs).config(path)


@cache
def _shape(name: str, path: str, changed_ns: int, head: str, config_kwargs: str) -> ModelShape:
    import torch

    from skyasync.models.config import EXPERTS, config_value
    from skyasync.models.heads import HEADS

    model = HEADS[head].with_config(json.loads(config_kwargs)).empty(path, torch.float32)
    text: Any = model.config.get_text_config()

    def number(*names: str, default: int = 0) -> int:
        for name in names:
            value = config_value(text, name)
            if value is not None:
                return int(value)
        return default

    decoder = model.get_decoder() or model  # without a tower for other inputs
    layer_classes = set(model._no_split_modules or ())
    layers = [m for m in decoder.modules() if type(m).__name__ in layer_classes]
    types = config_value(text, "layer_types") or [""] * len(layers)
    signatures = []
    for kind, layer in zip(types, layers, strict=False):
        signatures.append((kind, *(p.shape for p in layer.parameters())))
    heads = number("num_attention_heads", default=1)
    hidden = number("hidden_size")
    experts = number(*EXPERTS)
    dense = number("intermediate_size", "n_inner", default=4 * hidden)
    # Experts of a layer are one tensor, [experts, rows, columns].
    stacked = [p for p in decoder.parameters() if p.dim() == 3 and len(p) == experts]
    sizes = [p.numel() for p in model.parameters()]
    return ModelShape(
        name=name,
        path=path,
        parameters=sum(sizes),
        largest_tensor=max(sizes),
        layers=number("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=number("num_key_value_heads", default=heads),
        head_dim=number("head_dim", default=hidden // heads),
        intermediate=number("moe_intermediate_size", default=dense) if experts else dense,
        vocabulary=number("vocab_size"),
        experts=experts,
        experts_per_token=number("num_experts_per_tok") if experts else 0,
        expert_parameters=sum(p.numel() for p in stacked),
        shared_intermediate=number("shared_expert_intermediate_size"),
        depths=_depths(signatures),
    )


LEAST = 2
"""Layers; until the second one runs, the embeddings' output and the states are one tensor."""

MOST_SINGLE = 4
"""Layers of kinds that come once, such as the dense ones before a mixture's experts."""


def _depths(signatures: Sequence[object]) -> tuple[int, ...]:
    """Two numbers of layers whose difference is one period of the layers, after those that come
    once; or all."""
    count = len(signatures)
    for period in range(1, count // 2 + 1):  # the shortest period first
        start = 0  # layers before the periods
        for i in range(count - period):
            if signatures[i] != signatures[i + period]:
                start = i + 1
        few = start + period * -(-LEAST // period)
        if few + period <= count and start <= MOST_SINGLE:
            return few, few + period
    return (count,)


def _fetched(name: str, key: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        hub_folder(name, key)  # the download tries again for half a minute
        return Path(hf_hub_download(name, CONFIG))
    except Exception as error:  # no network, no such model, no access: all end the plan in one line
        line = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{line}; a folder that holds nothing but {CONFIG} is enough for a plan"
        ) from error
