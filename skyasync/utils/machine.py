"""The memory of this machine and of its GPUs, without torch."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 1 << 60
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Machine:
    """Bytes of one GPU and of one host's memory; ``gpus`` in all, 0 for a machine without; ``card`` is their name."""

    gpus: int
    gpu_memory: int
    host_memory: int
    card: str = ""


def this_machine() -> Machine:
    """What is here, without torch: NVIDIA's own tool, the kernel, and the container's limit."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [] if visible == "" else _gpus()
    count = len(gpus) if visible is None else min(len(gpus), len(visible.split(",")))
    size, card = min(gpus, default=(0, ""))
    return Machine(count, size, _host_memory(), card)


def _gpus() -> list[tuple[int, str]]:
    query = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
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
