"""Memory and disk during a run: metrics, and a warning before the space runs out.

Invariant: readings are taken in a separate thread, every ``INTERVAL_S`` seconds; a step takes the
newest one and does not wait. A reading that fails is left out, and does not end the run. Processes
of other machines are not counted.

| who waits  | for what               | woken by                        |
|------------|------------------------|---------------------------------|
| the thread | the time of a reading  | the clock, or ``close``         |
| a step     | nothing                |                                 |
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from skyasync.callbacks import Metrics, RunExtension, Watched
from skyasync.run.logs import NAMES

log = logging.getLogger(__name__)

GIB = 1 << 30
PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
SHARED = Path("/dev/shm")
INTERVAL_S = 5.0  # between two readings
FOLDER_EVERY = 6  # readings of the folder's size are rarer: it may have many files
MARGIN = 1.05  # of a checkpoint's size: the next one may be a little larger
#: Names of processes in ``logs.NAMES`` -> names in metrics; others are "workers".
HOLDERS = {"engine": "engines", "environment": "environments", "controller": "controller"}

Processes = Mapping[str, Sequence[int]]


def of_this_job() -> dict[str, list[int]]:
    """Processes of this job's actors on this machine, by their names in metrics. Waits for Ray."""
    import ray
    from ray._private import state

    context = ray.get_runtime_context()
    actors = state.state.actor_table(None, context.worker.current_job_id, "ALIVE")
    processes = dict[str, list[int]]()
    for actor in actors.values():
        if actor["Address"]["NodeID"] == context.get_node_id():
            class_name = actor["ActorClassName"].rpartition(".")[2]
            name = HOLDERS.get(NAMES.get(class_name, ""), "workers")
            processes.setdefault(name, []).append(actor["Pid"])
    return processes


class ResourceMonitor(RunExtension):
    """Adds the newest reading to the metrics of each step.

    Args:
        run: the run's folder; ``checkpoints`` where checkpoints go.
        copies: a checkpoint is copied into memory before it is written (``trainer.ckpt_async``).
        processes: finds them; called in the thread.
    """

    def __init__(
        self,
        run: Path,
        checkpoints: Path,
        *,
        copies: bool = False,
        processes: Callable[[], Processes] = of_this_job,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._run = run
        self._checkpoints = checkpoints
        self._copies = copies
        self._processes = processes
        self._interval_s = interval_s
        self._newest: Metrics = {}
        self._folder_gib = 0.0
        # In bytes: the newest checkpoint, the run's folder without checkpoints at that time, and
        # its growth from one checkpoint to the next.
        self._checkpoint_bytes = 0
        self._rest_bytes = 0
        self._growth_bytes = 0
        self._warned: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory and disk", daemon=True)

    def on_start(self, trainer: Watched) -> None:
        if self._thread.ident is None:  # else a trainer before this one has started it
            self._thread.start()

    def on_step_end(self, trainer: Watched, metrics: Metrics) -> None:
        metrics |= self._newest

    def on_checkpoint(self, trainer: Watched, folder: Path) -> None:
        # In a thread: a checkpoint may have many files on a slow disk.
        thread = threading.Thread(
            target=self._measure, args=[folder], name="a checkpoint's size", daemon=True
        )
        thread.start()

    def close(self) -> None:
        """End the readings. Safe to call at any time."""
        self._ended.set()

    def _watch(self) -> None:
        count = 0
        while not self._ended.is_set():
            try:
                if count % FOLDER_EVERY == 0:
                    self._folder_gib = folder_bytes(self._run) / GIB
                self._newest = self.read()
                self._warn(self._newest)
            except Exception as error:  # Ray may be ending
                log.debug("no reading of memory and disk: %s", error)
            count += 1
            self._ended.wait(self._interval_s)

    def read(self) -> Metrics:
        """The current metrics, in GiB."""
        sizes: Metrics = {}
        for name, processes in self._processes().items():
            if name != "controller":
                family = with_descendants(processes)
                sizes[f"memory/{name}_gib"] = sum(map(own_bytes, family))
        # Without descendants, which may be the other processes.
        sizes["memory/controller_gib"] = own_bytes(os.getpid())
        # The object store is memory of the raylet, which need not be the parent of this process.
        raylet = int(os.environ.get("RAY_RAYLET_PID") or os.getppid())
        store = own_bytes(raylet, "RssShmem")
        if store:
            sizes["memory/object_store_gib"] = store
        with suppress(OSError):
            sizes["memory/shared_gib"] = shutil.disk_usage(SHARED).used
        free = free_memory()
        if free is not None:
            sizes["memory/free_gib"] = free
        existing = self._checkpoints
        for folder in (self._checkpoints, *self._checkpoints.parents):
            if folder.is_dir():  # before the first checkpoint its folder may not exist
                existing = folder
                break
        with suppress(OSError):
            sizes["disk/free_gib"] = shutil.disk_usage(existing).free
        metrics = {name: size / GIB for name, size in sizes.items()}
        metrics["disk/run_gib"] = self._folder_gib
        return metrics

    def _measure(self, folder: Path) -> None:
        """Measure a new checkpoint, and the growth of the run's folder besides checkpoints."""
        checkpoint_bytes = folder_bytes(folder)
        rest_bytes = folder_bytes(self._run)
        if folder.is_relative_to(self._run):
            rest_bytes -= folder_bytes(self._checkpoints)
        self._growth_bytes = 0
        if self._rest_bytes:  # not at the first checkpoint
            self._growth_bytes = max(0, rest_bytes - self._rest_bytes)
        self._checkpoint_bytes = checkpoint_bytes
        self._rest_bytes = rest_bytes

    def _warn(self, newest: Mapping[str, float]) -> None:
        """Warn once, until there is space again."""
        checkpoint_gib = MARGIN * self._checkpoint_bytes / GIB
        disk_gib = checkpoint_gib
        if self._checkpoints.is_relative_to(self._run):  # on the same disk
            disk_gib += self._growth_bytes / GIB
        memory_gib = checkpoint_gib if self._copies else 0.0
        self._warn_of("disk/free_gib", newest, disk_gib, f"disk at {self._checkpoints}")
        self._warn_of("memory/free_gib", newest, memory_gib, "memory")

    def _warn_of(
        self, name: str, newest: Mapping[str, float], needed_gib: float, title: str
    ) -> None:
        free_gib = newest.get(name, float("inf"))
        if free_gib >= needed_gib:
            self._warned.discard(name)
        elif name not in self._warned:
            self._warned.add(name)
            log.warning(
                "%.2f GiB of %s are free, and the next checkpoint needs %.2f GiB: make room, or it will fail",
                free_gib,
                title,
                needed_gib,
            )


def own_bytes(process: int, field: str = "RssAnon") -> int:
    """Resident memory that no other process shares with this one, in bytes; it grows with leaks.

    Args:
        field: another field of ``/proc/<process>/status``.
    """
    with suppress(OSError, ValueError):  # the process has ended
        for line in (PROC / str(process) / "status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) << 10  # the file has KiB
    return 0


def with_descendants(processes: Iterable[int]) -> list[int]:
    """The processes and their descendants, each once."""
    children = defaultdict(list)
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):  # the process has ended
            stat = (folder / "stat").read_text()
            # Fields follow the program's name, which is in parentheses and may have spaces.
            parent = int(stat.rpartition(")")[2].split()[1])
            children[parent].append(int(folder.name))
    family: list[int] = []
    pending = list(processes)
    while pending:
        process = pending.pop()
        if process not in family:
            family.append(process)
            pending += children[process]
    return family


def free_memory() -> int | None:
    """Free bytes of the machine, or of the container's limit if that is lower; None if unknown."""
    free = []
    with suppress(OSError, ValueError):
        for line in (PROC / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free.append(int(line.split()[1]) << 10)  # the file has KiB
    with suppress(OSError, ValueError, KeyError):
        limit = int((CGROUP / "memory.max").read_text())  # a ValueError for "max": no limit
        used = int((CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        # The kernel counts cached files as used, and drops inactive ones when memory is needed.
        used -= int(stat.get("inactive_file", 0))
        free.append(max(0, limit - used))
    return min(free, default=None)


def folder_bytes(folder: Path) -> int:
    """Bytes of a folder on its disk, without files that vanish during the count."""
    total = 0
    for subfolder, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                # Blocks of 512 bytes on every system: sparse files take less than their length.
                total += os.lstat(os.path.join(subfolder, name)).st_blocks * 512
    return total
