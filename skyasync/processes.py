"""Identity of processes.

Invariant: a process and a later one with the same number differ in the time at which they began.
"""

from __future__ import annotations

from pathlib import Path


def born(process: int) -> str:
    """The time at which a process began, in clock ticks since boot; "" if it has ended."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
        # Fields follow the program's name, which is in parentheses and may have spaces.
        fields = stat.rpartition(")")[2].split()
        if fields[0] == "Z":  # a zombie: only its record is left
            return ""
        return fields[19]
    except (OSError, ValueError, IndexError):
        return ""
