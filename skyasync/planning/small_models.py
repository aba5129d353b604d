"""A small model of the same family, for rehearsals: fewer layers, heads and experts, random weights.

Invariant: everything but sizes is the original's: class, vocabulary, tokenizer, chat template, processor, kinds of
layers, rotary embeddings. All kinds of layers that the original has are there.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyasync.config.model_files import config_file
from skyasync.errors import UserError
from skyasync.models.config import config_value
from skyasync.preflight.model import hub_folder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

HEAD_DIM = 16
HEADS, GROUPED_HEADS = 4, 2  # per rank of the tensor axis
MOST_EXPERTS = 8
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf", "*.h5")
_AT_MOST = {
    "num_experts": MOST_EXPERTS,
    "num_local_experts": MOST_EXPERTS,
    "n_routed_experts": MOST_EXPERTS,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def make_small_model(
    path: str, folder: Path, head: str, config_kwargs: Mapping[str, Any], tensor: int, seed: int
) -> int:
    """Write a small model of the family of ``path`` into ``folder``; returns its number of parameters.

    Args:
        path: a local folder, of which weights are not read, or a hub name.
        head: of the model's role (``skyasync.models.heads``).
        tensor: ranks that divide its heads.

    Raises:
        UserError: if the files cannot be found, or transformers cannot build a small model of this family.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar

    from skyasync.models.heads import HEADS as MODEL_HEADS

    source = files_of(path)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(*_WEIGHTS), dirs_exist_ok=True)
    kind = MODEL_HEADS[head].with_config(config_kwargs)
    config = kind.config(str(folder))
    try:
        shrink(config, tensor)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = kind.auto(config).from_config(config, dtype=torch.float32)
    except (ValueError, AttributeError, TypeError, KeyError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0]
        raise UserError(f"{path}: no small model of type {config.model_type} can be made ({first})") from error
    disable_progress_bar()
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def files_of(path: str) -> Path:
    """The folder with configuration and tokenizer; of a hub's model they are downloaded, weights are not."""
    if Path(path).is_dir():
        return Path(path)
    hub_folder(path)  # one line if the hub cannot be reached
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, ignore_patterns=[*_WEIGHTS, "*.msgpack", "*.onnx", "*.ot"]))
    except Exception as error:  # no network, no access: a model in the cache may still do
        if file := config_file(path):
            return file.parent
        raise UserError(f"{path}: its tokenizer cannot be downloaded: {error}") from error


def shrink(config: PreTrainedConfig, tensor: int = 1) -> None:
    """Make the model of a configuration small, in place."""
    text: Any = config.get_text_config()
    _shrink_language_model(text, tensor)
    if (tower := vars(config).get("vision_config")) is not None:
        _set(
            tower,
            depth=2,
            num_hidden_layers=2,
            hidden_size=HEADS * HEAD_DIM,
            embed_dim=HEADS * HEAD_DIM,
            num_heads=HEADS,
            num_attention_heads=HEADS,
            intermediate_size=2 * HEADS * HEAD_DIM,
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
    heads, kv_heads = text.num_attention_heads, config_value(text, "num_key_value_heads")
    hidden = HEADS * tensor * HEAD_DIM
    text.num_attention_heads, text.hidden_size = HEADS * tensor, hidden
    if kv_heads is not None:
        grouped = GROUPED_HEADS * tensor if kv_heads > 1 else 1
        text.num_key_value_heads = HEADS * tensor if kv_heads == heads else grouped
    _set(
        text,
        head_dim=HEAD_DIM,
        intermediate_size=2 * hidden,
        n_inner=2 * hidden,
        ffn_dim=2 * hidden,
        moe_intermediate_size=hidden,
        shared_expert_intermediate_size=hidden,
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
        linear_num_value_heads=HEADS * tensor,
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
    )
    for name, most in _AT_MOST.items():
        if isinstance(count := config_value(text, name), int):
            setattr(text, name, min(count, most))
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
    types, before = list(config_value(text, "layer_types") or [""]), text.num_hidden_layers
    count = min(before, max(2, *(types.index(kind) + 1 for kind in set(types)), 0))
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == before:
            setattr(text, name, value[:count])
    text.num_hidden_layers = count
