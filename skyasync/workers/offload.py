"""A model's weights and its optimizer's moments, moved to the host and back.

Invariant: bits are kept, and so are the parameter objects, which are the optimizer's keys.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def move_weights(model: nn.Module, device: torch.device) -> None:
    """Parameters, buffers and gradients. FSDP2 first lets go of what it has gathered, and notes its shards anew."""
    model._apply(lambda tensor: moved(tensor, device))


def move_moments(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """All of the optimizer's state, steps included: the fused AdamW wants them where the parameters are."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = moved(value, device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device already: the tensor itself."""
    return tensor.to(device)
