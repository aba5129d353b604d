"""``torch.compile`` of a model's decoder layers, each by itself.

Invariant: what is computed is what the layers say, up to rounding. Layers alike share what is compiled, lengths may
change without compiling again, and FSDP's hooks and checkpointing stay outside.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable

import torch
from torch import nn

from skyasync.errors import UserError

KEY = "trainer.policy.torch_compile"


def compile_layers(layers: Iterable[nn.Module], device: torch.device) -> None:
    """Have each of them compiled when it is first called.

    Raises:
        UserError: if nothing here could compile them.
    """
    check_compiler(device)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def check_compiler(device: torch.device) -> None:
    """Raises ``UserError`` without a C++ compiler for a CPU, or Triton for a GPU."""
    if device.type == "cpu":
        asked = os.environ.get("CXX")
        if not any(shutil.which(name) for name in ([asked] if asked else ["g++", "clang++"])):
            raise UserError(
                f"{KEY}=true compiles with a C++ compiler on a CPU, and there is no {asked or 'g++ or clang++'} here: "
                f"install one, name it in the environment's CXX, or leave the key out"
            )
        return
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise UserError(f"{KEY}=true needs Triton on a GPU, which is not installed here: {error}") from error
