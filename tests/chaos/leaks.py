"""Processes and files that a run left on the machine after its end.

Invariant: only what belongs to the run is listed: processes that descended from its program or have its mark in their
environment, weights that one of these processes wrote, and the contents of the run's temporary folder.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from skyasync.run import watchdog
from skyasync.weight_sync.transfers import file as shared_memory
from tests.chaos.process_tree import Process, marked

PATIENCE_S = 30.0
WATCHDOG_S = 15.0
#: Logs of a Ray cluster without watchdog, torch's cache, and our scratch folders.
KEPT = ("ray", "torchinductor_", "orders.jsonl", "taken.jsonl")


def leftovers(known: Iterable[Process], mark: str, temporary: Path) -> list[str]:
    """What is left ``PATIENCE_S`` after the end, in words; Ray's watchdog has to end within this time, too."""
    known = list(known)
    left = _wait(lambda: _running(known, mark), PATIENCE_S)
    found = [f"process {p.number}: {p.title[:80]!r}" for p in left]
    return (
        found + shared_weights({process.number for process in known}) + temporary_files(temporary)
    )


def clean_up(known: Iterable[Process], mark: str) -> None:
    """Kill remaining processes. A watchdog first removes the files that it is responsible for."""
    known = list(known)
    for process in _running(known, mark):
        if watchdog.__file__ not in process.title:
            process.send(signal.SIGKILL)
    for process in _wait(lambda: _running(known, mark), WATCHDOG_S):
        process.send(signal.SIGKILL)


def shared_weights(numbers: set[int]) -> list[str]:
    """Weight files that one of these processes wrote."""
    files = (
        f for folder in shared_memory.directories() for f in folder.glob(f"{shared_memory.PREFIX}*")
    )
    written = ((f, f.name.removeprefix(shared_memory.PREFIX).split("-")[0]) for f in files)
    return [
        f"shared memory {file}"
        for file, writer in written
        if writer.isdigit() and int(writer) in numbers
    ]


def temporary_files(folder: Path) -> list[str]:
    """Files that are left in the folder for temporary files."""
    if not folder.is_dir():
        return []
    return [
        f"temporary {_seen(path)}"
        for path in sorted(folder.iterdir())
        if not path.name.startswith(KEPT)
    ]


def _seen(path: Path) -> str:
    """The name of a folder, and some of its contents."""
    inside = [each.name for each in path.rglob("*")][:3] if path.is_dir() else []
    return str(path) + (f" with {', '.join(inside)}" if inside else "")


def _running(known: list[Process], mark: str) -> list[Process]:
    found = {(p.number, p.born): p for p in [*known, *marked(mark)]}
    return [process for process in found.values() if process.alive]


def _wait(look: Callable[[], list[Process]], patience_s: float) -> list[Process]:
    deadline = time.monotonic() + patience_s
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found
