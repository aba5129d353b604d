"""Processes and files that a run has left on the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util import placement_group_table

from skyasync.weight_sync.transfers import file as shared_memory

PATIENCE_S = 20.0  # Ray kills actors after the call that requests it has returned


def of_the_cluster() -> list[str]:
    """Actors, their processes and placement groups of this process's Ray cluster, and weights that they wrote."""
    groups = [
        f"placement group {g['name']}"
        for g in placement_group_table().values()
        if g["state"] != "REMOVED"
    ]
    actors = ray._private.state.actors().values()
    weights = [
        name for name in _shared_weights() if _writer(name) in {actor["Pid"] for actor in actors}
    ]
    running = [f"actor {a['ActorClassName']} {a['State']}" for a in actors if a["State"] != "DEAD"]
    processes = [f"process of {a['ActorClassName']}" for a in actors if _has_a_process(a)]
    return groups + running + processes + weights


def of_processes(mark: str) -> list[str]:
    """Running processes with ``mark`` in their environment, and shared weights."""
    found = [p for p in Path("/proc").glob("[0-9]*") if mark.encode() in _read(p / "environ")]
    return [f"process {p.name}: {_read(p / 'cmdline')!r}" for p in found] + _shared_weights()


def none_soon(look: Callable[[], list[str]], patience_s: float = PATIENCE_S) -> list[str]:
    """What ``look`` still finds after a while; returns [] as soon as it finds nothing."""
    deadline = time.monotonic() + patience_s
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _shared_weights() -> list[str]:
    """Files whose writer has ended; files of other runs on the machine have a running writer."""
    files = (
        f for folder in shared_memory.directories() for f in folder.glob(f"{shared_memory.PREFIX}*")
    )
    return [f.name for f in files if not is_running(_writer(f.name))]


def _writer(file: str) -> int:
    """The process that wrote it."""
    return int(file.removeprefix(shared_memory.PREFIX).split("-")[0])


def _has_a_process(actor: Mapping[str, Any]) -> bool:
    """Not a process that got the number of an actor's process after that had ended: numbers are reused."""
    if not actor["Pid"] or not is_running(actor["Pid"]):
        return False
    try:
        born = psutil.Process(actor["Pid"]).create_time()
    except psutil.Error:
        return False
    return not actor["EndTime"] or born * 1000 < actor["EndTime"]


def is_running(process_id: int) -> bool:
    """Whether it is running, and not a zombie that waits to be reaped."""
    status = _read(Path("/proc") / str(process_id) / "stat")
    return bool(status) and status.rpartition(b")")[2].split()[0] != b"Z"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # ended, or another user's
        return b""
