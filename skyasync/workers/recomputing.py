"""What a backward pass recomputes of a layer.

Invariant: it changes what is kept, never what is computed: the gradient is bit for bit that of keeping everything.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

_ATEN = torch.ops.aten
KEPT = (
    _ATEN.mm.default,
    _ATEN.mm.dtype,
    _ATEN.addmm.default,
    _ATEN._grouped_mm.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
)
"""Operations whose results are kept: they take nearly all of a layer's time."""


def checkpointing_options(*, selective: bool) -> dict[str, Any]:
    """For ``gradient_checkpointing_enable`` of transformers' models.

    Args:
        selective: keep what ``KEPT`` operations gave; else nothing but a layer's input.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, list(KEPT))
    return options
