"""The reader of all weight transfers in a vLLM worker, by vLLM's weight-transfer API.

Invariant: after an update every layer computes with the weights that were sent, and tied embeddings
are still tied. Weights have the layout that their kernels need (vLLM packs weights after loading
them on a CPU). What arrived is compared with digests or sums of the trainer. If all weights come at
once, ``verify.vllm_layers`` checks what the layers compute with. Nothing that came by a message is
unpickled or looked up by name: of a handle only bytes and numbers are taken, and torch's classes
are put in here. Between two messages the model is either complete, or has loaded a part of an
update. Then the next message is the next part, or says that none will come (``BROKEN_OFF``).

vLLM imports this module in each of its workers, because ``WorkerExtension`` is named as its
``worker_extension_cls``; the import registers the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
from vllm.distributed.weight_transfer.ipc_engine import (
    IPCWeightTransferEngine,
    IPCWeightTransferInitInfo,
    IPCWeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from skyasync.weight_sync.adapters import read_adapter
from skyasync.weight_sync.delta import DeltaDecoder, ReceivedWeights
from skyasync.weight_sync.tensors import digest, digests_of, refuse, shortened, sum_of
from skyasync.weight_sync.transfers.endpoints import WeightReader
from skyasync.weight_sync.update import (
    ADAPTER_ID,
    CUDA_IPC,
    TransferInterruptedError,
    WeightSyncError,
)
from skyasync.weight_sync.verify.vllm_layers import LayerCheck

if TYPE_CHECKING:
    from vllm.config import VllmConfig, WeightTransferConfig

BACKEND = "shared_memory"
BROADCAST = "broadcast"  # for weight_sync_backend=nccl: vLLM has an engine ``nccl`` of its own

if torch.cpu._is_amx_tile_supported():
    # Linux gives tile registers to processes that ask for them. vLLM's attention uses them in
    # bfloat16 without asking; oneDNN asks, at its first large product. A first prompt of three
    # tokens would end the worker (SIGILL).
    torch.cpu._init_amx()


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """A broadcast's rendezvous comes with each update."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """``info`` of a ``WeightUpdate``, as text and numbers."""

    info: dict[str, Any]


class SkyasyncTransferEngine(WeightTransferEngine[NoInitInfo, UpdateInfo]):
    """Loads updates into a worker's model.

    All weights arrive before the first layer is changed. Only parts by CUDA IPC, and broadcasts
    between GPUs, are loaded as they come.
    """

    init_info_cls = NoInitInfo
    update_info_cls = UpdateInfo

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        heads = []
        embeddings = []
        for path, layer in model.named_modules():
            # vLLM's output layer is a subclass of its input embedding.
            if isinstance(layer, ParallelLMHead):
                heads.append(layer)
            elif isinstance(layer, VocabParallelEmbedding):
                embeddings.append((layer, f"{path}.weight"))
        #: Output layers whose weight is the very parameter of an input embedding.
        self._tied_layers: list[tuple[ParallelLMHead, VocabParallelEmbedding]] = []
        tied_names = []
        for head in heads:
            for embedding, name in embeddings:
                if head.weight is embedding.weight:
                    self._tied_layers.append((head, embedding))
                    tied_names.append((head, name))
        self._decoder = DeltaDecoder()
        self._reader = WeightReader(device)
        self.layer_check = LayerCheck(model, tied_names)
        self._part_loader = PartLoader(self) if config.backend == CUDA_IPC else None
        self.interrupted = ""  # why the latest update did not arrive

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:
        return UpdateInfo(update_dict)

    def init_transfer_engine(self, init_info: NoInitInfo) -> None: ...

    def start_weight_update(self) -> None: ...

    def receive_weights(self, update_info: UpdateInfo) -> None:
        info = update_info.info
        if "broken_off" in info or "handle" in info:
            assert self._part_loader is not None
            self._part_loader.load(info)
        elif "rendezvous" in info and info["rendezvous"]["device"] != "cpu":
            # Between GPUs there is no memory for all weights next to the model's.
            chunks = self._reader.broadcast.chunks(info)
            stale = self._reload(tensor for chunk in chunks for tensor in chunk.items())
            refuse_stale(stale, self.model)
        else:
            self.interrupted = ""
            try:
                received = self._reader.read(info)
            except TransferInterruptedError as error:
                # Not raised: vLLM would end the engine, which is unchanged and may go on.
                self.interrupted = str(error)
                return
            weights = self._decoder.decode(received.weights, received.digests, received.header)
            if received.digests:
                stale = self._reload(checked(received._replace(weights=weights)))
            else:
                stale = self._reload(weights.items())
            # The check comes before ``refuse_stale``, because it names the very tensor.
            self.layer_check.check(weights, received.digests or digests_of(weights))
            refuse_stale(stale, self.model)

    def _reload(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Load the weights of all layers. Returns the layers that did not get all of theirs."""
        if self.device.type == "cpu":
            reset_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)
        model: Any = self.model
        model.load_weights(weights)
        stale = self.stale_layers()  # before the counters of the reload are gone
        finalize_layerwise_reload(self.model, self.model_config)
        self.retie()
        return stale

    def stale_layers(self) -> list[str]:
        """Name the layers that an update has not loaded completely, before the reload is finalized.

        Many loaders skip a tensor whose name they do not know, and vLLM leaves the layer's former
        weights in place. vLLM counts the elements that each layer has received. Some layers rightly
        receive fewer than they have: tied output layers, padded embeddings, and attention with
        scales of a quantized cache. A quantized model is not checked, because some of its
        parameters are computed.
        """
        if getattr(self.model_config, "quantization", None) is not None:
            return []
        tied_heads = {head for head, _ in self._tied_layers}
        stale = []
        for name, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            if not info.can_load() or layer in tied_heads or is_deferred_attention_layer(layer):
                continue
            elements = sum(parameter.numel() for parameter in layer.parameters(recurse=False))
            is_padded = isinstance(layer, VocabParallelEmbedding) and info.load_numel > 0
            if info.load_numel < elements and not is_padded:
                stale.append(name)
        return stale

    def retie(self) -> None:
        for head, embedding in self._tied_layers:
            retie(head, embedding)

    def finish_weight_update(self) -> None: ...

    def shutdown(self) -> None:
        self._reader.broadcast.close()
        if self._part_loader is not None:
            self._part_loader.ipc.shutdown()


def checked(received: ReceivedWeights) -> Iterator[tuple[str, Tensor]]:
    """The tensors by name, compared with their digests unless their writer has proven them.

    Raises:
        WeightSyncError: at a tensor with another digest.
    """
    for name, tensor in received.weights.items():
        if not received.in_place(name, tensor) and digest(tensor) != received.digests[name]:
            refuse([name], "the vLLM engine received")
        yield name, tensor


def refuse_stale(layers: Sequence[str], model: torch.nn.Module) -> None:
    """Raises WeightSyncError naming the layers that an update has not loaded, if there are any."""
    if layers:
        raise WeightSyncError(
            f"the vLLM engine did not load all weights of {shortened(layers)}: the loader of "
            f"{type(model).__name__} skipped some, and these layers would compute with the former "
            f"ones"
        )


class PartLoader:
    """Passes parts by CUDA IPC to vLLM's engine for them, with a model that checks their sums.

    ``skyasync.weight_sync.transfers.cuda_ipc`` says how long the memory stays.
    """

    def __init__(self, engine: SkyasyncTransferEngine) -> None:
        self._engine = engine
        self._loaded_parts = 0  # parts of an update that is not complete yet
        self.ipc = IPCWeightTransferEngine(
            engine.config, engine.vllm_config, engine.device, engine.model
        )
        self.ipc.init_transfer_engine(IPCWeightTransferInitInfo(packed=True))

    def load(self, part: dict[str, Any]) -> None:
        if "broken_off" in part:
            # Finish the layers as far as they came: the next update brings all of them.
            if self._loaded_parts:
                self._loaded_parts = 0
                self.ipc.finish_weight_update()
            return
        if part["part"] != self._loaded_parts:
            raise WeightSyncError(
                f"weight sync: received part {part['part']}, expected part {self._loaded_parts}"
            )
        message = ipc_update_info(part)
        own_gpu = str(torch.cuda.get_device_properties(self._engine.device.index).uuid)
        if part["handle"]["gpu"] != own_gpu:
            raise WeightSyncError(
                f"the vLLM engine computes on GPU {own_gpu}, and the weights lie on GPU {part['handle']['gpu']}: "
                f"generator.weight_sync_backend=cuda_ipc needs both on one, use shared_memory"
            )
        if part["part"] == 0:
            self.ipc.start_weight_update()
        self._loaded_parts += 1
        # vLLM's engine clones the tensors out of the buffer and gives them to ``model``.
        checked_model: Any = SumCheck(self._engine.model, part["names"], part["sums"])
        self.ipc.model = checked_model
        try:
            self.ipc.receive_weights(message)
        finally:
            self.ipc.model = self._engine.model
        if part["last"]:
            self._loaded_parts = 0
            stale = self._engine.stale_layers()
            self.ipc.finish_weight_update()
            self._engine.retie()
            refuse_stale(stale, self._engine.model)
            if self._engine.device.type == "cuda":
                torch.cuda.empty_cache()  # for the cache, which has no memory yet


class SumCheck:
    """A model for one part, which raises WeightSyncError if the tensors have other sums."""

    def __init__(self, model: torch.nn.Module, names: list[str], sums: list[int]) -> None:
        self._model = model
        self._sums = dict(zip(names, sums, strict=True))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> object:
        weights = list(weights)
        # Stacked, so that the device is synchronized once.
        sums = torch.stack([sum_of(tensor) for _, tensor in weights]).tolist()
        differing = []
        for (name, _), checksum in zip(weights, sums, strict=True):
            if checksum != self._sums[name]:
                differing.append(name)
        refuse(differing, "the vLLM engine received")
        model: Any = self._model
        return model.load_weights(weights)


def ipc_update_info(part: dict[str, Any]) -> IPCWeightTransferUpdateInfo:
    """A part for vLLM, with the arguments of torch's ``rebuild_cuda_tensor``."""
    handle = part["handle"]
    size = int(handle["size"])
    arguments = (
        torch.Tensor, (size,), (1,), 0, torch.storage.TypedStorage, torch.uint8,
        0,  # the device, which vLLM puts in
        bytes(handle["handle"]), size, int(handle["offset"]), False,
        bytes(handle["counter"]), int(handle["counter_offset"]), bytes(handle["event"]), bool(handle["wait"]),
    )  # fmt: skip
    return IPCWeightTransferUpdateInfo(
        names=part["names"],
        dtype_names=part["dtype_names"],
        shapes=part["shapes"],
        ipc_handles={str(handle["gpu"]): arguments},
        tensor_sizes=part["sizes"],
    )


def retie(head: ParallelLMHead, embedding: VocabParallelEmbedding) -> None:
    """Give the output layer the reloaded embedding.

    A checkpoint of a tied model has no tensor for the output layer, so vLLM's reload skips it. The
    layer would go on using the copy that a CPU kernel had packed from the former weights.
    """
    head.weight = embedding.weight
    method: Any = head.quant_method
    method.process_weights_after_loading(head)


def reset_expert_kernels(model: torch.nn.Module) -> None:
    """Let the next load set up the kernels of experts again.

    vLLM packs experts for its CPU kernels where it makes such a kernel, and makes it once: weights
    that came later would be put unpacked where packed ones are read.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


class WorkerExtension:
    """Mixed into vLLM's worker, which imports this module for it."""

    def unproven(self) -> list[str]:
        """Tensors of the last update that no check could ever compare with what was sent."""
        worker: Any = self
        names: list[str] = worker.weight_transfer_engine.layer_check.unproven
        return names

    def interrupted(self) -> str:
        """Why the last update did not arrive, and nothing has been changed; or ""."""
        worker: Any = self
        reason: str = worker.weight_transfer_engine.interrupted
        return reason

    def ban(self, tokens: list[int], logit: float) -> None:
        """Set the logits of tokens to ``logit``, for sampling and for the scores of prompts.

        The tokens of an earlier call are allowed again: each run that uses a server bans its own.
        """
        worker: Any = self
        model: Any = worker.get_model()
        banned_tokens = torch.tensor(tokens)

        def compute_logits(*arguments: Any) -> Tensor | None:  # noqa: ANN401
            # Of the class: an earlier call may have replaced the model's method.
            logits: Tensor | None = type(model).compute_logits(model, *arguments)
            if logits is None:  # on ranks that do not sample
                return None
            return logits.index_fill(-1, banned_tokens.to(logits.device), logit)

        # Not by ``logit_bias``, which does not reach the scores of prompts.
        model.compute_logits = compute_logits

    def adapter_differences(self, path: str) -> list[str]:
        """Layers that do not compute with a file's adapter; it has been loaded."""
        worker: Any = self
        return adapter_differences(worker.model_runner.lora_manager._adapter_manager, path)


def adapter_differences(manager: Any, path: str) -> list[str]:  # noqa: ANN401  (vLLM's LoRAModelManager)
    """Name the layers of a file whose halves differ from the buffers that the kernels read."""
    adapter = read_adapter(path)
    slot = manager.lora_index_to_id.index(ADAPTER_ID)
    positions = {name: (module, 0) for name, module in manager.modules.items()}
    for fused_name, layer_names in manager.packed_modules.items():
        if fused_name in manager.modules:
            for index, layer in enumerate(layer_names):
                positions[layer] = (manager.modules[fused_name], index)
    differing = []
    for layer, (lora_a, lora_b) in adapter.layers().items():
        module, index = positions.get(layer, (None, 0))
        if module is None:
            differing.append(layer)
        elif getattr(module, "tp_size", 1) == 1:  # else no worker has the full layer
            current_a = module.lora_a_stacked[index][slot, 0]
            current_b = module.lora_b_stacked[index][slot, 0]
            # As vLLM does when it loads: the scale is multiplied into B, in the computing dtype.
            sent_a = lora_a.to(current_a.dtype)
            sent_b = lora_b.to(current_b.dtype)
            if adapter.scale != 1:
                sent_b = sent_b * adapter.scale
            if not _begins_with(current_a, sent_a) or not _begins_with(current_b, sent_b):
                differing.append(layer)
    return differing


def _begins_with(buffer: Tensor, sent: Tensor) -> bool:
    """Whether a buffer, as large as the largest rank, begins with a matrix."""
    rows, columns = sent.shape
    return buffer[:rows, :columns].cpu().equal(sent)


for name in (BACKEND, CUDA_IPC, BROADCAST):
    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, SkyasyncTransferEngine)
