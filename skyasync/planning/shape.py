"""A model's shape, from its config.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skyasync.config.model_files import CONFIG, config_file, read_json
from skyasync.errors import UserError
from skyasync.planning.families import FAMILIES, HEAD_DIMS, OTHER_NAMES, Family


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
        return not any(self.windows)


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
        from skyasync.planning.unknown_family import unknown_shape  # imports torch

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
    kinds = config.get("layer_types")
    if kinds:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
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
