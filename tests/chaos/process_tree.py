"""The processes of a run, by their parts in it.

Invariant: every process that is found here descends from the process that was started for the run. Its start time
distinguishes it from a later process with the same number, so no other process is ever signalled.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc")
ACTORS = {"_EngineActor": "engine", "RpcActor": "environment", "Controller": "controller"}
IDLE = "IDLE"


@dataclass(frozen=True)
class Process:
    """``born``: the start time in ticks of the kernel; ``title``: the command line."""

    number: int
    born: str
    title: str = field(default="", compare=False)

    def send(self, signal_: signal.Signals) -> bool:
        """Send a signal if it is still the same process; return whether it was."""
        if not self.alive:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.number, signal_)
            return True
        return False

    @property
    def alive(self) -> bool:
        """Whether it is running, and not a zombie that waits to be reaped."""
        found = _stat(self.number)
        return found is not None and found[19] == self.born and found[0] != "Z"


def target_of(title: str) -> str:
    """The run's part that a process is, by the title that Ray gives it; "" if it is none."""
    name, _, rest = title.partition("::")
    actor = rest.partition(".")[0].split(" ")[0].split("\0")[0]
    if name != "ray" or not actor or actor == IDLE or not (actor[0].isupper() or actor[0] == "_"):
        return ""
    return ACTORS.get(actor, "rank" if actor.endswith("Worker") else "")


def family(root: int) -> list[Process]:
    """A process and its descendants."""
    parents, found = _parents(), {root}
    grown = True
    while grown:
        more = {number for number, parent in parents.items() if parent in found} - found
        found |= more
        grown = bool(more)
    return [process for number in sorted(found) if (process := read(number)) is not None]


def read(number: int) -> Process | None:
    stat = _stat(number)
    if stat is None:
        return None
    try:
        title = (PROC / str(number) / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return None
    return Process(number, stat[19], title.rstrip("\0"))


def parts(processes: Iterable[Process]) -> dict[str, list[Process]]:
    """The processes by part."""
    found: dict[str, list[Process]] = {}
    for process in processes:
        if target := target_of(process.title):
            found.setdefault(target, []).append(process)
    return found


def marked(mark: str) -> list[Process]:
    """Processes with this string in their environment."""
    found = []
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes() and (
                process := read(int(folder.name))
            ):
                found.append(process)
    return found


def _parents() -> Mapping[int, int]:
    found = {}
    for folder in PROC.glob("[0-9]*"):
        if (stat := _stat(int(folder.name))) is not None:
            found[int(folder.name)] = int(stat[1])
    return found


def _stat(number: int) -> list[str] | None:
    """The fields of ``/proc/PID/stat`` after the name."""
    try:
        return (PROC / str(number) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
