"""This machine: its memory and its GPUs, without torch, and the identity of an actor's process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from skyasync.processes import born

HIDDEN = ("", "-1")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs."""

_NO_LIMIT = 1 << 60
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Machine:
    """Bytes of one GPU and of one host's memory; ``gpus`` in all, 0 for a machine without; ``card``
    is their name."""

    gpus: int
    gpu_memory: int
    host_memory: int
    card: str = ""


def this_machine() -> Machine:
    """This machine, as ``nvidia-smi``, the kernel and the container's limit describe it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [] if visible in HIDDEN else _gpus()
    if visible is None:
        count = len(gpus)
    else:
        count = min(len(gpus), len(visible.split(",")))
    size, card = min(gpus, default=(0, ""))
    return Machine(count, size, _host_memory(), card)


def _gpus() -> list[tuple[int, str]]:
    query = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    lines = (line.partition(", ") for line in answer.splitlines())
    return [(int(size) << 20, name) for size, _, name in lines if size.isdigit()]


def _host_memory() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for file in map(Path, _CGROUP_LIMITS):
        if file.is_file() and (text := file.read_text().strip()).isdigit():
            total = min(total, int(text), _NO_LIMIT)
    return total


# ---------------------------------------------------------------- network

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux's <bits/ioctls.h>
_ANY_PORT = 9  # nothing is sent there


def interface_towards(host: str) -> str:
    """Name the network interface by which this machine reaches a host; "" if that cannot be told.

    gloo otherwise takes the interface of this machine's own name, which Debian and Ubuntu resolve
    to 127.0.1.1: ranks of two nodes would not meet.
    """
    interfaces = [name for _, name in socket.if_nameindex()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
        try:
            connection.connect((host, _ANY_PORT))  # chooses a route
        except OSError:
            return ""
        address = connection.getsockname()[0]
        if address.startswith("127."):
            return next((name for name in ("lo", "lo0") if name in interfaces), "")
        if sys.platform != "linux":
            return ""
        for name in interfaces:
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(connection.fileno(), _ADDRESS_OF_INTERFACE, request)
            except OSError:  # the interface has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


# ---------------------------------------------------------------- processes


class ProcessIdentity(NamedTuple):
    """Which process an actor is, so that it can be ended from outside when it answers nothing any
    more.

    ``node``: Ray's. ``born``: in the kernel's ticks.
    """

    node: str
    number: int
    born: str

    @classmethod
    def mine(cls) -> ProcessIdentity:
        """The identity of the process that calls this, an actor's."""
        import ray

        return cls(ray.get_runtime_context().get_node_id(), os.getpid(), born(os.getpid()))

    def end(self) -> None:
        """SIGKILL, which also ends a process that is stopped or stuck; on this machine only."""
        import ray

        if self.node == ray.get_runtime_context().get_node_id() and born(self.number) == self.born:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.number, signal.SIGKILL)
