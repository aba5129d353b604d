"""Tensor specs (dtypes and shapes by name, before the tensors exist), chunks and digests.

Digests say whether an engine holds exactly the bytes that were sent, without sending them twice. A
digest depends on a tensor's bytes in row-major order and on nothing else, so it is the same on
every device and in every process. It has 64 bits: two tensors that differ have the same one by
chance never.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
import xxhash
from torch import Tensor

from skyasync.weight_sync.update import WeightSyncError

TensorSpec = tuple[torch.dtype, tuple[int, ...]]
TensorSpecs = Mapping[str, TensorSpec]

# ``sum_of`` adds up so many elements at a time: their int64 copies take 8 MB.
SUM_BLOCK = 1 << 20
# 2^64 over the golden ratio, as int64: its odd multiples spread over all 64 bits.
_GOLDEN = -7046029254386353131
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size
NAMED_TENSORS = 3  # that an error names: a stale layer has a dozen


def specs_of(tensors: Mapping[str, Tensor]) -> TensorSpecs:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def bytes_of(spec: TensorSpec) -> int:
    dtype, shape = spec
    return prod(shape) * dtype.itemsize


def meta_tensors(specs: TensorSpecs) -> dict[str, Tensor]:
    """Tensors without memory."""
    tensors = {}
    for name, (dtype, shape) in specs.items():
        tensors[name] = torch.empty(shape, dtype=dtype, device="meta")
    return tensors


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name in ``torch``: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def to_message(specs: TensorSpecs) -> dict[str, Any]:
    """Specs as text and numbers. ``from_message`` is its inverse, and takes specs as well."""
    message = {}
    for name, (dtype, shape) in specs.items():
        message[name] = (dtype_name(dtype), list(shape))
    return message


def from_message(message: Mapping[str, Any]) -> TensorSpecs:
    specs = {}
    for name, (dtype, shape) in message.items():
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype)
        specs[name] = (dtype, tuple(shape))
    return specs


def as_message(info: Mapping[str, Any]) -> dict[str, Any]:
    """An update's ``info`` as text and numbers alone."""
    if "specs" in info:
        return {**info, "specs": to_message(from_message(info["specs"]))}
    return dict(info)


def chunks_of(specs: TensorSpecs, max_bytes: int) -> list[list[str]]:
    """The tensor names of each chunk.

    A chunk is no larger than ``max_bytes``, unless one tensor is.
    """
    chunks: list[list[str]] = [[]]
    end = 0
    for name, spec in specs.items():
        size = bytes_of(spec)
        dtype, _ = spec
        # A tensor begins at a multiple of its element size: otherwise no view of the chunk has it.
        is_misaligned = end % dtype.itemsize != 0
        if chunks[-1] and (end + size > max_bytes or is_misaligned):
            chunks.append([])
            end = 0
        chunks[-1].append(name)
        end += size
    return chunks


def pack(tensor: Tensor, spec: TensorSpec, into: Tensor) -> None:
    """Copy a tensor into bytes, converted to its spec."""
    dtype, _ = spec
    converted = tensor.detach().to(into.device, dtype).contiguous()
    data = converted.reshape(-1).view(torch.uint8)
    into[: bytes_of(spec)].copy_(data)


def unpack(buffer: Tensor, names: Sequence[str], specs: TensorSpecs) -> dict[str, Tensor]:
    """The tensors of a packed buffer, as views of it."""
    tensors = {}
    end = 0
    for name in names:
        dtype, shape = specs[name]
        start = end
        end += bytes_of(specs[name])
        tensors[name] = buffer[start:end].view(dtype).view(shape)
    return tensors


def sum_of(tensor: Tensor) -> Tensor:
    """A checksum of every byte and its position: int64, ``[]``, the same on every device.

    A single element that differs always changes it.
    """
    integers = _INTEGERS[tensor.element_size()]
    elements = tensor.detach().reshape(-1).view(integers)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    positions = torch.arange(min(SUM_BLOCK, len(elements)), device=tensor.device)
    # Odd factors are invertible modulo 2^64: no difference of one element is multiplied to zero.
    factors = positions * _GOLDEN | 1
    for start in range(0, len(elements), SUM_BLOCK):
        block = elements[start : start + SUM_BLOCK].long()
        # int64 wraps around on every device, so the order in which a device adds does not matter.
        block_sum = (block * factors[: len(block)]).sum()
        # 31 makes the sum depend on the order of blocks, and is odd like the factors.
        total = total * 31 + block_sum
    return total


def digest(tensor: Tensor) -> str:
    """16 hexadecimal digits. About 10 GB a second on one core, several times as fast as a copy."""
    elements = tensor.detach().cpu().contiguous().reshape(-1)
    # NumPy has no bfloat16, so the bytes are hashed.
    return xxhash.xxh3_64_hexdigest(elements.view(torch.uint8).numpy().data)


def digests_of(weights: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in weights.items()}


def holds(current: Tensor, sent: Tensor, sent_digest: str) -> bool:
    """Whether ``current`` is ``sent`` in the holder's own dtype.

    Args:
        sent_digest: of ``sent``, as the sender computed it.
    """
    if current.shape != sent.shape:
        return False
    if current.dtype == sent.dtype:
        return digest(current) == sent_digest
    # Another dtype has other bytes: what arrived is checked first, then its conversion.
    if digest(sent) != sent_digest:
        return False
    converted = sent.cpu().to(current.dtype)
    return torch.equal(current.cpu(), converted)


def shortened(names: Sequence[str]) -> str:
    """The names as an error lists them: "a, b, c and 9 more"."""
    listing = ", ".join(names[:NAMED_TENSORS])
    if len(names) > NAMED_TENSORS:
        return f"{listing} and {len(names) - NAMED_TENSORS} more"
    return listing


def refuse(differing: list[str], finding: str) -> None:
    """Raises WeightSyncError naming the differing tensors, if there are any."""
    if differing:
        raise WeightSyncError(
            f"{finding} other weights than the trainer sent in {shortened(differing)}"
        )
