"""Weights in shared memory, on which the engines of this machine compute: an update is a pointer.

Invariant: what engines compute on is never written to. There are two buffers, ``_front`` that
engines compute on and ``_back`` that is written next; they change roles when a weight sync ends.
The memory has no name, so the kernel frees it with the last process that has it mapped, and an
engine's mapping outlives the trainer that wrote it.

Engines whose kernels need weights in another layout copy from it into weights of their own. For
them there is one buffer, which no engine reads after a weight sync.

    trainer    write B    write A    write B              a weight sync writes the weights once for all engines,
    engines    ...A ──▶ B ──────▶ A ──────▶ B             and no engine has a copy of its own

That an engine has, or reads, what was sent is proven in two halves. The bytes: the buffer is read
again and compared with the digests of what was sent, once for all engines (``BufferWriter.prove``).
The address: a reader cannot write to its mapping, so a tensor that is at its own address in it is
that tensor (``BufferReader.is_in_place``); another one is compared itself. A late engine compares
all tensors.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from skyasync.weight_sync.tensors import (
    TensorSpec,
    TensorSpecs,
    bytes_of,
    digest,
    from_message,
    refuse,
)
from skyasync.weight_sync.transfers import TRANSFERS
from skyasync.weight_sync.transfers.base import PolicyRanks, WeightTransfer
from skyasync.weight_sync.transfers.file import missing_file_error
from skyasync.weight_sync.update import WeightUpdate

if TYPE_CHECKING:
    from skyasync.weight_sync.full_tensors import FullTensors
    from skyasync.weight_sync.transfers.remote import RemoteEngines

ALIGNED = 64  # bytes, a line of the processor's cache: what matrix products want
PIECE = 1 << 18  # bytes that are copied and hashed while they are in the processor's cache
CONVERTED = 1 << 15  # elements at a time that are converted, for which the library takes one thread
THREADS = 4  # at most: memory is no faster for more


@TRANSFERS.register("shared_memory")
class SharedMemoryTransfer(WeightTransfer):
    """Writes all weights into shared memory.

    Args:
        computed_on: engines compute on the memory. Then it is proven before they are paused, else
            while they copy it.
        remote: engines on other nodes.
    """

    proves_content = True
    sender = "shared_memory"

    def __init__(
        self, policy: PolicyRanks, *, computed_on: bool, remote: RemoteEngines | None = None
    ) -> None:
        super().__init__(policy)
        self._computed_on = computed_on
        self._remote = remote
        self._info: dict[str, Any] = {}  # that was published last

    async def publish(self, version: int) -> WeightUpdate:
        self._info, *_ = await self._ranks("write")
        if self._computed_on:
            await self._rank_0("prove")
        return await self._announced(WeightUpdate(version, "shared_memory", self._info))

    async def _announced(self, update: WeightUpdate, *, late: bool = False) -> WeightUpdate:
        if self._remote is None:
            return update
        return await self._remote.announce(update, late=late)

    async def send(self, update: WeightUpdate) -> None:
        if not self._computed_on:
            await self._rank_0("prove")
        if self._remote is not None:
            await self._remote.send(update)

    async def publish_whole(self, update: WeightUpdate) -> WeightUpdate:
        update = WeightUpdate(update.version, "shared_memory", self._info)
        if self._remote is None:
            return update
        return await self._remote.announce_again(update)

    async def release(self, update: WeightUpdate) -> None:
        await self._rank_0("release", update.info["path"])

    async def for_late_engine(self, version: int) -> WeightUpdate:
        info = {**self._info, "late": True}
        return await self._announced(WeightUpdate(version, "shared_memory", info), late=True)


class SharedMemorySender:
    """The writer on each policy rank."""

    def __init__(self, weights: Callable[[], FullTensors], rank: int, *, two_buffers: bool) -> None:
        self._weights = weights
        self._rank = rank
        self._two_buffers = two_buffers
        self.writer = BufferWriter(two_buffers=two_buffers)

    def write(self) -> dict[str, Any] | None:
        """Write all weights on rank 0; all ranks call it. Returns an update's ``info``."""
        tensors = self._weights()
        if self._rank != 0:
            tensors.only_gather()
            return None
        return self.writer.write(tensors.specs, tensors)

    def prove(self) -> None:
        self.writer.prove()

    def release(self, path: str) -> None:
        self.writer.release(path)

    def free(self) -> None:
        """Free the buffers: no engine needs them any more."""
        self.writer = BufferWriter(two_buffers=self._two_buffers)


class BufferWriter:
    """Writes and proves buffers.

    Args:
        two_buffers: engines compute on the buffers. If they copy them, one buffer is enough.
    """

    def __init__(self, *, two_buffers: bool = True) -> None:
        self._two_buffers = two_buffers
        self._front: _Buffer | None = None
        self._back: _Buffer | None = None
        self._threads = min(THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._threads, "weights")

    def write(self, specs: TensorSpecs, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """Write weights into the buffer that no engine reads.

        Args:
            specs: of all weights, as they will be read: they are converted on the way.
            weights: in the order of ``specs``. No more than a few of them are in memory at a time.

        Returns:
            The ``info`` that ``BufferReader.read`` takes.
        """
        if self._back is None or self._back.specs != specs:
            self._back = _Buffer(specs)
        buffer = self._back
        copies = dict[str, Future[str]]()
        recent = deque[Future[str]](maxlen=self._threads + 1)
        for name, tensor in weights:
            copies[name] = self._pool.submit(_copy, buffer.tensors[name], tensor)
            recent.append(copies[name])
            # As many tensors as threads are in memory, and no more.
            unfinished_copies = [copy for copy in recent if not copy.done()]
            if len(unfinished_copies) > self._threads:
                unfinished_copies[0].result()
        buffer.digests = {name: copy.result() for name, copy in copies.items()}
        return buffer.info

    def prove(self) -> None:
        """Read the written buffer again. Raises WeightSyncError if it has other bytes."""
        buffer = self._back
        assert buffer is not None
        current = self._pool.map(digest, buffer.tensors.values())
        differing = []
        for name, current_digest in zip(buffer.tensors, current, strict=True):
            if current_digest != buffer.digests[name]:
                differing.append(name)
        refuse(differing, "the shared memory holds")

    def release(self, path: str) -> None:
        """End a weight sync: engines compute on the written buffer, if this is its path."""
        written = self._back
        if self._two_buffers and written is not None and path == written.info["path"]:
            self._back = self._front or _Buffer(written.specs)
            self._front = written


class _Buffer:
    """``tensors`` are in it by name; only this process can write to it."""

    def __init__(self, specs: TensorSpecs) -> None:
        self.specs = dict(specs)
        # Closed with this object; engines keep the memory that they have mapped.
        self._file = FileIO(os.memfd_create("skyasync-weights"), "r+")
        size = sum(map(_aligned_bytes, specs.values()))
        self._file.truncate(max(size, 1))  # an empty file cannot be mapped
        self.tensors = _tensors(mmap.mmap(self._file.fileno(), 0), specs)
        self.digests: dict[str, str] = {}

    @property
    def info(self) -> dict[str, Any]:
        """An update's ``info``."""
        path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        return {"path": path, "file": _identity(path), "specs": self.specs, "digests": self.digests}


class BufferReader:
    """The reader in an engine, which maps each buffer once."""

    def __init__(self) -> None:
        # By the identity of their files, in the order in which they were read.
        self._mapped_buffers: dict[tuple[int, int], dict[str, Tensor]] = {}

    def read(self, info: Mapping[str, Any]) -> dict[str, Tensor]:
        """Map the tensors. They cannot be written to, and stay until two more buffers are read.

        Raises:
            FileNotFoundError: if they are not there; most likely their writer runs on another
                machine.
        """
        file = tuple(info["file"])
        # Another process may have got the writer's number, and have another file by this path.
        if not os.path.exists(info["path"]) or _identity(info["path"]) != file:
            raise missing_file_error(info["path"])
        tensors = self._mapped_buffers.pop(file, None)
        if tensors is None:
            with open(info["path"], "rb") as buffer, warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*not writable.*")  # as it should be
                memory = mmap.mmap(buffer.fileno(), 0, access=mmap.ACCESS_READ)
                tensors = _tensors(memory, from_message(info["specs"]))
        # The previous buffer stays: the engine computes on it until the update is complete.
        while len(self._mapped_buffers) > 1:
            del self._mapped_buffers[next(iter(self._mapped_buffers))]
        self._mapped_buffers[file] = tensors
        return dict(tensors)

    def is_in_place(self, name: str, tensor: Tensor) -> bool:
        """Whether ``tensor`` is the memory that the latest buffer has by this name."""
        tensors = next(reversed(self._mapped_buffers.values()), {})
        return name in tensors and tensor.is_set_to(tensors[name])


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _aligned_bytes(spec: TensorSpec) -> int:
    return -(-bytes_of(spec) // ALIGNED) * ALIGNED


def _tensors(memory: mmap.mmap, specs: TensorSpecs) -> dict[str, Tensor]:
    """The tensors of a buffer, one after the other, each at an aligned offset."""
    tensors = {}
    offset = 0
    for name, (dtype, shape) in specs.items():
        count = prod(shape)
        if count:
            elements = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
            tensors[name] = elements.view(shape)
        else:
            tensors[name] = torch.empty(shape, dtype=dtype)  # frombuffer takes no empty range
        offset += _aligned_bytes((dtype, shape))
    return tensors


def _copy(into: Tensor, sent: Tensor) -> str:
    """Copy a tensor, converted to the target's dtype.

    Returns:
        The digest of the converted source, as ``tensors.digest`` computes it.
    """
    source = sent.detach().cpu().reshape(-1)
    target = into.view(-1)
    hasher = xxhash.xxh3_64()
    for chunk, target_chunk in _chunks(source, target):
        # Hashed from the source while it is in the processor's cache: ``prove`` reads the target.
        np.copyto(target_chunk, chunk)
        hasher.update(chunk.data)
    return hasher.hexdigest()


def _chunks(
    source: Tensor, target: Tensor
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    """Bytes of the converted source and of the target, chunk by chunk."""
    if source.dtype == target.dtype:
        # Sliced by NumPy, which takes a tenth of the time of slices of a tensor.
        source_bytes = _as_bytes(source)
        target_bytes = _as_bytes(target)
        for start in range(0, len(target_bytes), PIECE):
            yield source_bytes[start : start + PIECE], target_bytes[start : start + PIECE]
    else:
        source_chunks = source.split(CONVERTED)
        for chunk, target_chunk in zip(source_chunks, target.split(CONVERTED), strict=True):
            yield _as_bytes(chunk.to(target.dtype)), _as_bytes(target_chunk)


def _as_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    return tensor.view(torch.uint8).numpy()
