"""How the ranks of a model reach each other.

Invariant: whatever tensors they exchange, there is a backend of torch for the device that these lie on.
"""

from __future__ import annotations

import socket

from skyasync.workers.offload import PARAMETERS


def process_group_backend(device_type: str, offloads: str, *, takes_turns: bool = False) -> str:
    """NCCL takes tensors of GPUs alone; weights that lie on the host are gathered by gloo.

    Args:
        takes_turns: they lie there while engines have the GPUs, and one of these may come late.
    """
    if device_type != "cuda":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if offloads == PARAMETERS or takes_turns else "nccl"


def loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return "lo" if "lo" in names else "lo0"
