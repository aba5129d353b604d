"""What a rank answers when it has saved: its files, or why it could not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from skyasync.utils.manifest import Sums


@dataclass(frozen=True)
class Saved:
    """What one rank has written, by file name, as far as it knows, or why it could not."""

    files: Sums = field(default_factory=dict)
    problem: str = ""


def files_of(ranks: Sequence[Saved | None]) -> Sums:
    """The files of all ranks of a role.

    Raises:
        OSError: if one could not write.
    """
    found = [rank for rank in ranks if rank is not None]  # a worker of the user's own may say nothing
    for rank in found:
        if rank.problem:
            raise OSError(rank.problem)
    return {name: entry for rank in found for name, entry in rank.files.items()}
