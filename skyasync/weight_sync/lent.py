"""Weights in shared memory that the engines of this machine compute on where they lie: a swap is a pointer.

Invariant: what engines compute on is never written to. There are two buffers: one that was lent last, and one that is
written next; they change places when a hand-over has ended (``Lender.settle``). The memory has no name, so the kernel
frees it with the last process that has it mapped, and an engine's outlives the trainer that wrote it.

Engines whose kernels have weights in another layout read from it into weights of their own; for them there is one
buffer, which nobody reads when a hand-over has ended.

    trainer    write B    write A    write B              a hand-over writes the weights once, however many engines
    engines    ...A ──▶ B ──────▶ A ──────▶ B             there are, and none of them has a copy of its own

That an engine holds, or reads, what was sent is proven in two halves. The bytes: what lies in the buffer is read again
and compared with the digests of what was sent, once for all engines (``Lender.prove``). The place: a reader's mapping
cannot be written to, so a tensor that lies at its own place in it is that tensor (``Borrower.lies_there``); one that
does not is looked at itself. So are all by an engine that comes late, whenever that is.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from skyasync.weight_sync.digests import digest, refuse
from skyasync.weight_sync.kinds import Kinds, bytes_of
from skyasync.weight_sync.shared_memory import not_here

ALIGNED = 64  # bytes, a line of the processor's cache: what matrix products want
PIECE = 1 << 18  # bytes that are copied and digested while they are in the processor's cache
CONVERTED = 1 << 15  # elements at a time that are converted, for which the library takes one thread
THREADS = 4  # at most: memory is no faster for more

Bytes = npt.NDArray[np.uint8]


class Lender:
    """The trainer's side.

    Args:
        computed_on: engines compute on what is lent. Where they only read it, one buffer is enough: nobody reads
            when a hand-over has ended.
    """

    def __init__(self, *, computed_on: bool = True) -> None:
        self._computed_on = computed_on
        self._buffers: list[_Buffer] = []  # the one that is written next comes first
        self._threads = min(THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._threads, "weights")

    def write(self, kinds: Kinds, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """Put these into the buffer that nobody reads; what ``Borrower.read`` needs.

        Args:
            kinds: of all weights, as they are to be read: they are converted on the way.
            weights: in the order of ``kinds``. No more than a few of them are in memory at a time.
        """
        buffer = self._next(kinds)
        copies: dict[str, Future[str]] = {}
        for name, tensor in weights:
            copies[name] = self._pool.submit(_copy, buffer.tensors[name], tensor)
            _wait_for_all_but(self._threads, copies)
        buffer.digests = {name: copy.result() for name, copy in copies.items()}
        return buffer.info

    def _next(self, kinds: Kinds) -> _Buffer:
        """The buffer that nobody reads."""
        if not self._buffers or self._buffers[0].kinds != kinds:
            self._buffers = [_Buffer(kinds), *self._buffers[1:]]
        return self._buffers[0]

    def room(self, kinds: Kinds) -> int:
        """A descriptor of the buffer that nobody reads, for the bytes of another lender's, which has this layout."""
        return self._next(kinds).descriptor

    def arrived(self, digests: Mapping[str, str]) -> dict[str, Any]:
        """Those bytes have been written; what ``Borrower.read`` needs.

        Raises:
            WeightSyncError: unless they are what the other lender was given.
        """
        self._buffers[0].digests = dict(digests)
        self.prove()
        return self._buffers[0].info

    def prove(self) -> None:
        """Raises WeightSyncError unless there lies what was written last."""
        buffer = self._buffers[0]
        found = self._pool.map(digest, buffer.tensors.values())
        wrong = [name for name, there in zip(buffer.tensors, found, strict=True) if buffer.digests[name] != there]
        refuse(wrong, "the shared memory holds")

    def settle(self, path: str) -> bool:
        """The hand-over of a buffer has ended: engines compute on it. False if the path is of none."""
        if not self._buffers or path not in [buffer.info["path"] for buffer in self._buffers]:
            return False
        if self._computed_on and path == self._buffers[0].info["path"]:
            self._buffers = [*self._buffers[1:2], self._buffers[0]] if len(self._buffers) > 1 else self._spare()
        return True

    def _spare(self) -> list[_Buffer]:
        """A second one beside the first, which has been lent."""
        return [_Buffer(self._buffers[0].kinds), self._buffers[0]]


class _Buffer:
    """``tensors`` lie in it by name; it may be written to here, and nowhere else."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = dict(kinds)
        places, size = _places(kinds)
        self._file = FileIO(os.memfd_create("skyasync-weights"), "r+")  # closed with this; engines keep what they map
        self._file.truncate(max(size, 1))
        self.tensors = dict(_tensors(mmap.mmap(self._file.fileno(), 0), kinds, places))
        self.digests: dict[str, str] = {}

    @property
    def descriptor(self) -> int:
        return self._file.fileno()

    @property
    def info(self) -> dict[str, Any]:
        """Where it is, and what is in it."""
        path = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        return {"path": path, "file": _identity(path), "kinds": self.kinds, "digests": self.digests}


class Borrower:
    """An engine's side: the buffers that it has mapped, each once."""

    def __init__(self) -> None:
        self._mapped: dict[tuple[int, int], dict[str, Tensor]] = {}  # the one that was read last comes last

    def read(self, info: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors where they lie. They cannot be written to, and stay until two more have been read.

        Raises:
            FileNotFoundError: if they are not there; most likely their writer runs on another machine.
        """
        file = tuple(info["file"])
        if not os.path.exists(info["path"]) or _identity(info["path"]) != file:
            raise not_here(info["path"])
        tensors = self._mapped.pop(file, None) or _mapped(info["path"], _kinds(info["kinds"]))
        self._mapped = dict([*self._mapped.items()][-1:])
        self._mapped[file] = tensors
        return dict(tensors)

    def lies_there(self, name: str, tensor: Tensor) -> bool:
        """Whether it is the one that was read last by this name, where its lender has it."""
        last = next(reversed(self._mapped.values()), {})
        return name in last and tensor.is_set_to(last[name])


def in_words(info: Mapping[str, Any]) -> dict[str, Any]:
    """The same in words and numbers alone, for a process that is told by a message; ``Borrower.read`` takes both."""
    kinds = {name: (str(dtype).removeprefix("torch."), shape) for name, (dtype, shape) in info["kinds"].items()}
    return {**info, "kinds": kinds}


def _kinds(said: Mapping[str, Any]) -> Kinds:
    return {
        name: (getattr(torch, dtype) if isinstance(dtype, str) else dtype, tuple(shape))
        for name, (dtype, shape) in said.items()
    }


def _mapped(path: str, kinds: Kinds) -> dict[str, Tensor]:
    with open(path, "rb") as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # as it should be
        return dict(_tensors(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), kinds, _places(kinds)[0]))


def _identity(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _places(kinds: Kinds) -> tuple[dict[str, int], int]:
    """Where each tensor begins, and where all end."""
    places, end = {}, 0
    for name, kind in kinds.items():
        places[name] = end
        end += -(-bytes_of(kind) // ALIGNED) * ALIGNED
    return places, end


def _tensors(memory: mmap.mmap, kinds: Kinds, places: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    for name, (dtype, shape) in kinds.items():
        if count := prod(shape):
            yield name, torch.frombuffer(memory, dtype=dtype, count=count, offset=places[name]).view(shape)
        else:
            yield name, torch.empty(shape, dtype=dtype)


def _wait_for_all_but(most: int, copies: Mapping[str, Future[str]]) -> None:
    """Until no more than so many of them are still made."""
    waiting = [copy for copy in list(copies.values())[-most - 1 :] if not copy.done()]
    if len(waiting) > most:
        waiting[0].result()


def _copy(into: Tensor, sent: Tensor) -> str:
    """Copy a tensor, converted if need be; the digest of what was to arrive, as ``digests.digest`` computes it."""
    source, target = sent.detach().cpu().reshape(-1), into.view(-1)
    hashed = xxhash.xxh3_64()
    for piece, there in _as_they_are(source, target) if source.dtype == into.dtype else _converted(source, target):
        np.copyto(there, piece)
        hashed.update(piece.data)
    return hashed.hexdigest()


def _as_they_are(source: Tensor, target: Tensor) -> Iterator[tuple[Bytes, Bytes]]:
    sent, there = (tensor.view(torch.uint8).numpy() for tensor in (source, target))
    for first in range(0, len(sent), PIECE):
        yield sent[first : first + PIECE], there[first : first + PIECE]


def _converted(source: Tensor, target: Tensor) -> Iterator[tuple[Bytes, Bytes]]:
    for first in range(0, len(target), CONVERTED):
        piece = source[first : first + CONVERTED].to(target.dtype)
        yield piece.view(torch.uint8).numpy(), target[first : first + CONVERTED].view(torch.uint8).numpy()
