"""A model's weights and its optimizer's moments, moved to the host and back, or kept there.

Invariant: bits are kept, and so are the parameter objects, which are the optimizer's keys.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

OPTIMIZER, PARAMETERS = "optimizer", "parameters"
"""What ``cpu_offload`` keeps in host memory: the moments between steps, or all that is sharded, always."""

HOST = torch.device("cpu")


def offload_policy(kind: str, device: torch.device) -> OffloadPolicy:
    """FSDP2's, of weights that are computed with on ``device``."""
    return CPUOffloadPolicy(pin_memory=device.type == "cuda") if kind == PARAMETERS else OffloadPolicy()


def place(model: nn.Module, kind: str, device: torch.device) -> None:
    """Everything where a call finds it: on the device, or all but the weights, which FSDP2 brings from the host."""
    if kind != PARAMETERS:
        model.to(device)
        return
    model.to(HOST)
    move_buffers(model, device)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved(buffer, device)


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
