"""A model's shape, from its config.json alone: parameters, what a rank of the tensor axis holds, its adapters.

Invariant: a test holds the parameters counted here equal to those of transformers' own modules and peft's. Torch is
imported only for families that ``FAMILIES`` does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from skyasync.config.model_files import CONFIG, config_file, read_json
from skyasync.config.schema import Config, LoraConfig
from skyasync.errors import UserError


@dataclass(frozen=True)
class Family:
    """Defaults are Llama's: RMS norms before attention and MLP, a gated MLP, no biases."""

    norm: Literal["rms", "gemma", "layer"] = "rms"
    """rms computes in float32 and rounds before its weight; gemma rounds after it; layer is torch's fused one."""
    post_norms: bool = False
    """Two more norms per layer, behind attention and MLP."""
    head_norms: bool = False
    """Queries and keys are normalised per head."""
    qkv_bias: bool = False
    biases: bool = False
    """Every linear layer of a block has one."""
    learned_positions: bool = False
    gated: bool = True
    tied: bool = False
    """Where config.json does not say."""
    shared_expert: bool = False
    experts: bool = False
    """Every layer's MLP is a router and several of them."""
    images: bool = False
    """The model reads images."""


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(head_norms=True),
    "gemma": Family(norm="gemma", tied=True),
    "gemma2": Family(norm="gemma", post_norms=True, tied=True),
    "gemma3_text": Family(norm="gemma", post_norms=True, head_norms=True, tied=True),
    "gpt2": Family(norm="layer", biases=True, learned_positions=True, gated=False, tied=True),
    "mixtral": Family(experts=True),
    "qwen2_moe": Family(qkv_bias=True, shared_expert=True, experts=True),
    "qwen3_moe": Family(head_norms=True, experts=True),
}

OTHER_NAMES = {
    "hidden_size": ("n_embd",),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "intermediate_size": ("n_inner",),
    "max_position_embeddings": ("n_positions",),
    "num_experts": ("num_local_experts",),
}
"""What else config.json may call a field."""

HEAD_DIMS = {"gemma": 256, "gemma2": 256, "gemma3_text": 256}
"""Where config.json has no head_dim and it is not hidden_size / num_attention_heads."""


@dataclass(frozen=True)
class ModelShape:
    """Counts are of parameters; ``layer`` is one decoder layer, ``root`` the rest: embeddings, last norm, head."""

    name: str
    family: Family
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # of one MLP, or of one expert
    vocabulary: int
    tied: bool
    layer: int
    root: int
    windows: tuple[int, ...] = ()  # per layer, tokens that it attends to; 0 is all; empty: all layers attend to all
    experts: int = 0
    experts_per_token: int = 0
    shared_intermediate: int = 0
    head_copies: int = 0  # of the logits, that a head makes which caps or scales them
    embedded: int = 0  # rows of the embeddings, where they are more than those of the head

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.root

    @property
    def with_value_head(self) -> ModelShape:
        """The same layers under a head of one output, in the place of the one that spans the vocabulary."""
        head = 0 if self.tied else self.vocabulary * self.hidden
        return replace(self, root=self.root - head + self.hidden, tied=True)

    @property
    def largest_tensor(self) -> int:
        gate_up = 2 * self.intermediate if self.family.gated else self.intermediate
        return max(self.vocabulary * self.hidden, max(1, self.experts) * gate_up * self.hidden)

    @property
    def largest_matrix(self) -> int:
        """Of a decoder layer's."""
        return self.hidden * max(
            self.shared_intermediate if self.experts else self.intermediate, self.heads * self.head_dim
        )

    @property
    def layer_matrices(self) -> int:
        """Of a decoder layer, without stacked experts; norms and biases are counted among them, which are few."""
        return self.layer - self.experts * (3 if self.family.gated else 2) * self.hidden * self.intermediate

    @property
    def shares_prefixes(self) -> bool:
        """As ``skyasync.models.token_model.can_share_prefixes`` decides."""
        return not any(self.windows) and not self.family.images


def read_shape(path: str) -> ModelShape:
    """The shape of the model in a local folder, or on the hub.

    Raises:
        UserError: if there is no readable config.json, or it lacks what a causal language model needs.
    """
    return shape_of(read_json(config_file(path) or _fetched(path), f"trainer.policy.model.path={path}"), path)


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that a config.json describes.

    Raises:
        UserError: naming the field that is missing.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or _has_dense_layers(config):
        return unknown_shape(config, name)
    return known_shape(config, name, family)


def known_shape(config: Mapping[str, Any], name: str, family: Family) -> ModelShape:
    """By arithmetic."""
    fields = _Fields(config, name)
    hidden, heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    default_dim = HEAD_DIMS.get(str(config.get("model_type")), hidden // heads)
    sparse = family.experts
    shape = ModelShape(
        name=name,
        family=family,
        hidden=hidden,
        layers=fields.number("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.number("num_key_value_heads", heads),
        head_dim=fields.number("head_dim", default_dim),
        intermediate=_intermediate(fields, hidden, sparse),
        vocabulary=fields.number("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        layer=0,
        root=0,
        windows=_windows(config),
        head_copies=_head_copies(config),
        experts=fields.number("num_experts") if sparse else 0,
        experts_per_token=fields.number("num_experts_per_tok", 2) if sparse else 0,
        shared_intermediate=fields.number("shared_expert_intermediate_size") if family.shared_expert else 0,
    )
    bias = bool(config.get("attention_bias", False))
    root = _root_parameters(shape, fields.number("max_position_embeddings", 0))
    return replace(shape, layer=_layer_parameters(shape, attention_bias=bias), root=root)


class _Fields:
    """Numbers of a config.json under any of their names."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._config, self._name = config, name

    def number(self, field: str, default: int | None = None) -> int:
        for key in (field, *OTHER_NAMES.get(field, ())):
            if self._config.get(key) is not None:
                return int(self._config[key])
        if default is None:
            raise UserError(f"{self._name}: its {CONFIG} has no {field}, so its memory cannot be planned")
        return default


def _intermediate(fields: _Fields, hidden: int, sparse: bool) -> int:
    dense = fields.number("intermediate_size", 4 * hidden)
    return fields.number("moe_intermediate_size", dense) if sparse else dense


def _has_dense_layers(config: Mapping[str, Any]) -> bool:
    """Some layers have experts and others have none."""
    return bool(config.get("mlp_only_layers")) or config.get("decoder_sparse_step", 1) != 1


def _windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    window = int(config.get("sliding_window") or 0)
    if layer_types := config.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else 0 for kind in layer_types)
    off = config.get("use_sliding_window") is False
    return () if off or not window else (window,) * int(config.get("num_hidden_layers", 0))


def _head_copies(config: Mapping[str, Any]) -> int:
    """A cap divides, bends and multiplies, and two of the results are there at once with what was before."""
    if config.get("final_logit_softcapping"):
        return 2
    return int(any(config.get(name) not in (None, 1.0) for name in ("logit_scale", "logits_scaling")))


def _layer_parameters(shape: ModelShape, *, attention_bias: bool) -> int:
    family, hidden = shape.family, shape.hidden
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    count = 2 * hidden * queries + 2 * hidden * keys
    count += (queries + 2 * keys) * (family.qkv_bias or family.biases or attention_bias)
    count += hidden * (family.biases or attention_bias)
    count += 2 * shape.head_dim * family.head_norms
    count += hidden * (4 if family.post_norms else 2) * (2 if family.norm == "layer" else 1)
    matrices = 3 if family.gated else 2
    mlp = matrices * hidden * shape.intermediate + (shape.intermediate + hidden) * family.biases
    if not shape.experts:
        return count + mlp
    shared = 3 * hidden * shape.shared_intermediate + hidden if family.shared_expert else 0
    return count + shape.experts * (mlp + hidden) + shared  # each expert has a row in the router


def _root_parameters(shape: ModelShape, positions: int) -> int:
    norm = shape.hidden * (2 if shape.family.norm == "layer" else 1)
    embeddings = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
    return embeddings + norm + positions * shape.hidden * shape.family.learned_positions


def _fetched(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, CONFIG, etag_timeout=2))
    except Exception as error:  # no network, no such model, no access: all end the plan in one line
        first = str(error).strip().partition("\n")[0]
        raise UserError(
            f"trainer.policy.model.path={name}: its {CONFIG} is neither in a folder here nor to be had from the hub "
            f"({type(error).__name__}: {first}); a folder that holds nothing but {CONFIG} is enough for a plan"
        ) from error


def unknown_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """What reads images is counted with the embeddings.

    Raises:
        UserError: if transformers has no causal language model for it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from skyasync.models.vision import is_vision

    settings = dict(config)
    kind = settings.pop("model_type", None)
    if not kind:
        raise UserError(f"{name}: its config.json names no model_type, so its memory cannot be planned")
    try:
        built = AutoConfig.for_model(kind, **settings)
        with torch.device("meta"):
            factory = AutoModelForImageTextToText if is_vision(built) else AutoModelForCausalLM
            model = factory.from_config(built, attn_implementation="sdpa")
    except (ValueError, AttributeError, TypeError) as error:
        first = str(error).partition("\n")[0]
        raise UserError(f"{name}: transformers has no causal language model of type {kind!r} ({first})") from error
    layers = [m for m in model.get_decoder().modules() if type(m).__name__ in set(model._no_split_modules or ())]
    in_layers = sum(p.numel() for layer in layers for p in layer.parameters())
    total = sum(p.numel() for p in model.parameters())
    shape = known_shape(built.get_text_config().to_dict(), name, Family(images=is_vision(built)))
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return replace(shape, layer=in_layers // shape.layers, root=total - in_layers, tied=tied)


def filters(cfg: Config) -> bool:
    """Whether the distribution that is trained looks at the whole vocabulary, as ``SampledDistribution.filters``."""
    sampling = cfg.generator.sampling_params
    looks = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    some = looks or bool(sampling.logit_bias) or bool(sampling.allowed_token_ids)
    return some and cfg.trainer.algorithm.filter_logprobs and bool(sampling.temperature)


def divided(shape: ModelShape, tensor: int, *, gathers: bool = False) -> ModelShape:
    """A rank's part.

    Args:
        gathers: the logits are put together for each rank, whatever the head's weights are.
    """
    if tensor == 1:
        return shape
    by_vocabulary = shape.vocabulary % tensor == 0
    head = shape.vocabulary * shape.hidden
    spared = (head - head // tensor) if by_vocabulary else 0
    return replace(
        shape,
        heads=shape.heads // tensor,
        kv_heads=max(1, shape.kv_heads // tensor),
        intermediate=shape.intermediate if shape.experts else shape.intermediate // tensor,
        experts=shape.experts // tensor,
        experts_per_token=-(-shape.experts_per_token // tensor),
        shared_intermediate=shape.shared_intermediate // tensor,
        vocabulary=shape.vocabulary // tensor if by_vocabulary and not gathers else shape.vocabulary,
        embedded=0 if shape.tied else shape.vocabulary,
        layer=shape.layer // tensor + 4 * shape.hidden,
        root=shape.root - spared,
    )


ALL = "all-linear"


def adapter_parameters(shape: ModelShape, lora: LoraConfig) -> int:
    """Of the whole model; A is rank x in, B is out x rank. Experts' matrices are no linear layers and get none."""
    chosen = [sides for name, sides in _layers(shape) if _chosen(name, lora)]
    return lora.rank * shape.layers * sum(inputs + outputs for inputs, outputs in chosen)


def between_halves(shape: ModelShape, lora: LoraConfig) -> int:
    """Numbers per token that A gives B, in a decoder layer."""
    return lora.rank * sum(_chosen(name, lora) for name, _ in _layers(shape))


def _chosen(name: str, lora: LoraConfig) -> bool:
    def among(names: list[str]) -> bool:
        return any(f".{name}".endswith(f".{needed.rpartition('.')[2]}") for needed in names)

    return (lora.target_modules == [ALL] or among(lora.target_modules)) and not among(lora.exclude_modules)


def _layers(shape: ModelShape) -> list[tuple[str, tuple[int, int]]]:
    """Linear layers of one decoder layer: the end of the name, inputs and outputs."""
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if shape.family.norm == "layer":  # GPT-2
        wide = shape.intermediate
        return [
            ("c_attn", (hidden, queries + 2 * keys)), ("c_proj", (queries, hidden)), ("c_fc", (hidden, wide)),
            ("c_proj", (wide, hidden)),
        ]  # fmt: skip
    attention = [
        ("q_proj", (hidden, queries)), ("k_proj", (hidden, keys)), ("v_proj", (hidden, keys)),
        ("o_proj", (queries, hidden)),
    ]  # fmt: skip
    wide = shape.shared_intermediate if shape.experts else shape.intermediate
    if not wide:
        return attention
    mlp = [("up_proj", (hidden, wide)), ("down_proj", (wide, hidden))]
    gate = [("gate_proj", (hidden, wide))] if shape.family.gated else []
    shared = [("shared_expert_gate", (hidden, 1))] if shape.experts else []
    return [*attention, *gate, *mlp, *shared]
