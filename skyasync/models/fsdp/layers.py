"""Decoder layers of a model: compiled, and recomputed in the backward pass.

Invariant: neither changes what is computed: recomputing is bitwise, compiling up to rounding. Equal layers share
compiled code, lengths may change without compiling again, and FSDP's hooks and checkpointing stay outside.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from skyasync.errors import UserError
from skyasync.models.token_model import TokenModel


def decoder_layers(wrapper: TokenModel) -> list[nn.Module]:
    """By the names of classes that transformers would not split; FSDP gives each sharded one a class of its own."""
    names = set(wrapper.model._no_split_modules or ())
    return [m for m in wrapper.modules() if any(base.__name__ in names for base in type(m).__mro__)]


KEY = "trainer.policy.torch_compile"


def compile_layers(layers: Iterable[nn.Module], device: torch.device) -> None:
    """Compile each layer at its first call.

    Raises:
        UserError: without a compiler.
    """
    check_compiler(device)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def check_compiler(device: torch.device) -> None:
    """Raises ``UserError`` without a C++ compiler for a CPU, or Triton for a GPU."""
    if device.type == "cpu":
        compiler = os.environ.get("CXX")
        if not any(shutil.which(name) for name in ([compiler] if compiler else ["g++", "clang++"])):
            raise UserError(
                f"{KEY}=true compiles with a C++ compiler on a CPU, and there is no {compiler or 'g++ or clang++'} "
                f"here: install one, name it in the environment's CXX, or leave the key out"
            )
        return
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise UserError(f"{KEY}=true needs Triton on a GPU, which is not installed here: {error}") from error


_ATEN = torch.ops.aten
SAVED = (
    _ATEN.mm.default,
    _ATEN.mm.dtype,
    _ATEN.addmm.default,
    _ATEN._grouped_mm.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
)
"""Operations whose results are not recomputed: they take nearly all of a layer's time."""


def checkpointing_options(*, selective: bool) -> dict[str, Any]:
    """For ``gradient_checkpointing_enable`` of transformers' models.

    Args:
        selective: save the results of ``SAVED`` operations; else only a layer's input.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, list(SAVED))
    return options
