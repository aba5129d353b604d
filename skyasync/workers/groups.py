"""How the ranks of a model reach each other.

Invariant: whatever tensors they exchange, there is a backend of torch for the device that these lie on.
"""

from __future__ import annotations

import socket

from skyasync.workers.offload import PARAMETERS


def process_group_backend(device_type: str, offloads: str) -> str:
    """NCCL takes tensors of GPUs alone; weights that lie on the host are gathered by gloo."""
    if device_type != "cuda":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if offloads == PARAMETERS else "nccl"


def loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return "lo" if "lo" in names else "lo0"
