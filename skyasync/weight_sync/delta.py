"""The delta encoding: only what has changed since the last weight sync, lossless.

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
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from skyasync.weight_sync.tensors import TensorSpecs, digest, digests_of, specs_of
from skyasync.weight_sync.update import WeightMismatchError, WeightSyncError

MOST = 0.5  # of the bytes of all weights: a delta that takes more is not sent
PIECE = 1 << 16  # elements; their positions fit into two bytes
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Changes(NamedTuple):
    """Of one tensor: how many elements of each piece are sent (int32), where they are (bytes), what
    they are."""

    counts: Tensor
    where: Tensor
    values: Tensor


def changes(old: Tensor, new: Tensor) -> tuple[Changes | None, int]:
    """What makes ``old`` into ``new``, None if nothing, and how many elements differ; ``old``
    becomes ``new`` here.

    Both are on the CPU, contiguous, of one dtype and shape.
    """
    before = integers(old)
    after = integers(new)
    counts = np.zeros(-(-len(after) // PIECE), dtype=np.int32)
    where: list[npt.NDArray[Any]] = []
    values: list[npt.NDArray[Any]] = []
    changed = 0
    for number, first in enumerate(range(0, len(after), PIECE)):
        was = before[first : first + PIECE]
        now = after[first : first + PIECE]
        differs = was != now
        count = int(np.count_nonzero(differs))
        if not count:
            continue
        changed += count
        if _bytes_of_positions(count, len(now)) + count * now.itemsize >= now.nbytes:
            counts[number] = len(now)
            values.append(now.copy())
        else:
            positions = np.flatnonzero(differs)
            counts[number] = count
            few = _few(count, len(now))
            where.append(
                positions.astype(np.uint16).view(np.uint8) if few else np.packbits(differs)
            )
            values.append(now[positions])
        was[:] = now
    if not changed:
        return None, 0
    if where:
        joined_where = np.concatenate(where)
    else:
        joined_where = np.zeros(0, np.uint8)
    return Changes(*map(torch.from_numpy, (counts, joined_where, np.concatenate(values)))), changed


def put(tensor: Tensor, sent: Changes) -> None:
    """Write what was sent into a tensor, in place; on a device by way of the host.

    Raises:
        WeightSyncError: if it is not of a tensor of this size and dtype; nothing has been written
            then.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        host = tensor.cpu().contiguous()
        put(host, sent)
        tensor.copy_(host)
        return
    elements = integers(tensor)
    values = sent.values.numpy()
    where = sent.where.numpy()
    counts = sent.counts.tolist()
    sizes = [min(PIECE, len(elements) - first) for first in range(0, len(elements), PIECE)]
    fits = (
        values.dtype == elements.dtype and len(counts) == len(sizes) and sum(counts) == len(values)
    )
    if not fits or sum(map(_bytes_of_positions, counts, sizes)) != len(where):
        raise WeightSyncError("changes arrived that are of another tensor, or cut short")
    at_value = at_position = 0
    for number, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        piece = elements[number * PIECE :][:size]
        new = values[at_value:][:count]
        bits = where[at_position:][: _bytes_of_positions(count, size)]
        if count == size:
            piece[:] = new
        elif _few(count, size):
            piece[np.frombuffer(bits.tobytes(), dtype=np.uint16)] = new
        elif count:
            piece[np.flatnonzero(np.unpackbits(bits, count=size))] = new
        at_value = at_value + len(new)
        at_position = at_position + len(bits)


def integers(tensor: Tensor) -> npt.NDArray[Any]:
    """The elements of a contiguous tensor on the CPU, as a flat numpy array of integers that shares
    its memory."""
    return tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()]).numpy()


def _few(count: int, size: int) -> bool:
    return 2 * count < -(-size // 8)


def _bytes_of_positions(count: int, size: int) -> int:
    if count == size:
        return 0
    return min(2 * count, -(-size // 8))


class WeightsHeader(NamedTuple):
    """What a file or a broadcast contains, besides the digests.

    Args:
        base: the content of the weights that it is a delta of; empty for all weights.
        keep: the reader keeps its weights: a delta of them may follow.
        adapter: it has LoRA adapters alone; see ``skyasync.weight_sync.adapters``.
    """

    base: str = ""
    keep: bool = False
    adapter: dict[str, Any] | None = None


class Encoded(NamedTuple):
    """What is sent instead of the full weights: ``tensors``, and the digests of what the engines
    must have."""

    tensors: Mapping[str, Tensor]
    digests: dict[str, str]
    about: WeightsHeader
    metrics: dict[str, float]

    @property
    def content(self) -> str:
        return content_of(self.digests)


class ReceivedWeights(NamedTuple):
    """What has arrived in an engine.

    Args:
        weights: full tensors by name, or what ``about`` says.
        digests: of what the engine must have afterwards; empty for a broadcast that has only
            checked the bytes.
        in_place: whether a tensor of this name is the very one whose bytes its writer has proven.
        stays: the tensors will not change or disappear: an engine may compute on them where they
            are.
    """

    weights: Mapping[str, Tensor]
    digests: Mapping[str, str]
    about: WeightsHeader = WeightsHeader()
    in_place: Callable[[str, Tensor], bool] = lambda _name, _tensor: False
    stays: bool = False


def content_of(digests: Mapping[str, str]) -> str:
    """Identifies weights as a whole, by the digests of their tensors."""
    return xxhash.xxh3_64_hexdigest(json.dumps(sorted(digests.items())).encode())


class DeltaEncoder:
    """On the trainer: compares tensor after tensor with a copy of what was sent last."""

    def __init__(self) -> None:
        self._copy: dict[str, Tensor] = {}
        self._digests: dict[str, str] = {}
        self._fallbacks = 0

    def encode(self, specs: TensorSpecs, weights: Iterable[tuple[str, Tensor]]) -> Encoded:
        """What has changed since the last time, or all weights if that takes fewer bytes; keeps a
        copy.

        Args:
            specs: of all tensors, as they are sent.
            weights: full tensors, one after the other; each may change afterwards.
        """
        if specs != specs_of(self._copy):
            self._copy = {}
            for name, tensor in weights:
                self._copy[name] = tensor.to("cpu", specs[name][0], copy=True).contiguous()
            self._digests = digests_of(self._copy)
            return self.whole({"sync/share_changed": 1.0})
        base = content_of(self._digests)
        limit = MOST * sum(tensor.nbytes for tensor in self._copy.values())
        delta: dict[str, Tensor] = {}
        changed = size = 0
        for name, tensor in weights:
            sent, count = changes(self._copy[name], tensor.to("cpu", specs[name][0]).contiguous())
            if sent is None:
                continue
            changed = changed + count
            size = size + sum(part.nbytes for part in sent)
            self._digests[name] = digest(self._copy[name])
            if size > limit:
                delta.clear()  # all weights will be sent, from the copy
            else:
                delta |= {f"{part}:{name}": value for part, value in sent._asdict().items()}
        metrics = {
            "sync/share_changed": changed / max(sum(prod(shape) for _, shape in specs.values()), 1)
        }
        if size > limit:
            return self.whole(metrics, fell_back=True)
        metrics |= {"sync/bytes": float(size), "sync/fallbacks": float(self._fallbacks)}
        return Encoded(delta, dict(self._digests), WeightsHeader(base), metrics)

    def whole(
        self, metrics: Mapping[str, float] | None = None, *, fell_back: bool = False
    ) -> Encoded:
        """All weights that were encoded last, for an engine with other ones.

        Args:
            fell_back: they replace a delta.
        """
        self._fallbacks += fell_back
        size = sum(tensor.nbytes for tensor in self._copy.values())
        own = {"sync/bytes": float(size), "sync/fallbacks": float(self._fallbacks)}
        return Encoded(
            self._copy, dict(self._digests), WeightsHeader(keep=True), {**(metrics or {}), **own}
        )


class DeltaDecoder:
    """In an engine whose own weights have another layout or dtype: keeps a copy of what was
    sent."""

    def __init__(self) -> None:
        self._copy: dict[str, Tensor] = {}
        self._content = ""

    def decode(
        self, sent: Mapping[str, Tensor], digests: Mapping[str, str], about: WeightsHeader
    ) -> Mapping[str, Tensor]:
        """All weights, after all weights or a delta arrived.

        Raises:
            WeightMismatchError: for a delta of other weights; nothing has been changed then.
        """
        if not about.base and not about.keep:
            self._copy = {}
            self._content = ""
            return sent
        if about.base:
            if about.base != self._content:
                raise WeightMismatchError(
                    f"a delta of other weights ({about.base}) than are kept ({self._content})"
                )
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
    for name in (key.removeprefix("counts:") for key in sent if key.startswith("counts:")):
        put(into[name], Changes(*(sent[f"{part}:{name}"] for part in Changes._fields)))
