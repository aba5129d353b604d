"""Small models of a family, with random weights, and every kind of layer that the original has."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.utils.logging import disable_progress_bar

from skyasync.errors import UserError
from skyasync.models.config import EXPERTS, config_value, with_layers
from skyasync.models.heads import HEADS

HEAD_DIM = 32  # the smallest that vLLM computes on CPUs
ATTENTION_HEADS = 4  # per rank of the tensor dimension
GROUPED_HEADS = 2
MOST_EXPERTS = 8

WEIGHT_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.h5",
)
LIMITS = dict.fromkeys(EXPERTS, MOST_EXPERTS) | {
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
}
LAYER_TYPES = ("layer_types", "mlp_layer_types", "indexer_types")  # lists, an entry per layer


def make_small_model(
    source: Path, folder: Path, head: str, config_kwargs: Mapping[str, Any], tensor: int, seed: int
) -> int:
    """Write a small model of the family of ``source`` into ``folder``; returns its number of
    parameters.

    It has fewer layers, heads and experts, and random weights. All else is the original's: class,
    tokenizer, template, processor, vocabulary, rotary embeddings. All kinds of layers that the
    original has are there.

    Args:
        source: a folder, of which weights are not read.
        head: of the model's role (``skyasync.models.heads``).
        tensor: ranks that divide its heads.

    Raises:
        UserError: if transformers cannot build a small model of this family.
    """
    shutil.copytree(
        source, folder, ignore=shutil.ignore_patterns(*WEIGHT_FILES), dirs_exist_ok=True
    )
    model_head = HEADS[head].with_config(config_kwargs)
    config = model_head.config(str(folder))
    try:
        shrink(config, tensor)
        # The process's random state stays as it is.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = model_head.auto(config).from_config(config, dtype=torch.float32)
    except (ValueError, AttributeError, TypeError, KeyError, RuntimeError) as error:
        line = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{source}: no small model of type {config.model_type} can be made ({line})"
        ) from error
    disable_progress_bar()
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def shrink(config: PreTrainedConfig, tensor: int = 1) -> None:
    """Make the model of a configuration small, in place."""
    text: Any = config.get_text_config()
    _shrink_language_model(text, tensor)
    tower = vars(config).get("vision_config")
    if tower is not None:
        _set(
            tower,
            depth=2,
            num_hidden_layers=2,
            hidden_size=GROUPED_HEADS * HEAD_DIM,
            embed_dim=GROUPED_HEADS * HEAD_DIM,
            num_heads=GROUPED_HEADS,
            num_attention_heads=GROUPED_HEADS,
            intermediate_size=2 * GROUPED_HEADS * HEAD_DIM,
            out_hidden_size=text.hidden_size,
            deepstack_visual_indexes=[1],
            fullatt_block_indexes=[1],
        )


def _set(config: Any, **values: object) -> None:  # noqa: ANN401
    """Set what the family has."""
    for name, value in values.items():
        if config_value(config, name) is not None:
            setattr(config, name, value)


def _shrink_language_model(text: Any, tensor: int) -> None:  # noqa: ANN401
    heads = text.num_attention_heads
    kv_heads = config_value(text, "num_key_value_heads")
    hidden = ATTENTION_HEADS * tensor * HEAD_DIM
    text.num_attention_heads = ATTENTION_HEADS * tensor
    text.hidden_size = hidden
    if kv_heads is not None:
        grouped = GROUPED_HEADS * tensor if kv_heads > 1 else 1
        if kv_heads == heads:
            text.num_key_value_heads = ATTENTION_HEADS * tensor
        else:
            text.num_key_value_heads = grouped
    _set(
        text,
        head_dim=HEAD_DIM,
        intermediate_size=hidden // 2,
        n_inner=hidden // 2,
        ffn_dim=hidden // 2,
        moe_intermediate_size=hidden // 2,
        shared_expert_intermediate_size=hidden // 2,
        query_pre_attn_scalar=HEAD_DIM,
        # multi-head latent attention
        q_lora_rank=2 * HEAD_DIM,
        kv_lora_rank=HEAD_DIM,
        qk_nope_head_dim=HEAD_DIM,
        qk_rope_head_dim=HEAD_DIM,
        qk_head_dim=2 * HEAD_DIM,
        v_head_dim=HEAD_DIM,
        # linear attention
        linear_num_key_heads=GROUPED_HEADS * tensor,
        linear_num_value_heads=ATTENTION_HEADS * tensor,
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
    )
    for name, limit in LIMITS.items():
        count = config_value(text, name)
        if isinstance(count, int):
            setattr(text, name, min(count, limit))
    _shrink_rotary_embeddings(config_value(text, "rope_parameters", {}))
    _remove_layers(text)


def _shrink_rotary_embeddings(rope: dict[str, Any]) -> None:
    half = HEAD_DIM // 2
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        for name in ("short_factor", "long_factor"):
            if name in part:
                part[name] = part[name][:half]
        if "mrope_section" in part:
            part["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


def _remove_layers(text: Any) -> None:  # noqa: ANN401
    """Keep the first layers, so many that every kind of them is there."""
    needed = 2
    for name in LAYER_TYPES:
        types = config_value(text, name, [])
        for kind in set(types):
            needed = max(needed, types.index(kind) + 1)
    with_layers(text, min(text.num_hidden_layers, needed))
