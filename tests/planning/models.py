"""Small configurations of every family."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

COMMON = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": COMMON | {"tie_word_embeddings": False},
    "mistral": COMMON,
    "qwen2": COMMON | {"tie_word_embeddings": False},
    "qwen3": COMMON | {"tie_word_embeddings": True},
    "gemma": COMMON,
    "gemma2": COMMON,
    "gemma3_text": COMMON,
    "gpt2": {
        "vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "attn_pdrop": 0.0,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    },
    "mixtral": COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": COMMON | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
    "qwen2_moe": COMMON
    | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 80,
    },
    "phi3": COMMON | {"pad_token_id": 0},
    "olmo2": COMMON,
}  # fmt: skip


def configuration(name: str, **changes: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(name, **(MODELS[name] | changes))
