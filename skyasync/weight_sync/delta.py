"""What has changed of a tensor, and how it is put back: lossless, in pieces that stay in the processor's cache.

Invariant: ``put`` of what ``changes`` found makes the old tensor the new one bit for bit (NaNs, signs of zeros and
all): elements are compared, sent and written as integers of their size.

A piece of 65,536 elements goes in the shortest of its forms, which follows from how many of them changed:

| changed                                | its part of ``where``               | its part of ``values`` |
|----------------------------------------|-------------------------------------|------------------------|
| none                                   | nothing                             | nothing                |
| few (fewer than 1 in 16)               | two bytes each: places in the piece | the new elements       |
| more                                   | one bit for each element            | the new elements       |
| so many that all elements take no more | nothing                             | all elements           |
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyasync.weight_sync.update import WeightSyncError

PIECE = 1 << 16  # elements; their places fit into two bytes
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Changes(NamedTuple):
    """Of one tensor: how many elements of each piece are sent (int32), where they are (bytes), what they are."""

    counts: Tensor
    where: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        return self.counts.nbytes + self.where.nbytes + self.values.nbytes


def changes(old: Tensor, new: Tensor) -> tuple[Changes | None, int]:
    """What makes ``old`` into ``new``, None if nothing, and how many elements differ; ``old`` becomes ``new`` here.

    Both are on the CPU, contiguous, of one dtype and shape.
    """
    before, after = integers(old), integers(new)
    counts = np.zeros(-(-len(after) // PIECE), dtype=np.int32)
    where: list[npt.NDArray[Any]] = []
    values: list[npt.NDArray[Any]] = []
    changed = 0
    for number, first in enumerate(range(0, len(after), PIECE)):
        was, now = before[first : first + PIECE], after[first : first + PIECE]
        differs = was != now
        count = int(np.count_nonzero(differs))
        if not count:
            continue
        changed += count
        if _bytes_of_places(count, len(now)) + count * now.itemsize >= now.nbytes:
            counts[number] = len(now)
            values.append(now.copy())
        else:
            places = np.flatnonzero(differs)
            counts[number] = count
            where.append(places.astype(np.uint16).view(np.uint8) if _few(count, len(now)) else np.packbits(differs))
            values.append(now[places])
        was[:] = now
    if not changed:
        return None, 0
    return Changes(torch.from_numpy(counts), _joined(where, np.uint8), _joined(values, after.dtype)), changed


def put(tensor: Tensor, sent: Changes) -> None:
    """Write what was sent into a tensor, in place; on a device by way of the host.

    Raises:
        WeightSyncError: if it is not of a tensor of this size and dtype; nothing has been written then.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        host = tensor.cpu().contiguous()
        put(host, sent)
        tensor.copy_(host)
        return
    elements, values, where = integers(tensor), sent.values.numpy(), sent.where.numpy()
    counts = sent.counts.tolist()
    sizes = [min(PIECE, len(elements) - first) for first in range(0, len(elements), PIECE)]
    fits = values.dtype == elements.dtype and len(counts) == len(sizes)
    if not fits or _lengths(counts, sizes) != (len(values), len(where)):
        raise WeightSyncError("changes arrived that are of another tensor, or cut short")
    at_value = at_place = 0
    for number, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        piece, new = elements[number * PIECE :][:size], values[at_value:][:count]
        bits = where[at_place:][: _bytes_of_places(count, size)]
        if count == size:
            piece[:] = new
        elif _few(count, size):
            piece[np.frombuffer(bits.tobytes(), dtype=np.uint16)] = new
        elif count:
            piece[np.flatnonzero(np.unpackbits(bits, count=size))] = new
        at_value, at_place = at_value + len(new), at_place + len(bits)


def integers(tensor: Tensor) -> npt.NDArray[Any]:
    """The elements of a contiguous tensor on the CPU, as a flat numpy array of integers that shares its memory."""
    return tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()]).numpy()


def _few(count: int, size: int) -> bool:
    return 2 * count < -(-size // 8)


def _bytes_of_places(count: int, size: int) -> int:
    return 0 if count == size else min(2 * count, -(-size // 8))


def _lengths(counts: list[int], sizes: list[int]) -> tuple[int, int]:
    """How many values, and bytes of places, these counts are."""
    return sum(counts), sum(_bytes_of_places(count, size) for count, size in zip(counts, sizes, strict=True))


def _joined(parts: list[npt.NDArray[Any]], dtype: npt.DTypeLike) -> Tensor:
    return torch.from_numpy(np.concatenate(parts) if parts else np.zeros(0, dtype=dtype))
