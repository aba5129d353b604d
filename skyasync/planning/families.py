"""How the model families of transformers differ, as far as memory goes: names in config.json, norms, biases, experts.

Invariant: a test holds the parameters counted here equal to those of transformers' own modules, and the tensors saved
for the backward pass equal to what autograd saves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
