"""Models that ``families`` does not know: transformers builds them without memory, and their parameters are counted.

Invariant: the parameters are exact; what is saved for the backward pass is taken to be Llama's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from skyasync.errors import UserError
from skyasync.planning.families import Family
from skyasync.planning.shape import ModelShape, known_shape


def unknown_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """Raises ``UserError`` if transformers has no causal language model for it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(config)
    kind = settings.pop("model_type", None)
    if not kind:
        raise UserError(f"{name}: its config.json names no model_type, so its memory cannot be planned")
    try:
        built = AutoConfig.for_model(kind, **settings)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(built, attn_implementation="sdpa")
    except (ValueError, AttributeError, TypeError) as error:
        first = str(error).partition("\n")[0]
        raise UserError(f"{name}: transformers has no causal language model of type {kind!r} ({first})") from error
    layers = [m for m in model.modules() if type(m).__name__ in set(model._no_split_modules or ())]
    in_layers = sum(p.numel() for layer in layers for p in layer.parameters())
    total = sum(p.numel() for p in model.parameters())
    shape = known_shape(built.get_text_config().to_dict(), name, Family())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return replace(shape, layer=in_layers // shape.layers, root=total - in_layers, tied=tied)
