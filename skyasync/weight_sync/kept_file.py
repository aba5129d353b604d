"""A file of weights that stays from one hand-over to the next, for an engine that comes late.

Invariant: a file that is kept has no name (``named`` ones have), so the kernel frees it with the process that keeps
it, however that one ends.
"""

from __future__ import annotations

import os

from skyasync.weight_sync.shared_memory import remove_weights


class KeptFile:
    """A file of weights that can still be read, by a path that every process of this user on the machine finds.

    Args:
        named: it is read on other machines too, where only a name leads to it: it has one until it is dropped.
    """

    def __init__(self, *, named: bool = False) -> None:
        self._named = named
        self._path = ""
        self._descriptor: int | None = None

    def keep(self, path: str) -> str:
        """Take the file's name away; the path by which it is found from now on."""
        if path == self._path:
            return path
        self.drop()
        if self._named:
            self._path = path
            return path
        self._descriptor = os.open(path, os.O_RDWR)
        remove_weights(path)
        self._path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        return self._path

    def drop(self) -> None:
        """Free it; nothing if there is none."""
        descriptor, self._descriptor = self._descriptor, None
        path, self._path = self._path, ""
        if descriptor is not None:
            os.close(descriptor)
        elif path:
            remove_weights(path)
