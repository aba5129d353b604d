"""How many numbers low-rank adapters have, from a model's shape and the names of the layers that get one.

Invariant: for the families that are known a test holds the count equal to that of peft's own modules.
"""

from __future__ import annotations

from skyasync.config.schema import LoraConfig
from skyasync.planning.shape import ModelShape

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
        return any(f".{name}".endswith(f".{asked.rpartition('.')[2]}") for asked in names)

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
