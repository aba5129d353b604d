"""A rank's files of a checkpoint: summed up as they are written, on the disk when they are reported.

Invariant: a disk that is full, or a folder that cannot be written, is an answer and no error: the other ranks, and the
run, go on. All ranks give the same kind of answer, since torch's checkpoints tell every rank of every failure.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from skyasync.utils import manifest
from skyasync.utils.manifest import Sums
from skyasync.workers.saved import Saved


class _SummingFiles(FileSystem):
    """Takes the sums of what is written. torch syncs files before the last of their bytes have left its buffer."""

    def __init__(self) -> None:
        self.sums: Sums = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with manifest.summed(Path(path), self.sums, Path(path).name) as file:
            yield cast(io.IOBase, file)


class Writer:
    """Where the tensors of one checkpoint go.

    Args:
        files: the number of the file that each tensor goes into.
    """

    def __init__(self, folder: Path, files: Mapping[str, int]) -> None:
        self._folder, self._files = folder, _SummingFiles()
        self.storage = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=dict(files), save_distributed=True)
        self.storage.fs, self.storage.sync_files = self._files, False

    def saved(self, write: Callable[[], Any]) -> Saved:
        """What there is behind ``write()``, which ends when this rank's tensors are written."""
        try:
            write()
            manifest.sync_folder(self._folder)
        except OSError as error:
            return Saved(problem=_words(error))
        except CheckpointException as error:
            return Saved(problem=_words(only_disk(error)))
        return Saved(self._files.sums)


class Behind:
    """A checkpoint that is written while training goes on: of a copy in host memory, which is made at once.

    Args:
        group: of all ranks, on their CPUs, for nothing else; None for a single process.
    """

    def __init__(self, state: dict[str, Tensor], writer: Writer, group: dist.ProcessGroup | None) -> None:
        self._writer = writer
        self._future = cast(
            "Future[Any]",
            dcp.async_save(state, storage_writer=writer.storage, process_group=group, no_dist=group is None),
        )

    def saved(self) -> Saved | None:
        """None while it is being written."""
        return self._writer.saved(self._future.result) if self._future.done() else None


def only_disk(error: CheckpointException) -> OSError:
    """What the disk said.

    Raises:
        BaseException: the first failure of another kind.
    """
    failures = [failure for failure, _ in error.failures.values()]
    for failure in failures:
        if not isinstance(failure, OSError):
            raise failure from None
    return cast(OSError, failures[0])


def _words(error: OSError) -> str:
    where = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{where}" + (" (disk full)" if error.errno == errno.ENOSPC else "")
