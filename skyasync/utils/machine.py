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

# Of version 2, and of version 1 of Linux's control groups; a container has one of them.
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Machine:
    """The GPUs and the memory of a machine.

    Attributes:
        gpus: their number, 0 for a machine without.
        gpu_memory: bytes of one GPU.
        host_memory: bytes of the host.
        card: the GPUs' name.
    """

    gpus: int
    gpu_memory: int
    host_memory: int
    card: str = ""


def this_machine() -> Machine:
    """This machine by ``nvidia-smi``, the kernel and the container's limit."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [] if visible in HIDDEN else _gpus()
    count = len(gpus)
    if visible is not None:
        count = min(count, len(visible.split(",")))
    # The smallest GPU: plans must fit into each of them.
    size, name = min(gpus, default=(0, ""))
    return Machine(count, size, _host_memory(), name)


def _gpus() -> list[tuple[int, str]]:
    """Bytes and name of each GPU."""
    query = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):  # no program, or no driver
        return []
    gpus = []
    for line in result.stdout.splitlines():
        mebibytes, _, name = line.partition(", ")
        if mebibytes.isdigit():
            gpus.append((int(mebibytes) << 20, name))
    return gpus


def _host_memory() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for file in map(Path, _CGROUP_LIMITS):
        limit = file.read_text().strip() if file.is_file() else ""
        if limit.isdigit():  # "max" is none
            total = min(total, int(limit))
    return total


# ---------------------------------------------------------------- network

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux's <bits/ioctls.h>
_ANY_PORT = 9  # "discard" by its number


def interface_towards(host: str) -> str:
    """The network interface by which this machine reaches a host; "" if it cannot be found.

    gloo would take the interface of this machine's name, which Debian and Ubuntu resolve to
    127.0.1.1: ranks of two nodes would not meet.
    """
    interfaces = [name for _, name in socket.if_nameindex()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
        try:
            connection.connect((host, _ANY_PORT))  # chooses a route, and sends nothing
        except OSError:
            return ""
        address = connection.getsockname()[0]
        if address.startswith("127."):
            return next((name for name in ("lo", "lo0") if name in interfaces), "")
        if sys.platform != "linux":
            return ""
        for name in interfaces:
            # Linux's struct ifreq: a name of at most 15 bytes, and from byte 20 an IPv4 address.
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(connection.fileno(), _ADDRESS_OF_INTERFACE, request)
            except OSError:  # the interface has no address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return ""


# ---------------------------------------------------------------- processes


class ProcessIdentity(NamedTuple):
    """The process of an actor, so that it can be ended from outside when it does not answer.

    Attributes:
        node: the name by Ray.
        number: the process id.
        born: the start in the kernel's ticks: process ids are used again.
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
