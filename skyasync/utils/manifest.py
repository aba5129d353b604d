"""The manifest of a checkpoint: its files, their sizes and checksums. The manifest has a checksum
of its own.

Invariant: a digest is taken of the bytes that are given to the file system, not of what it returns
later. A file that arrived damaged differs from one that was written. What a manifest lists is on
the disk before the manifest is.
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
    """Bytes, and their XXH3 in 16 hexadecimal digits: against accidents, not against forgery."""

    size: int
    xxh3: str


Sums = dict[str, FileSum]
"""By path relative to the folder, with ``/`` between its parts."""


class SummingFile(io.BufferedWriter):
    """A file opened for writing that computes its checksum. After ``close`` it is on the disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.size = 0
        self.digest = xxhash.xxh3_64()

    def write(self, data: ReadableBuffer, /) -> int:
        written = super().write(data)
        self.digest.update(data)
        self.size += written
        return written

    def close(self) -> None:
        if not self.closed:
            try:
                self.flush()
                os.fsync(self.fileno())
            finally:
                super().close()


@contextmanager
def summed(path: Path, into: Sums, name: str) -> Iterator[SummingFile]:
    """Write ``path``; after the block it is on the disk and ``into[name]`` says what it must
    hold."""
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
    """Write the manifest of a folder, last of all its files; then every name in it is on the
    disk."""
    entries = {name: asdict(sums[name]) for name in sorted(sums)}
    text = json.dumps({**entries, NAME: _own_sum(entries)}, indent=1)
    with summed(folder / NAME, {}, NAME) as file:
        file.write(text.encode())
    for part in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync_folder(part)


def read(folder: Path) -> Sums:
    """The sums that a folder's manifest lists.

    Raises:
        ValueError: if it cannot be understood, or does not say what was written.
        OSError: if it cannot be read.
    """
    try:
        entries = json.loads((folder / NAME).read_text(encoding="utf-8"))
        checksum = entries.pop(NAME)
        sums = {
            name: FileSum(int(entry["size"]), str(entry["xxh3"])) for name, entry in entries.items()
        }
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{NAME} cannot be understood") from error
    if checksum != _own_sum(entries):
        raise ValueError(f"{NAME} does not match its checksum")
    return sums


def unlisted(folder: Path, sums: Mapping[str, FileSum]) -> list[str]:
    """Files of a folder that its manifest does not list, but for hidden ones, which file systems
    and tools leave."""
    files = (
        path.relative_to(folder).as_posix() for path in folder.rglob("[!.]*") if path.is_file()
    )
    return sorted(set(files) - sums.keys() - {NAME})


def _own_sum(entries: Mapping[str, object]) -> str:
    """The checksum of a manifest's entries."""
    return xxhash.xxh3_64_hexdigest(json.dumps(entries, sort_keys=True).encode())


def misfits(folder: Path, sums: Mapping[str, FileSum]) -> Iterator[str]:
    """Problems that are visible without reading: files that are missing, or of another size."""
    for name, listed in sums.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            yield f"{name} is missing"
        except OSError as error:
            yield f"{name} cannot be read: {error.strerror or error}"
        else:
            if size != listed.size:
                yield f"{name} has {size} bytes instead of {listed.size}"


def damage(folder: Path, sums: Mapping[str, FileSum]) -> Iterator[str]:
    """All problems of the files, each of which is read."""
    for name, listed in sums.items():
        problem = next(misfits(folder, {name: listed}), "")
        try:
            if not problem and sum_of(folder / name) != listed:
                problem = f"{name} does not match its checksum"
        except OSError as error:
            problem = f"{name} cannot be read: {error.strerror or error}"
        if problem:
            yield problem
