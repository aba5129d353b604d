"""The machine that a plan is for: the one here, or another that flags describe."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from skyasync.errors import UserError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT]?)(i?)B?)?", re.IGNORECASE)
_NO_LIMIT = 1 << 60
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Machine:
    """Bytes of one GPU and of one host's memory; ``gpus`` in all, 0 for a machine without."""

    gpus: int
    gpu_memory: int
    host_memory: int


def this_machine() -> Machine:
    """What is here, without torch: NVIDIA's own tool, the kernel, and the container's limit."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    sizes = [] if visible == "" else _gpu_sizes()
    count = len(sizes) if visible is None else min(len(sizes), len(visible.split(",")))
    return Machine(count, min(sizes, default=0), _host_memory())


def parse_size(text: str, flag: str) -> int:
    """Bytes of ``80GiB``, ``512G``, ``24000MB``.

    Raises:
        UserError: naming ``flag``.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match or not float(match[1]):
        raise UserError(f"{flag} {text}: not a size: write for example {flag} 80GiB, or 80GB for powers of ten")
    unit = (match[2] or "").upper()
    scale = _UNITS[unit] if not match[3] else 1024 ** (" KMGT".index(unit) if unit else 0)
    return int(float(match[1]) * scale)


def _gpu_sizes() -> list[int]:
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) << 20 for line in answer.split() if line.isdigit()]


def _host_memory() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for file in map(Path, _CGROUP_LIMITS):
        if file.is_file() and (text := file.read_text().strip()).isdigit():
            total = min(total, int(text), _NO_LIMIT)
    return total
