"""Weights by NCCL: the trainer's rank 0 broadcasts its parameters to the workers of all vLLM engines.

Invariant: the message that announces an update and the broadcast that follows it enumerate the same
parameters, in the same order, with the same dtypes and shapes; the receivers' buffers are cut by the message.

The broadcast is vLLM's own (``NCCLTrainerWeightTransferEngine``), without its remote control of the engines:
here the controller hands them the message. Both ends meet inside NCCL, so they must run at the same time:

| who waits                                   | for what                        | woken by                           |
|---------------------------------------------|---------------------------------|------------------------------------|
| ``NCCLSender.send`` (a thread on each rank) | the engines' ``update_weights`` | NCCL; the first time the           |
| an engine's ``update_weights``              | ``send`` on rank 0              | rendezvous, for at most 5 minutes  |

A policy worker makes one sender per rank and announces with ``update``; ``WeightSync`` runs ``send`` beside the
engines' ``update_weights``. Ranks: 0 is the trainer; the i-th of the message's ``members`` (all engines, where it names
none) has ``1 + i * workers_per_engine`` and the following. A message with another rendezvous than the one before is of
another group, which both ends form anew: they leave the former one first, also if others in it are dead (vLLM's way to
leave is NCCL's to abort).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from skyasync.weight_sync.update import WeightUpdate

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

BACKEND = "nccl"


class ParameterMeta(NamedTuple):
    """What the receiver must know of a parameter: dtype on the wire, full (unsharded) shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Rendezvous(NamedTuple):
    """Where trainer and engines meet: address and free port of the trainer's rank 0, engines' workers in all."""

    address: str
    port: int
    engine_workers: int


class Parameters(Protocol):
    """A model, or what its weights are once something has been added to them."""

    def named_parameters(self) -> Iterator[tuple[str, Any]]: ...


class NCCLSender:
    """The trainer's end. Made and called alike on every trainer rank; only rank 0 broadcasts.

    Args:
        model: the policy; parameters with a ``full_tensor`` (sharded ones) are gathered one at a time.
        rank: this trainer rank.
        dtype: what is sent; None sends each parameter as it is.
        device: that sends; None: the parameters' own, which may be the host (``cpu_offload``).
    """

    def __init__(
        self,
        model: Parameters,
        rendezvous: Rendezvous,
        *,
        rank: int,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._model, self._rendezvous, self._rank, self._dtype = model, rendezvous, rank, dtype
        self._device = device
        self._engine: NCCLTrainerWeightTransferEngine | None = None

    def update(self, version: int) -> WeightUpdate:
        """The message for all engines. No communication."""
        address, port, workers = self._rendezvous
        group = {"master_address": address, "master_port": port, "world_size": 1 + workers, "packed": True}
        return WeightUpdate(version, BACKEND, {"rendezvous": group, "parameters": parameter_info(self.metadata())})

    def send(self) -> None:
        """Broadcast the parameters once; the first call also forms the group. Blocks until they are sent.

        vLLM reads them on streams of its own, which wait for nothing: what this stream has still to do to them (the
        optimizer step, on a GPU, is only queued when it returns) is awaited first.
        """
        if self._engine is None:
            self._engine = self._join()
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self._engine.send_weights()

    def close(self) -> None:
        """Leave the group. Safe to call twice."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None

    def _join(self) -> NCCLTrainerWeightTransferEngine:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        address, port, workers = self._rendezvous
        group = NCCLTrainerInitInfo(address, port, 1 + workers, packed=True, rank=self._rank)
        source: Any = self  # has the two methods of a WeightSource that are used
        return NCCLTrainerWeightTransferEngine.trainer_init(group, client=_NoControl(), source=source)

    def metadata(self) -> list[ParameterMeta]:
        """Of every parameter, in the order of iteration. Gathers nothing; tied parameters appear once."""
        return [
            ParameterMeta(name, self._dtype or parameter.dtype, tuple(parameter.shape))
            for name, parameter in self._model.named_parameters()
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors. Collective: all trainer ranks iterate together."""
        for name, parameter in self._model.named_parameters():
            gather = getattr(parameter, "full_tensor", None)
            full: Tensor = gather() if gather else parameter
            yield name, full.detach().to(self._device or full.device, self._dtype or full.dtype)


def parameter_info(parameters: list[ParameterMeta]) -> dict[str, Any]:
    """The fields of vLLM's ``NCCLWeightTransferUpdateInfo``."""
    return {
        "names": [name for name, _, _ in parameters],
        "dtype_names": [str(dtype).removeprefix("torch.") for _, dtype, _ in parameters],
        "shapes": [list(shape) for _, _, shape in parameters],
    }


def worker_info(info: dict[str, Any], engine_index: int, workers_per_engine: int) -> dict[str, Any]:
    """From a message's ``info`` the fields of vLLM's ``NCCLWeightTransferInitInfo`` for one engine."""
    members = info.get("members", range(engine_index + 1))
    place = 0 if members is None else members.index(engine_index)  # None: a latecomer's, who is alone
    return info["rendezvous"] | {"rank_offset": 1 + place * workers_per_engine}


class _NoControl:
    """Stands where vLLM's sender expects the engines' remote control: here the controller has that part."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: object) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...
