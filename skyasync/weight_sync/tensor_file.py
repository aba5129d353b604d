"""A safetensors file that is written tensor after tensor.

Invariant: names, dtypes and shapes are known before, so the header comes first, and each tensor is written where the
header says as soon as it is there: no more than one is in memory. Digests, which are known last, are put into the room
that the header has for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from skyasync.weight_sync.kinds import Kinds, bytes_of

PIECE = 1 << 18  # elements that are converted and written at a time
TO_COME = "0" * 16  # in the place of a digest
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class TensorFile:
    """One that is being written.

    Args:
        kinds: of all tensors that will be put, in any order.
        said: what goes with them; None: their digests.
    """

    def __init__(self, file: BinaryIO, kinds: Kinds, said: Mapping[str, str] | None) -> None:
        self._file, self._kinds, self._with_digests = file, kinds, said is None
        self._said = dict.fromkeys(kinds, TO_COME) if said is None else dict(said)
        self._missing = set(kinds)
        self._places = self._write_header()

    def put(self, name: str, tensor: Tensor) -> None:
        """Write it, in the dtype that was said."""
        dtype, shape = self._kinds[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has the shape {list(tensor.shape)}, and {list(shape)} was said of it")
        self._file.seek(self._places[name])
        hashed = xxhash.xxh3_64()
        for piece in _pieces(tensor, dtype):
            self._file.write(piece.data)
            if self._with_digests:
                hashed.update(piece.data)
        if self._with_digests:
            self._said[name] = hashed.hexdigest()
        self._missing.discard(name)

    def finish(self) -> None:
        if self._missing:
            raise ValueError(f"tensors were said to come that have not: {sorted(self._missing)[:3]}")
        if self._with_digests:
            self._file.seek(0)
            self._write_header()

    def _write_header(self) -> dict[str, int]:
        """Where each tensor begins: aligned ones first, as the format wants it."""
        entries: dict[str, object] = {"__metadata__": self._said} if self._said else {}
        ends, end = {}, 0
        for name in sorted(self._kinds, key=lambda name: (-self._kinds[name][0].itemsize, name)):
            dtype, shape = self._kinds[name]
            ends[name], end = end, end + bytes_of(self._kinds[name])
            entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [ends[name], end]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file.write(len(text).to_bytes(8, "little") + text)
        return {name: 8 + len(text) + first for name, first in ends.items()}


@contextmanager
def writing(path: Path, kinds: Kinds, said: Mapping[str, str] | None = None) -> Iterator[TensorFile]:
    """The file is complete when this ends without an error."""
    with open(path, "wb") as file:
        tensors = TensorFile(file, kinds, said)
        yield tensors
        tensors.finish()


def _pieces(tensor: Tensor, dtype: torch.dtype) -> Iterator[npt.NDArray[np.uint8]]:
    elements = tensor.detach().cpu().reshape(-1)
    for first in range(0, len(elements), PIECE):
        yield elements[first : first + PIECE].to(dtype).view(torch.uint8).numpy()
