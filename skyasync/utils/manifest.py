"""The manifest of a checkpoint: its files, their sizes and checksums, and a checksum of itself.

Invariant: a digest is computed from the bytes that are given to the file system, not from those
that it returns later. A file that arrived damaged differs from one that was written. The files of a
manifest are on the disk before the manifest is.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

NAME = "manifest.json"


@dataclass(frozen=True)
class FileSum:
    """Size in bytes, and XXH3 in 16 hexadecimal digits: against accidents, not against forgery."""

    size: int
    xxh3: str


Sums = dict[str, FileSum]
"""Path in the folder, with ``/`` between its names -> size and checksum."""


class SummingFile(io.BufferedWriter):
    """A file opened for writing that computes its checksum. After ``close`` it is on the disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.size = 0
        self.digest = xxhash.xxh3_64()

    def write(self, data: ReadableBuffer, /) -> int:
        size = super().write(data)
        self.digest.update(data)
        self.size += size
        return size

    def close(self) -> None:
        if not self.closed:
            try:
                self.flush()
                os.fsync(self.fileno())
            finally:
                super().close()


@contextmanager
def summed(path: Path, into: Sums, name: str) -> Iterator[SummingFile]:
    """Write ``path``; after the block it is on the disk, and its sum is ``into[name]``."""
    with SummingFile(path) as file:
        yield file
    into[name] = FileSum(file.size, file.digest.hexdigest())


def sum_of(path: Path) -> FileSum:
    """The size and checksum that a file has now."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_64)
        return FileSum(file.tell(), digest.hexdigest())


def sync_file(path: Path) -> None:
    """Flush a file that others have written to the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write(folder: Path, sums: Mapping[str, FileSum]) -> None:
    """Write the manifest of a folder, as its last file, and flush the names of all files."""
    entries: dict[str, object] = {name: asdict(sums[name]) for name in sorted(sums)}
    entries[NAME] = _checksum(entries)
    text = json.dumps(entries, indent=1)
    with summed(folder / NAME, {}, NAME) as file:
        file.write(text.encode())
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
    sync_folder(folder)


def read(folder: Path) -> Sums:
    """The sums that a folder's manifest lists.

    Raises:
        ValueError: if it cannot be understood, or does not match its checksum.
        OSError: if it cannot be read.
    """
    try:
        entries = json.loads((folder / NAME).read_text(encoding="utf-8"))
        checksum = entries.pop(NAME)
        sums = {}
        for name, entry in entries.items():
            sums[name] = FileSum(int(entry["size"]), str(entry["xxh3"]))
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{NAME} cannot be understood") from error
    if checksum != _checksum(entries):
        raise ValueError(f"{NAME} does not match its checksum")
    return sums


def unlisted(folder: Path, sums: Mapping[str, FileSum]) -> list[str]:
    """Files of a folder that its manifest does not list.

    Hidden files are left out: file systems and tools leave them.
    """
    names = []
    for path in folder.rglob("[!.]*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in sums and name != NAME:
            names.append(name)
    return sorted(names)


def _checksum(entries: Mapping[str, object]) -> str:
    """The checksum of a manifest's entries."""
    return xxhash.xxh3_64_hexdigest(json.dumps(entries, sort_keys=True).encode())


def misfits(folder: Path, sums: Mapping[str, FileSum]) -> Iterator[str]:
    """Problems that are visible without reading: missing files, and other sizes."""
    for name, expected in sums.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            yield f"{name} is missing"
        except OSError as error:
            yield f"{name} cannot be read: {error.strerror or error}"
        else:
            if size != expected.size:
                yield f"{name} has {size} bytes instead of {expected.size}"


def damage(folder: Path, sums: Mapping[str, FileSum]) -> Iterator[str]:
    """All problems of the files, which are read for it."""
    for name, expected in sums.items():
        problem = next(misfits(folder, {name: expected}), "")
        try:
            # A file of another size need not be read.
            if not problem and sum_of(folder / name) != expected:
                problem = f"{name} does not match its checksum"
        except OSError as error:
            problem = f"{name} cannot be read: {error.strerror or error}"
        if problem:
            yield problem
