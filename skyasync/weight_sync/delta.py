"""The delta encoding: the elements that changed since the previous weight sync, lossless.

    trainer: copy of what was sent ── compare ──▶ delta, digests ──▶ applied to what the engine has
        ──▶ its digests

A delta names the content of the weights that it was computed against, and carries the digests of
all tensors as they must be afterwards, changed or not. An engine with other weights can reject it
before it changes anything, and proves as much as after all weights. If the delta takes more than
half the bytes of all weights, all weights are sent.

Invariant: ``put`` of what ``changes`` returned makes the old tensor bitwise identical to the new
one, NaNs and signs of zeros included: elements are compared, sent and written as integers of their
size.

A piece of 65,536 elements goes in the shortest of its forms, which follows from how many of them
changed:

| changed                                | its part of ``where``                  | its part of ``values`` |
|----------------------------------------|----------------------------------------|------------------------|
| none                                   | nothing                                | nothing                |
| few (fewer than 1 in 16)               | two bytes each: positions in the piece | the new elements       |
| more                                   | one bit for each element               | the new elements       |
| so many that all elements take no more | nothing                                | all elements           |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from skyasync.weight_sync.tensors import TensorSpecs, digest, digests_of, specs_of
from skyasync.weight_sync.update import WeightMismatchError, WeightSyncError

# A delta that takes more than this fraction of all bytes is not sent: it would save less than half,
# and an engine has more work with it than with a copy of all weights.
MAX_FRACTION = 0.5
PIECE = 1 << 16  # elements; their positions fit into two bytes
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Changes(NamedTuple):
    """The changes of one tensor, as they are sent.

    Args:
        counts: ``[pieces]``, int32: how many elements of each piece are sent.
        where: ``[bytes]``, uint8: their positions; the module's table has the forms.
        values: ``[elements]``, integers: their new values.
    """

    counts: Tensor
    where: Tensor
    values: Tensor


def changes(old: Tensor, new: Tensor) -> tuple[Changes | None, int]:
    """The changes from ``old`` to ``new``, or None, and the number of elements that differ.

    Both are on the CPU, contiguous, of one dtype and shape. ``old`` becomes ``new`` here.
    """
    old_elements = integers(old)
    new_elements = integers(new)
    counts = np.zeros(-(-len(new_elements) // PIECE), dtype=np.int32)
    where: list[npt.NDArray[Any]] = []
    values: list[npt.NDArray[Any]] = []
    changed_count = 0
    for number, start in enumerate(range(0, len(new_elements), PIECE)):
        old_piece = old_elements[start : start + PIECE]
        new_piece = new_elements[start : start + PIECE]
        differs = old_piece != new_piece
        count = int(np.count_nonzero(differs))
        if not count:
            continue
        changed_count += count
        size = len(new_piece)
        if _bytes_of_positions(count, size) + count * new_piece.itemsize >= new_piece.nbytes:
            counts[number] = size
            values.append(new_piece.copy())
        else:
            counts[number] = count
            positions = np.flatnonzero(differs)
            if _is_sparse(count, size):
                where.append(positions.astype(np.uint16).view(np.uint8))
            else:
                where.append(np.packbits(differs))
            values.append(new_piece[positions])
        # The copy follows piece by piece, while both are in the processor's cache.
        old_piece[:] = new_piece
    if not changed_count:
        return None, 0
    # concatenate needs one array at least, and no piece may have positions
    joined_where = np.concatenate([np.zeros(0, np.uint8), *where])
    sent = Changes(
        torch.from_numpy(counts),
        torch.from_numpy(joined_where),
        torch.from_numpy(np.concatenate(values)),
    )
    return sent, changed_count


def put(tensor: Tensor, sent: Changes) -> None:
    """Write changes into a tensor, in place.

    Raises:
        WeightSyncError: if they are of another size or dtype; nothing has been written then.
    """
    # NumPy writes the pieces, so tensors on a device go by way of the host.
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        host = tensor.cpu().contiguous()
        put(host, sent)
        tensor.copy_(host)
        return
    elements = integers(tensor)
    values = sent.values.numpy()
    where = sent.where.numpy()
    counts = sent.counts.tolist()
    full_count, rest_size = divmod(len(elements), PIECE)
    sizes = [PIECE] * full_count
    if rest_size:
        sizes.append(rest_size)
    # All is checked before the first write: a tensor is changed completely or not at all.
    fits = (
        values.dtype == elements.dtype and len(counts) == len(sizes) and sum(counts) == len(values)
    )
    if not fits or sum(map(_bytes_of_positions, counts, sizes)) != len(where):
        raise WeightSyncError("changes arrived that are of another tensor, or cut short")
    values_read = 0
    bytes_read = 0
    for number, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        piece = elements[number * PIECE :][:size]
        new_elements = values[values_read:][:count]
        positions = where[bytes_read:][: _bytes_of_positions(count, size)]
        if count == size:
            piece[:] = new_elements
        elif _is_sparse(count, size):
            # Copied: after a mask of odd length these two-byte integers begin at an odd address.
            piece[np.frombuffer(positions.tobytes(), dtype=np.uint16)] = new_elements
        elif count:
            piece[np.flatnonzero(np.unpackbits(positions, count=size))] = new_elements
        values_read += len(new_elements)
        bytes_read += len(positions)


def integers(tensor: Tensor) -> npt.NDArray[Any]:
    """The elements of a contiguous tensor on the CPU as integers, ``[elements]``, not copied."""
    elements = tensor.detach().reshape(-1)
    return elements.view(_INTEGERS[tensor.element_size()]).numpy()


def _bytes_of_mask(size: int) -> int:
    return -(-size // 8)  # rounded up


def _is_sparse(count: int, size: int) -> bool:
    """Whether positions of two bytes take less than one bit for each element."""
    return 2 * count < _bytes_of_mask(size)


def _bytes_of_positions(count: int, size: int) -> int:
    if count == size:
        return 0
    return min(2 * count, _bytes_of_mask(size))


class WeightsHeader(NamedTuple):
    """The kind of weights that a file or a broadcast has.

    Args:
        base: the content of the weights that it is a delta of; empty for all weights.
        keep: the reader keeps its weights: a delta of them may follow.
        adapter: it has LoRA adapters alone; see ``skyasync.weight_sync.adapters``.
    """

    base: str = ""
    keep: bool = False
    adapter: dict[str, Any] | None = None

    def message(self) -> dict[str, Any]:
        """The fields that are set, for JSON."""
        return {name: value for name, value in self._asdict().items() if value}


class Encoded(NamedTuple):
    """Weights as they are sent, and the digests of the tensors that engines must have then."""

    tensors: Mapping[str, Tensor]
    digests: dict[str, str]
    header: WeightsHeader
    metrics: dict[str, float]

    @property
    def content(self) -> str:
        return content_of(self.digests)


def _is_unproven(_name: str, _tensor: Tensor) -> bool:
    return False


class ReceivedWeights(NamedTuple):
    """Weights that have arrived in an engine.

    Args:
        weights: full tensors by name, or what ``header`` says.
        digests: of the weights that the engine must have afterwards; empty for a broadcast that
            has only checked the bytes.
        in_place: whether a tensor of this name is the very one whose bytes its writer has proven.
        stays: the tensors will not change or disappear: an engine may compute on them where they
            are.
    """

    weights: Mapping[str, Tensor]
    digests: Mapping[str, str]
    header: WeightsHeader = WeightsHeader()
    in_place: Callable[[str, Tensor], bool] = _is_unproven
    stays: bool = False


def content_of(digests: Mapping[str, str]) -> str:
    """Identifies weights as a whole, by the digests of their tensors."""
    text = json.dumps(sorted(digests.items()))
    return xxhash.xxh3_64_hexdigest(text.encode())


class DeltaEncoder:
    """The trainer's side: compares tensor after tensor with a copy of the weights sent before."""

    def __init__(self) -> None:
        self._copy: dict[str, Tensor] = {}
        self._digests: dict[str, str] = {}
        self._fallbacks = 0

    def encode(self, specs: TensorSpecs, weights: Iterable[tuple[str, Tensor]]) -> Encoded:
        """Encode a delta, or all weights if a delta takes too many bytes; keeps a copy.

        Args:
            specs: of all tensors, as they are sent.
            weights: full tensors, one after the other; each may change afterwards.
        """
        if specs != specs_of(self._copy):
            self._copy = {}
            for name, tensor in weights:
                dtype, _ = specs[name]
                self._copy[name] = tensor.to("cpu", dtype, copy=True).contiguous()
            self._digests = digests_of(self._copy)
            return self.whole({"sync/share_changed": 1.0})
        base = content_of(self._digests)
        limit = MAX_FRACTION * self._bytes()
        delta: dict[str, Tensor] = {}
        changed_count = 0
        size = 0
        for name, tensor in weights:
            dtype, _ = specs[name]
            tensor = tensor.to("cpu", dtype).contiguous()
            sent, count = changes(self._copy[name], tensor)
            if sent is None:
                continue
            changed_count += count
            size += sum(component.nbytes for component in sent)
            self._digests[name] = digest(self._copy[name])
            if size > limit:
                delta.clear()  # all weights will be sent, from the copy
            else:
                for component, value in sent._asdict().items():
                    delta[f"{component}:{name}"] = value
        elements = sum(tensor.numel() for tensor in self._copy.values())
        metrics = {"sync/share_changed": changed_count / max(elements, 1)}
        if size > limit:
            return self.whole(metrics, fell_back=True)
        metrics |= {"sync/bytes": float(size), "sync/fallbacks": float(self._fallbacks)}
        return Encoded(delta, dict(self._digests), WeightsHeader(base), metrics)

    def whole(
        self, metrics: Mapping[str, float] | None = None, *, fell_back: bool = False
    ) -> Encoded:
        """All weights of the latest encoding, for an engine with other ones.

        Args:
            fell_back: they replace a delta.
        """
        self._fallbacks += fell_back
        metrics = dict(metrics or {})
        metrics["sync/bytes"] = float(self._bytes())
        metrics["sync/fallbacks"] = float(self._fallbacks)
        return Encoded(self._copy, dict(self._digests), WeightsHeader(keep=True), metrics)

    def _bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._copy.values())


class DeltaDecoder:
    """The side of an engine whose weights have another layout or dtype: keeps a copy of all."""

    def __init__(self) -> None:
        self._copy: dict[str, Tensor] = {}
        self._content = ""

    def decode(
        self, sent: Mapping[str, Tensor], digests: Mapping[str, str], header: WeightsHeader
    ) -> Mapping[str, Tensor]:
        """All weights, after all weights or a delta arrived.

        Raises:
            WeightMismatchError: for a delta of other weights; nothing has been changed then.
        """
        if not header.base and not header.keep:
            # No delta will follow: the memory of the copy is freed.
            self._copy = {}
            self._content = ""
            return sent
        if header.base:
            if header.base != self._content:
                raise WeightMismatchError(
                    f"a delta of other weights ({header.base}) than are kept ({self._content})"
                )
            # Unknown until all changes are written: a failure in between must not look complete.
            self._content = ""
            put_changes(sent, self._copy)
        elif specs_of(sent) == specs_of(self._copy):
            for name, tensor in sent.items():
                self._copy[name].copy_(tensor)
        else:
            self._copy = {name: tensor.clone() for name, tensor in sent.items()}
        self._content = content_of(digests)
        return self._copy


@torch.no_grad()
def put_changes(sent: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
    """Write a delta into the tensors of the same names."""
    for key, counts in sent.items():
        if key.startswith("counts:"):
            name = key.removeprefix("counts:")
            where = sent[f"where:{name}"]
            values = sent[f"values:{name}"]
            put(into[name], Changes(counts, where, values))
