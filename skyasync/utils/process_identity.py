"""Which process an actor is, so that it can be ended from outside when it answers nothing any more.

Invariant: a process is told from another that has got its number since by when it began.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import NamedTuple

import ray


class ProcessIdentity(NamedTuple):
    """``node``: Ray's. ``born``: in the kernel's ticks."""

    node: str
    number: int
    born: str

    @classmethod
    def mine(cls) -> ProcessIdentity:
        """Of the actor's process that asks."""
        return cls(ray.get_runtime_context().get_node_id(), os.getpid(), born(os.getpid()))

    def end(self) -> None:
        """SIGKILL, which also ends a process that is stopped or stuck; on this machine only."""
        if self.node == ray.get_runtime_context().get_node_id() and born(self.number) == self.born:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.number, signal.SIGKILL)


def born(process: int) -> str:
    """When a process began; empty if there is none, or only the record of one that has ended."""
    try:
        state, *numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "" if state == "Z" else numbers[18]
    except (OSError, ValueError, IndexError):
        return ""
