"""Weights by CUDA IPC, for policy ranks and vLLM engines that share GPUs (``colocate_all``).

Invariant: a part of the weights lies in one buffer on each rank's device, whose memory the engines
on that device have mapped. It is written to only while no engine reads it: when all of them have
answered for the part before.

    ranks        gather, pack part 1          gather, pack part 2          free
    controller                      ─handles─▶           ◀─done, handles─▶
    engines                         copy, load                  copy, load

| who waits                        | for what                               | woken by                             |
|----------------------------------|----------------------------------------|--------------------------------------|
| ``pack`` on each rank            | the other ranks, in gathering          | NCCL; the end of a rank ends all     |
| the controller, for ``pack``     | the slowest rank                       | the ranks; their heartbeat           |
| the controller, for the engines  | ``update_weights`` of one part by each | an engine; its failure               |
| an engine, in ``update_weights`` | its own device alone                   |                                      |

So neither side waits inside a collective for the other. Engines that have a part of the weights are
told that no more comes (``BROKEN_OFF``), and an engine's failure ends no other process
(``weight_sync.colocation``).

What holds this, in the installed sources (torch 2.13, vLLM 0.32), call by call:

1. ``begin`` makes the buffer with torch's own allocator. ``reduce_tensor`` exports it:
   ``_share_cuda_`` gives the handle of the allocation, the buffer's offset in it, a slot of a
   counter in shared memory, and an event. The event is recorded once, there, so a later copy into
   the buffer is not ordered by it: ``pack`` therefore synchronizes its stream before it answers.
   There is one export for each engine on the device: a slot pairs with one reader that lets go
   once (vLLM's ``PackedBufferImporter`` says why two cannot share it). A rank without engines
   exports nothing: torch never frees an export that no reader lets go of.
2. The handle goes as text and numbers (``Handle``) by Ray to the engine's actor and by vLLM's
   msgpack to its worker. vLLM's own sender puts torch's classes into the message, which its msgpack
   takes only as a pickle, behind ``VLLM_ALLOW_INSECURE_SERIALIZATION``. That is not set here, and
   nothing is unpickled: the classes are always the same, and are put in where the memory is opened
   (``vllm_worker``).
3. In the worker ``IPCWeightTransferEngine.receive_weights`` finds the handle by its GPU's UUID,
   ``rebuild_cuda_tensor`` opens it under the worker's own device number (once: the importer keeps
   it for the parts that follow), and each tensor is cloned out of it.
   ``WeightTransferEngine.update_weights`` synchronizes the device before it answers, so an answer
   means that the buffer has been read.
4. After the last part ``finish_weight_update`` lets go of the mapping, which counts the slot down;
   then ``end`` drops the buffer, and ``ipc_collect`` frees what no slot holds. The buffer must live
   until then, not longer. An engine that fails with the mapping never counts down: torch keeps the
   buffer (``PART_BYTES``, or the largest parameter) until the rank ends.

Not traced: torch's ``expandable_segments``, whose handles are of another kind.

That the bytes arrived is proven part by part: both sides add up every tensor on the device
(``sum_of``). What the layers compute with is not read back, so the verification prompts are scored
after every sync.

Which engine shares which GPU follows from the placement (``colocated_rank``); the engines compare
the GPUs' own names. A late engine finds the policy in host memory, as it was sent: it reads the
weights from shared memory.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from skyasync.utils.task_group import afterwards
from skyasync.weight_sync.tensors import (
    TensorSpecs,
    bytes_of,
    chunks_of,
    dtype_name,
    pack,
    sum_of,
    unpack,
)
from skyasync.weight_sync.transfers import TRANSFERS
from skyasync.weight_sync.transfers.base import PolicyRanks, WeightTransfer
from skyasync.weight_sync.update import CUDA_IPC, PART_BYTES, WeightUpdate

if TYPE_CHECKING:
    from skyasync.config.schema import Config
    from skyasync.weight_sync.full_tensors import FullTensors

Handle = dict[str, Any]
"""The result of torch's ``_share_cuda_`` as text and numbers, and the GPU's UUID."""


@TRANSFERS.register("cuda_ipc")
class CudaIPCTransfer(WeightTransfer):
    """Sends part by part, each when every engine has loaded the one before.

    Args:
        ranks: how many the policy has.
        engines: the indices of the engines that take part in the next sync.
    """

    sender = "cuda_ipc"

    def __init__(
        self, policy: PolicyRanks, ranks: int, engines: Callable[[], Sequence[int]]
    ) -> None:
        super().__init__(policy)
        self._count = ranks
        self._engines = engines

    @classmethod
    def of_run(
        cls,
        policy: Any,  # noqa: ANN401
        cfg: Config,
        engines: Callable[[], Sequence[int]],
        *,
        gpus: bool,
    ) -> Self:
        del cfg, gpus
        return cls(policy, policy.ranks, engines)

    async def publish(self, version: int) -> WeightUpdate:
        """The update alone: nothing is packed yet."""
        return WeightUpdate(version, CUDA_IPC, {"in_parts": True})

    async def parts(self, update: WeightUpdate) -> AsyncGenerator[WeightUpdate]:
        """Pack each part when every engine has loaded the one before.

        Closing the iterator frees the buffers.
        """
        by_rank: list[list[int]] = [[] for _ in range(self._count)]
        for engine in self._engines():
            by_rank[engine % self._count].append(engine)
        async with afterwards(self._ranks, "end"):
            await self._ranks("begin", by_rank)
            is_last = False
            while not is_last:
                part = message(await self._ranks("pack"))
                yield replace(update, info=part)
                is_last = part["last"]

    async def release(self, update: WeightUpdate) -> None:
        if update.backend != CUDA_IPC:
            await self._policy.call_first("transfer_weights", "shared_memory", "free")

    async def for_late_engine(self, version: int) -> WeightUpdate:
        """The policy must be in host memory."""
        info, *_ = await self._policy.call("transfer_weights", "shared_memory", "write")
        await self._policy.call_first("transfer_weights", "shared_memory", "prove")
        return WeightUpdate(version, "shared_memory", info | {"late": True})


@dataclass(frozen=True)
class Packed:
    """A part of one rank.

    Args:
        engines: by index, the ``handle`` and ``sums`` for each engine on the rank's device.
    """

    part: int
    last: bool
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    sizes: list[int]
    engines: dict[int, dict[str, Any]]


class CudaIPCSender:
    """The packer on each policy rank; all ranks call it alike.

    It gathers parameter by parameter into one buffer, part after part.
    """

    def __init__(self, weights: Callable[[], FullTensors], rank: int, device: torch.device) -> None:
        self._weights = weights
        self._rank = rank
        self._device = device
        self._specs: TensorSpecs = {}
        self._chunks: list[list[str]] = []
        self._number = 0  # of the next part
        self._remaining: Iterator[tuple[str, Tensor]] = iter(())
        self._buffer: Tensor | None = None
        self._handles: dict[int, Handle] | None = None  # by engine; None: no update has begun

    def begin(self, engines: Sequence[Sequence[int]]) -> None:
        """Begin an update.

        Args:
            engines: for each rank, the indices of the engines that share its device.
        """
        tensors = self._weights()
        self._specs = tensors.specs
        self._remaining = iter(tensors)
        self._chunks = chunks_of(self._specs, PART_BYTES)
        self._number = 0
        self._buffer = None
        self._handles = {}
        # A rank without engines exports nothing: torch would never free it.
        if engines[self._rank]:
            size = 1  # torch exports no empty buffer
            for names in self._chunks:
                chunk_size = sum(bytes_of(self._specs[name]) for name in names)
                size = max(size, chunk_size)
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            for engine in engines[self._rank]:
                self._handles[engine] = handle_of(self._buffer)

    def pack(self) -> Packed:
        """Gather the next part into the buffer, which is complete when this returns.

        No engine reads the buffer meanwhile.
        """
        assert self._handles is not None
        number = self._number
        names = self._chunks[number]
        end = 0
        specs = {name: self._specs[name] for name in names}
        for name in names:
            gathered_name, tensor = next(self._remaining)
            assert gathered_name == name, f"{gathered_name} was gathered, and {name} was announced"
            if self._buffer is not None:
                pack(tensor, specs[name], self._buffer[end:])
                end += bytes_of(specs[name])
        sums: list[int] = []
        if self._buffer is not None and names:
            packed_tensors = unpack(self._buffer, names, specs)
            sums = torch.stack([sum_of(tensor) for tensor in packed_tensors.values()]).tolist()
        if self._device.type == "cuda":
            # The exported event does not order this copy.
            torch.cuda.current_stream(self._device).synchronize()
        self._number += 1
        return Packed(
            part=number,
            last=self._number == len(self._chunks),
            names=names,
            dtype_names=[dtype_name(dtype) for dtype, _ in specs.values()],
            shapes=[list(shape) for _, shape in specs.values()],
            sizes=[bytes_of(spec) for spec in specs.values()],
            engines={
                engine: {"handle": handle, "sums": sums} for engine, handle in self._handles.items()
            },
        )

    def end(self) -> None:
        """Free the buffer: no engine reads a part or has it mapped any more."""
        if self._handles is None:
            return
        self._buffer = None
        self._handles = None
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # frees exports whose readers have let go
            torch.cuda.empty_cache()  # for the engines' caches
        self._remaining = iter(())


def message(ranks: Sequence[Packed]) -> dict[str, Any]:
    """Join a part of all ranks for the engines: its contents once, and handles for each engine."""
    engines: dict[int, dict[str, Any]] = {}
    for rank in ranks:
        engines |= rank.engines
    return vars(ranks[0]) | {"engines": engines}


def own_part(info: dict[str, Any], engine: int) -> dict[str, Any]:
    """A part as one engine gets it, in text and numbers.

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
    message = info | info["engines"][engine]
    del message["engines"]
    return message


def handle_of(buffer: Tensor) -> Handle:
    """Export a buffer on a GPU for one reader."""
    _, arguments = reduce_tensor(buffer)
    # In the order of torch's ``rebuild_cuda_tensor``; the classes before these are always the same.
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
