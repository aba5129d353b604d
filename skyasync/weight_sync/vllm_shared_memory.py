"""vLLM's side of the shared-memory weight sync: a transfer engine that loads one safetensors file.

Invariant: after an update every layer computes with the file's weights, in the layout that its kernels
want (vLLM packs weights after loading them on a CPU), and tied embeddings are still tied; the bytes that were loaded
are those that the trainer had (its own memory, which it proves once for all engines meanwhile; others are digested
here), and what the layers hold is asked of them (``vllm_held``).

vLLM imports this module in each of its workers, because ``WorkerExtension`` is named as its
``worker_extension_cls``; the import registers the engine, and that for CUDA IPC (``vllm_cuda_ipc``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from skyasync.weight_sync.changed_weights import KeptWeights, read_about
from skyasync.weight_sync.digests import digest, refuse
from skyasync.weight_sync.lent import Borrower
from skyasync.weight_sync.shared_memory import read_digests, read_weights
from skyasync.weight_sync.update import CUDA_IPC
from skyasync.weight_sync.vllm_adapter import differences
from skyasync.weight_sync.vllm_held import HeldWeights

if TYPE_CHECKING:
    from vllm.config import VllmConfig, WeightTransferConfig

BACKEND = "shared_memory"


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """Nothing: a file needs no rendezvous."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """``path`` of a complete safetensors file with full (unsharded) tensors under Hugging Face names; or, with all
    the others, of memory in which they lie (``lent``), which its writer proves, or, if ``late``, has proven once."""

    path: str
    file: list[int] | None = None
    kinds: dict[str, Any] | None = None
    digests: dict[str, str] | None = None
    late: bool = False


class SharedMemoryTransferEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """Loads a file whole, in ``receive_weights``: the file is read before the first layer is touched."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._tied = tied_heads(model)
        names = {id(module): f"{path}.weight" for path, module in model.named_modules()}
        self._kept = KeptWeights()
        self._borrower = Borrower()
        self._held = HeldWeights(model, [(head, names[id(embedding)]) for head, embedding in self._tied])

    @property
    def unproven(self) -> list[str]:
        """See ``HeldWeights``."""
        return self._held.unproven

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None: ...

    def start_weight_update(self) -> None: ...

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        weights, digests = self._sent(update_info)
        if self.device.type == "cpu":
            have_experts_packed(self.model)
        initialize_layerwise_reload(self.model)
        model: Any = self.model
        lies_there = nothing_lies if update_info.late else self._borrower.lies_there
        model.load_weights(as_sent(weights, digests, lies_there))
        finalize_layerwise_reload(self.model, self.model_config)
        for head, embedding in self._tied:
            retie(head, embedding)
        self._held.check(weights, digests)

    def _sent(self, said: SharedMemoryUpdateInfo) -> tuple[Mapping[str, Tensor], Mapping[str, str]]:
        """All weights, from memory or by a file, which may hold changes alone, and their digests."""
        if said.digests is not None:
            return self._borrower.read(vars(said)), said.digests
        path = said.path
        about = read_about(path)
        if about.base or about.keep:
            return self._kept.read(path)
        return read_weights(path), read_digests(path)

    def finish_weight_update(self) -> None: ...

    def shutdown(self) -> None: ...


def as_sent(
    weights: Mapping[str, Tensor], digests: Mapping[str, str], lies_there: Callable[[str, Tensor], bool]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors by name, each compared with its digest as it passes, unless it is what is proven where it lies.

    Raises:
        WeightSyncError: at a wrong one.
    """
    for name, tensor in weights.items():
        right = lies_there(name, tensor) or digest(tensor) == digests[name]
        refuse([] if right else [name], "the vLLM engine received")
        yield name, tensor


def nothing_lies(_name: str, _tensor: Tensor) -> bool:
    """Every tensor is looked at."""
    return False


def tied_heads(model: torch.nn.Module) -> list[tuple[ParallelLMHead, VocabParallelEmbedding]]:
    """Output layers whose weight is the very parameter of an input embedding."""
    layers = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    heads = [layer for layer in layers if isinstance(layer, ParallelLMHead)]
    embeddings = [layer for layer in layers if not isinstance(layer, ParallelLMHead)]
    return [(head, embedding) for head in heads for embedding in embeddings if head.weight is embedding.weight]


def retie(head: ParallelLMHead, embedding: VocabParallelEmbedding) -> None:
    """Give the output layer the reloaded embedding.

    A checkpoint of a tied model has no tensor for the output layer, so vLLM's reload passes it by, and the
    copy that a CPU kernel had packed from the former weights would go on being used.
    """
    head.weight = embedding.weight
    method: Any = head.quant_method
    method.process_weights_after_loading(head)


def have_experts_packed(model: torch.nn.Module) -> None:
    """Let the next load set the kernels of experts up anew.

    vLLM packs experts for its CPU kernels where it makes such a kernel, and makes it once: weights that came later
    would be put unpacked where packed ones are read.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


class WorkerExtension:
    """Mixed into vLLM's worker, which imports this module for it."""

    def unproven(self) -> list[str]:
        """Tensors of the last update of which nobody could ever see that they are what was sent."""
        worker: Any = self
        names: list[str] = worker.weight_transfer_engine.unproven
        return names

    def adapter_differences(self, path: str) -> list[str]:
        """Layers that do not compute with a file's adapter; it has been loaded."""
        worker: Any = self
        return differences(worker.model_runner.lora_manager._adapter_manager, path)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryTransferEngine)
    WeightTransferEngineFactory.register_engine(CUDA_IPC, "skyasync.weight_sync.vllm_cuda_ipc", "CudaIPCTransferEngine")
