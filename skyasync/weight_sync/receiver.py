"""What holds weights for the engines of a node on which the policy's rank 0 is not.

Invariant: it tells of a place only when all bytes of it have come, and, of memory that is lent (``lent``), when what
lies there has the digests of what was sent; a file has its digests in it, by which engines prove what they have loaded.
No engine reads what is being written: lent buffers take turns as rank 0's do, and a file that is carried is a new one.

    rank 0's memory ──pieces──▶ Receiver ──▶ a buffer without a name ──▶ the engines of its node, by /proc/PID/fd/N

Plain Python: ``skyasync.workers.across`` makes an actor of it on each such node.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from io import FileIO
from typing import Any

from skyasync.weight_sync.lent import Bytes, Kinds, Lender
from skyasync.weight_sync.update import WeightSyncError


class Receiver:
    """Args: computed_on: as of the trainer's ``Lender``."""

    def __init__(self, *, computed_on: bool) -> None:
        self._lender = Lender(computed_on=computed_on)
        self._file: FileIO | None = None  # the one that was carried last
        self._into, self._missing, self._lends = -1, 0, False

    def begin(self, size: int, kinds: Kinds | None) -> None:
        """So many bytes will come: of a lender's buffer with these kinds, or (None) of a file."""
        self._lends = kinds is not None
        if kinds is not None:
            self._into = self._lender.room(kinds)
        else:
            self._drop()
            self._file = FileIO(os.memfd_create("skyasync-weights"), "r+")
            self._into = self._file.fileno()
        self._missing = size

    def take(self, first: int, piece: Bytes) -> None:
        """Bytes, which belong at ``first``. Each comes once."""
        left = piece.data
        while left:
            written = os.pwrite(self._into, left, first)
            first, left = first + written, left[written:]
        self._missing -= piece.nbytes

    def end(self, digests: Mapping[str, str]) -> dict[str, Any]:
        """All have come; what the engines of this node are told.

        Raises:
            WeightSyncError: if that is not so, or they are not what was sent.
        """
        if self._missing:
            raise WeightSyncError(f"weight sync: {self._missing} bytes are missing at the end of the transfer")
        return self._lender.arrived(digests) if self._lends else {"path": self._path}

    def settle(self, path: str) -> None:
        """A hand-over from this place has ended: engines compute on what was lent, and nobody reads a file any more."""
        if not self._lender.settle(path) and path == self._path:
            self._drop()

    def pid(self) -> int:
        """Answers (with its process's number) once the calls before it are done."""
        return os.getpid()

    @property
    def _path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}" if self._file else ""

    def _drop(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
