"""Which process is which.

Invariant: a process and a later one with the same number are told apart by the time at which they
began.
"""

from __future__ import annotations

from pathlib import Path


def born(process: int) -> str:
    """When a process began; empty if there is none, or only the record of one that has ended."""
    try:
        state, *numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        if state == "Z":
            return ""
        return numbers[18]
    except (OSError, ValueError, IndexError):
        return ""
