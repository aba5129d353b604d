"""Weights from GPU to the same GPU, by CUDA IPC: policy ranks and vLLM engines that share devices (``colocate_all``).

Invariant: a part of the weights lies in one buffer on each rank's device, whose memory the engines on that device have
mapped. It is written to only while no engine reads it: when the part before has been answered for, by all of them.

    ranks        gather, pack part 1          gather, pack part 2          free
    controller                      ─handles─▶           ◀─done, handles─▶
    engines                         copy, load                  copy, load

| who waits                        | for what                               | woken by                             |
|----------------------------------|----------------------------------------|--------------------------------------|
| ``Packer.pack`` on each rank     | the other ranks, in gathering          | NCCL; the end of a rank ends all     |
| the controller, for ``pack``     | the slowest rank                       | the ranks; their heartbeat           |
| the controller, for the engines  | ``update_weights`` of one part by each | an engine; its death                 |
| an engine, in ``update_weights`` | its own device alone                   |                                      |

So nobody waits inside a collective for the other side, and who dies leaves nobody behind: engines that have a part of
the weights are told that no more comes (``BROKEN_OFF``), and an engine's death is one (``weight_sync.turns``).

What holds this, in the installed sources (torch 2.13, vLLM 0.32), call by call:

1. ``Packer`` makes the buffer with torch's own allocator. ``reduce_tensor`` exports it: ``_share_cuda_`` gives the
   handle of the allocation that the buffer lies in, its place in that, a slot of a counter in shared memory, and an
   event that is recorded once, there. What is copied into the buffer later is not behind that event: ``pack`` therefore
   synchronizes its stream before it answers. There is one export for each engine on the device: a slot pairs with one
   reader that lets go once (vLLM's ``PackedBufferImporter`` says why two cannot share it). A rank without engines
   exports nothing: what is exported and never let go of is never given back by torch.
2. The handle goes as words and numbers (``Handle``) by Ray to the engine's actor and by vLLM's msgpack to its worker.
   vLLM's own sender puts torch's classes into the message, which its msgpack takes only as a pickle, behind
   ``VLLM_ALLOW_INSECURE_SERIALIZATION``. That is not set here, and nothing is unpickled: the classes are always the
   same, and are put in where the memory is opened (``vllm_cuda_ipc``).
3. In the worker ``IPCWeightTransferEngine.receive_weights`` finds the handle by its GPU's UUID,
   ``rebuild_cuda_tensor`` opens it under the worker's own device number (once: the importer keeps it for the parts that
   follow), and each tensor is cloned out of it. ``WeightTransferEngine.update_weights`` synchronizes the device before
   it answers, so an answer means that the buffer has been read.
4. After the last part ``finish_weight_update`` lets go of the mapping, which counts the slot down; then ``close`` drops
   the buffer, and ``ipc_collect`` gives back what no slot holds. The buffer must live until then, not longer. An engine
   that dies with the mapping never counts down: torch keeps the buffer (``PART_BYTES``, or the largest parameter)
   until the rank ends.

Not traced: torch's ``expandable_segments``, whose handles are of another kind.

That the bytes arrived is proven part by part: both ends add up every tensor on the device (``sum_of``). What the layers
compute with is not read back, so the probe runs after every sync.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from skyasync.weight_sync.kinds import Kinds, bytes_of
from skyasync.weight_sync.update import PART_BYTES

SUMMED = 1 << 20  # elements that are added up at a time
_GOLDEN = -7046029254386353131  # 2^64 over the golden ratio
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Handle = dict[str, Any]
"""What torch's ``_share_cuda_`` says of a buffer, in words and numbers, and the GPU's UUID."""


class ForEngine(NamedTuple):
    """What one engine needs of a part beside its contents' names."""

    handle: Handle
    sums: list[int]


@dataclass(frozen=True)
class Packed:
    """A part of the weights, as one rank says it; ``engines`` are those on its device, by their places."""

    part: int
    last: bool
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    sizes: list[int]
    engines: dict[int, ForEngine]


class Packer:
    """A rank's end: gathers parameter by parameter into one buffer, part after part. All ranks make and call it alike.

    Args:
        kinds: of all weights, as the engines are to get them.
        weights: whole, one after the other, in the order of ``kinds``.
        engines: on this device, by their places.
    """

    def __init__(
        self,
        kinds: Kinds,
        weights: Iterator[tuple[str, Tensor]],
        device: torch.device,
        engines: Sequence[int],
    ) -> None:
        self._kinds, self._weights, self._device = kinds, weights, device
        self._parts, self._number = parts_of(kinds), 0
        self._buffer: Tensor | None = None
        self._handles: dict[int, Handle] = {}
        if engines:
            size = max(sum(bytes_of(kinds[name]) for name in part) for part in self._parts)
            self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
            self._handles = {engine: handle_of(self._buffer) for engine in engines}

    def pack(self) -> Packed:
        """The next part. No engine reads the one before any more."""
        names, number = self._parts[self._number], self._number
        sums: list[Tensor] = []
        end = 0
        for name in names:
            came, whole = next(self._weights)
            if came != name:
                raise RuntimeError(f"{came} came where {name} was said to come")
            if self._buffer is not None:
                tensor = whole.to(self._device, self._kinds[name][0]).contiguous()
                size = bytes_of(self._kinds[name])
                self._buffer[end : end + size].copy_(tensor.reshape(-1).view(torch.uint8))
                sums.append(sum_of(tensor))
                end += size
        added = torch.stack(sums).tolist() if sums else []
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._number += 1
        kinds = [self._kinds[name] for name in names]
        return Packed(
            number,
            self._number == len(self._parts),
            names,
            [str(dtype).removeprefix("torch.") for dtype, _ in kinds],
            [list(shape) for _, shape in kinds],
            [bytes_of(kind) for kind in kinds],
            {engine: ForEngine(handle, added) for engine, handle in self._handles.items()},
        )

    def close(self) -> None:
        """Give the buffer back; no engine has it mapped."""
        self._buffer, self._handles = None, {}
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()  # for the engines' caches


def parts_of(kinds: Kinds) -> list[list[str]]:
    """The names of each part: no larger than ``PART_BYTES`` unless one tensor is; each tensor at a multiple of its
    elements' size, without which it cannot be looked at where it lies."""
    parts: list[list[str]] = [[]]
    end = 0
    for name, kind in kinds.items():
        size, (dtype, _) = bytes_of(kind), kind
        if parts[-1] and (end + size > PART_BYTES or end % dtype.itemsize):
            parts.append([])
            end = 0
        parts[-1].append(name)
        end += size
    return parts


def message(ranks: Sequence[Packed]) -> dict[str, Any]:
    """What all ranks have said of a part, for the engines: its contents once, and what each of them needs."""
    first = ranks[0]
    return vars(first) | {"engines": {place: said for rank in ranks for place, said in rank.engines.items()}}


def own_part(info: dict[str, Any], engine: int) -> dict[str, Any]:
    """A part as one engine is told it, in words and numbers.

    Raises:
        RuntimeError: if no rank has its device.
    """
    if "engines" not in info:
        return dict(info)
    if engine not in info["engines"]:
        raise RuntimeError(
            f"no rank of the policy shares its GPU with engine {engine}: set "
            f"generator.weight_sync_backend=shared_memory"
        )
    own = info["engines"][engine]
    contents = {name: value for name, value in info.items() if name != "engines"}
    return contents | {"handle": own.handle, "sums": own.sums}


def handle_of(buffer: Tensor) -> Handle:
    """One more export of a buffer on a GPU, for one reader."""
    _, arguments = reduce_tensor(buffer)
    (*_, handle, size, offset, _, counter, counter_offset, event, wait) = arguments
    return {
        "gpu": str(torch.cuda.get_device_properties(buffer.device).uuid),
        "handle": handle,
        "size": size,
        "offset": offset,
        "counter": counter,
        "counter_offset": counter_offset,
        "event": event,
        "wait": wait,
    }


def sum_of(tensor: Tensor) -> Tensor:
    """64 bits that depend on every byte and on its place, and are the same on every device (int64, added up modulo
    2^64); an element that differs from what it was always shows."""
    elements = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    factors = torch.arange(min(SUMMED, max(len(elements), 1)), device=tensor.device) * _GOLDEN | 1
    for first in range(0, len(elements), SUMMED):
        piece = elements[first : first + SUMMED].long()
        total = total * 31 + (piece * factors[: len(piece)]).sum()
    return total
