"""What a run that has ended has left on the machine.

Invariant: only what can be told to be the run's is named: processes that descended from its program or carry its mark,
weights whose writer was one of them, and what lies in the temporary folder that it was given.
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
KEPT = ("ray", "torchinductor_", "orders.jsonl", "taken.jsonl")  # logs of a Ray without watchdog, torch's cache; ours


def leftovers(known: Iterable[Process], mark: str, temporary: Path) -> list[str]:
    """What is there ``PATIENCE_S`` after the end, in words; by then Ray's watchdog has to have ended as well."""
    known = list(known)
    left = _wait(lambda: _living(known, mark), PATIENCE_S)
    found = [f"process {p.number}: {p.title[:80]!r}" for p in left]
    return found + shared_weights({process.number for process in known}) + temporary_files(temporary)


def clean_up(known: Iterable[Process], mark: str) -> None:
    """Kill what is left. A watchdog, which then has nobody to wait for, first removes what it has to."""
    known = list(known)
    for process in _living(known, mark):
        if watchdog.__file__ not in process.title:
            process.send(signal.SIGKILL)
    for process in _wait(lambda: _living(known, mark), WATCHDOG_S):
        process.send(signal.SIGKILL)


def shared_weights(numbers: set[int]) -> list[str]:
    """Files of weights that one of these processes has written."""
    files = (f for folder in shared_memory.directories() for f in folder.glob(f"{shared_memory.PREFIX}*"))
    written = ((f, f.name.removeprefix(shared_memory.PREFIX).split("-")[0]) for f in files)
    return [f"shared memory {file}" for file, writer in written if writer.isdigit() and int(writer) in numbers]


def temporary_files(folder: Path) -> list[str]:
    """What was left in the folder for temporary files."""
    if not folder.is_dir():
        return []
    return [f"temporary {_seen(path)}" for path in sorted(folder.iterdir()) if not path.name.startswith(KEPT)]


def _seen(path: Path) -> str:
    """Its name, and some of what is in it."""
    inside = [each.name for each in path.rglob("*")][:3] if path.is_dir() else []
    return str(path) + (f" with {', '.join(inside)}" if inside else "")


def _living(known: list[Process], mark: str) -> list[Process]:
    found = {(p.number, p.born): p for p in [*known, *marked(mark)]}
    return [process for process in found.values() if process.lives]


def _wait(look: Callable[[], list[Process]], patience_s: float) -> list[Process]:
    deadline = time.monotonic() + patience_s
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found
