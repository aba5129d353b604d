"""Memory and disk of a run while it goes on: metrics, and a warning before the space runs out.

Invariant: readings are taken in a thread of their own, every ``INTERVAL_S`` seconds; a step takes
the newest one and waits for none. A reading that fails is left out, and never ends the run.
Processes of other machines are not seen.

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

from skyasync.callbacks import RunExtension, Watched
from skyasync.run.logs import NAMES

log = logging.getLogger(__name__)

GIB = 1 << 30
PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
SHARED = Path("/dev/shm")
INTERVAL_S = 5.0
FOLDER_EVERY = 6  # readings: a run's folder may have many files
MARGIN = 1.05  # of a checkpoint's size: the next one may be a little larger
HOLDERS = {"engine": "engines", "environment": "environments", "controller": "controller"}

Processes = Mapping[str, Sequence[int]]


def of_this_job() -> dict[str, list[int]]:
    """Processes of this job's actors on this machine, by what they are counted as. Asks Ray, and
    waits for it."""
    import ray
    from ray._private import state

    context = ray.get_runtime_context()
    processes = dict[str, list[int]]()
    for actor in state.state.actor_table(None, context.worker.current_job_id, "ALIVE").values():
        if actor["Address"]["NodeID"] == context.get_node_id():
            name = HOLDERS.get(NAMES.get(actor["ActorClassName"].rpartition(".")[2], ""), "workers")
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
        self._newest: dict[str, float] = {}
        self._folder = 0.0
        # of the newest checkpoint; run folder without; between two
        self._size = 0
        self._previous_rest = 0
        self._grown = 0
        self._warned: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory and disk", daemon=True)

    def on_start(self, trainer: Watched) -> None:
        if self._thread.ident is None:  # another trainer may go on where one has ended
            self._thread.start()

    def on_step_end(self, trainer: Watched, metrics: dict[str, float]) -> None:
        metrics |= self._newest

    def on_checkpoint(self, trainer: Watched, folder: Path) -> None:
        threading.Thread(
            target=self._measure, args=[folder], name="a checkpoint's size", daemon=True
        ).start()

    def close(self) -> None:
        """No more readings. Safe to call at any time."""
        self._ended.set()

    def _watch(self) -> None:
        count = 0
        while not self._ended.is_set():
            try:
                if count % FOLDER_EVERY == 0:
                    self._folder = folder_bytes(self._run) / GIB
                self._newest = self.read()
                self._warn(self._newest)
            except Exception as error:  # of Ray, which may be ending
                log.debug("no reading of memory and disk: %s", error)
            count += 1
            self._ended.wait(self._interval_s)

    def read(self) -> dict[str, float]:
        """The metrics as they are now."""
        sizes: dict[str, float] = {}
        for name, processes in {**self._processes(), "controller": [os.getpid()]}.items():
            counted = with_descendants(processes) if name != "controller" else processes
            sizes[f"memory/{name}_gib"] = sum(map(own_bytes, counted))
        raylet = int(
            os.environ.get("RAY_RAYLET_PID") or os.getppid()
        )  # it need not have started us
        store = own_bytes(raylet, "RssShmem")
        if store:
            sizes["memory/object_store_gib"] = store
        with suppress(OSError):
            sizes["memory/shared_gib"] = shutil.disk_usage(SHARED).used
        free = free_memory()
        if free is not None:
            sizes["memory/free_gib"] = free
        existing = next(
            (f for f in (self._checkpoints, *self._checkpoints.parents) if f.is_dir()),
            self._checkpoints,
        )
        with suppress(OSError):
            sizes["disk/free_gib"] = shutil.disk_usage(existing).free
        return {name: size / GIB for name, size in sizes.items()} | {"disk/run_gib": self._folder}

    def _measure(self, folder: Path) -> None:
        size = folder_bytes(folder)
        rest = folder_bytes(self._run)
        if folder.is_relative_to(self._run):
            rest -= folder_bytes(self._checkpoints)
        self._grown = max(0, rest - self._previous_rest) if self._previous_rest else 0
        self._size = size
        self._previous_rest = rest

    def _warn(self, newest: Mapping[str, float]) -> None:
        """Warn once, until there is space again."""
        size = MARGIN * self._size / GIB
        if self._checkpoints.is_relative_to(self._run):
            grown = self._grown / GIB
        else:
            grown = 0.0
        checks = {
            "disk/free_gib": (size + grown, f"disk at {self._checkpoints}"),
            "memory/free_gib": (size if self._copies else 0.0, "memory"),
        }
        for name, (needed, where) in checks.items():
            free = newest.get(name, float("inf"))
            if free >= needed:
                self._warned.discard(name)
            elif name not in self._warned:
                self._warned.add(name)
                log.warning(
                    "%.2f GiB of %s are free, and the next checkpoint needs %.2f GiB: make room, or it will fail",
                    free,
                    where,
                    needed,
                )


def own_bytes(process: int, field: str = "RssAnon") -> int:
    """Resident memory that no other process shares with this one: what grows when something leaks.

    Args:
        field: another one of ``/proc/<process>/status``.
    """
    with suppress(OSError, ValueError):
        for line in (PROC / str(process) / "status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) << 10
    return 0


def with_descendants(processes: Iterable[int]) -> list[int]:
    """These processes and all that they have started."""
    children = defaultdict(list)
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children[parent].append(int(folder.name))
    family = dict[int, None]()
    left = list(processes)
    while left:
        process = left.pop()
        if process not in family:
            family[process] = None
            left += children[process]
    return list(family)


def free_memory() -> int | None:
    """Bytes that processes here may still take: of the machine, or of their container's limit if
    that is lower."""
    limits = []
    with suppress(OSError, ValueError):
        lines = dict(
            line.split(":", 1)
            for line in (PROC / "meminfo").read_text().splitlines()
            if ":" in line
        )
        limits.append(int(lines["MemAvailable"].split()[0]) << 10)
    with suppress(OSError, ValueError, KeyError):
        limit = int((CGROUP / "memory.max").read_text())  # "max" is none
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        used = int((CGROUP / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
        limits.append(max(0, limit - used))
    return min(limits, default=None)


def folder_bytes(folder: Path) -> int:
    """Bytes that a folder takes on its disk, without files that vanish during the count."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total
