"""One rank of a model that engines compute with: the ways its weights leave it.

Invariant: every way but one goes through ``Leaving``, parameter by parameter, so no rank has a second copy of the whole
in memory of its own. What is kept for a reason is said where it is kept: the copy that changes are found by
(``ChangedWeights``), and what lies in memory that engines have mapped (``Lender``). NCCL has a stream of its own.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from skyasync.inference.settings import computes_on_lent_weights
from skyasync.engines.settings import computes_on_lent_weights
from skyasync.models.fsdp.backend import FSDPBackend
from skyasync.weight_sync.adapter_file import write_adapter
from skyasync.weight_sync.changed_weights import ChangedWeights, Published
from skyasync.weight_sync.cuda_ipc import Packed, Packer
from skyasync.weight_sync.kept_file import KeptFile
from skyasync.weight_sync.lent import Lender
from skyasync.weight_sync.nccl import NCCLSender, Rendezvous
from skyasync.weight_sync.shared_memory import remove_weights, write_one_by_one
from skyasync.weight_sync.update import WeightUpdate
from skyasync.workers.file_names import Apart, has_other_names, wants_file_names
from skyasync.workers.leaving import Leaving, kinds_in
from skyasync.workers.model_worker import ModelWorker

if TYPE_CHECKING:
    from skyasync.weight_sync.carry import Carried


class Publisher(ModelWorker):
    """Hands its weights out."""

    backend: FSDPBackend

    _apart: Apart | None = None
    _packer: Packer | None = None

    @cached_property
    def _lender(self) -> Lender:
        return Lender(computed_on=computes_on_lent_weights(self.cfg))

    @cached_property
    def _changed(self) -> ChangedWeights:
        return ChangedWeights()

    @cached_property
    def kept(self) -> KeptFile:
        """What was published last, where that is wanted."""
        return KeptFile(named=bool(self.cfg.generator.weight_sync_dir))

    def _leaving(self) -> Leaving:
        """The weights as engines load them."""
        backend = self.backend
        weights = backend.sharded_weights()
        if self._apart is None and wants_file_names(self.cfg) and has_other_names(backend.model.model):
            self._apart = Apart(backend.model.model, kinds_in(weights, backend.dtype), backend.adapters)
        return Leaving(weights, backend.dtype, self._apart)

    def publish(self) -> str | None:
        """Write the full weights to shared memory; the path on rank 0, None on the others. All ranks call it.

        What has been kept is dropped before: there is room for one file.
        """
        leaving = self._leaving()
        if self.rank != 0:
            leaving.only_gather()
            return None
        self.kept.drop()
        return write_one_by_one(leaving.kinds, leaving, self.cfg.generator.weight_sync_dir)

    def lend(self) -> dict[str, Any] | None:
        """As ``publish``, into memory that engines of this machine have mapped; what they need to find it on rank 0."""
        leaving = self._leaving()
        if self.rank != 0:
            leaving.only_gather()
            return None
        return self._lender.write(leaving.kinds, leaving)

    def prove_lent(self) -> None:
        """Raises WeightSyncError unless the memory holds what ``lend`` wrote."""
        self._lender.prove()

    def carry(self, info: dict[str, Any], receivers: dict[str, Any], silence_s: float) -> Carried:
        """Give what engines of this node are told of to those of other nodes. Of rank 0."""
        from skyasync.weight_sync.carry import carry  # by Ray, which the rest of a worker runs without

        return carry(info, receivers, silence_s)

    def publish_changes(self) -> Published | None:
        """As ``publish``, of what has changed since the last time, or of all. All ranks call it."""
        leaving = self._leaving()
        if self.rank != 0:
            leaving.only_gather()
            return None
        return self._changed.publish(leaving.kinds, leaving, self.cfg.generator.weight_sync_dir)

    def publish_adapter(self) -> Published | None:
        """As ``publish``, of the adapters alone. All ranks call it."""
        assert self.backend.adapters is not None
        adapter = self.backend.adapters.alone()
        return write_adapter(adapter, self.cfg.generator.weight_sync_dir) if self.rank == 0 else None

    def publish_whole(self, fell_back: bool) -> Published:
        """All of what ``publish_changes`` published last. Of rank 0.

        Args:
            fell_back: somebody could not take the changes.
        """
        publish = self._changed.fall_back if fell_back else self._changed.whole
        return publish(self.cfg.generator.weight_sync_dir)

    def free_address(self) -> tuple[str, int]:
        """This node's address, and a port that is free at the moment."""
        _, host = self.node()
        with socket.create_server((host, 0)) as listener:
            return host, listener.getsockname()[1]

    def open_broadcast(self, rendezvous: Rendezvous) -> None:
        """Get ready to send weights by NCCL, in a new group. All ranks call it, with the same rendezvous."""
        if (former := getattr(self, "_sender", None)) is not None:
            former.close()
        model, dtype = self.backend.adapters or self.backend.model.model, self.backend.dtype
        self._sender = NCCLSender(model, rendezvous, rank=self.rank, dtype=dtype, device=self.device)

    def announce(self, version: int) -> WeightUpdate:
        """The message that tells engines of a broadcast."""
        return self._sender.update(version)

    def broadcast(self) -> None:
        """Send the weights; ends when every engine has them. All ranks call it, engines meanwhile receive."""
        self._sender.send()

    def begin_parts(self, beside: Sequence[Sequence[int]]) -> None:
        """Get ready to hand weights over by CUDA IPC. All ranks call it.

        Args:
            beside: for each rank, the places of the engines that have its device too.
        """
        leaving = self._leaving()
        self._packer = Packer(leaving.kinds, iter(leaving), self.device, beside[self.rank])

    def pack_part(self) -> Packed:
        """The next part, for the engines on this device. All ranks call it, when the engines have the one before."""
        assert self._packer is not None
        return self._packer.pack()

    def end_parts(self) -> None:
        """Nobody reads a part any more: free it."""
        if self._packer is not None:
            self._packer.close()
            self._packer = None

    def forget_lent(self) -> None:
        """Nobody needs what ``lend`` wrote any more."""
        del self._lender

    def release(self, path: str) -> None:
        """Remove what ``publish`` wrote; what was lent stays, as engines compute on it."""
        if not self._lender.settle(path):
            self.kept.drop()
            remove_weights(path)

    def keep(self, path: str) -> str:
        """Instead of ``release``: where what ``publish`` wrote can be read until the next ``publish``."""
        return path if self._lender.settle(path) else self.kept.keep(path)
