"""A model's weights, from its files into the ranks that train it.

Invariant: what a rank holds is bit for bit its part of what ``from_pretrained`` gives (parameters, tied or not, and
buffers), and the ranks together hold the model about once while it loads. The model is built and sharded without
memory (on torch's meta device); then each rank reads its own slices of the files:

    config ──▶ empty model ──▶ sharded, still empty ──▶ slices from the files, renamed and merged by transformers

Some models' files must be joined in ways that slices cannot: there rank 0 loads the model and hands out the shards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter
from transformers.distributed import DistributedConfig
from transformers.distributed.sharding_utils import DtensorShardOperation

from skyasync.errors import UserError
from skyasync.model_loading import ONE_AT_A_TIME
from skyasync.workers.heads import Head
from skyasync.workers.model import ATTENTION, Wrapped

Shard = Callable[[PreTrainedModel], Wrapped]


def load_sharded(path: str, head: Head, dtype: torch.dtype, device: torch.device, shard: Shard) -> Wrapped:
    """A model from a folder or hub name, of which each rank holds its shards, on ``device``.

    All ranks of the default process group call it together.

    Args:
        head: what kind of model it is.
        shard: wraps a model whose parameters have no memory yet, and applies FSDP to it.

    Raises:
        UserError: if it is no such model, or its files contradict its configuration.
    """
    with ONE_AT_A_TIME, head.loading():
        with torch.device("meta"):
            empty = head.empty(path, dtype)
        if _can_be_sliced(empty):
            wrapper = _from_slices(path, head, empty, dtype, shard)
            _own_memory(wrapper)
        else:
            wrapper = _from_rank_zero(path, head, empty, dtype, device, shard)
    return wrapper.to(device)


def _can_be_sliced(model: PreTrainedModel) -> bool:
    """Whether all that happens to the files' tensors happens within a slice of the first dimension."""
    converters = [c for c in get_model_conversion_mapping(model) if isinstance(c, WeightConverter)]
    if not converters:
        return True
    ranks = dist.get_world_size()
    nobody_has_nothing = all(len(parameter.chunk(ranks)) == ranks for parameter in model.base_model.parameters())
    return nobody_has_nothing and all(_keeps_rows_apart(op) for c in converters for op in c.operations)


def _keeps_rows_apart(operation: ConversionOps) -> bool:
    """Stacking experts, of which a rank has some, does; so does joining along another dimension than the shards'."""
    if isinstance(operation, MergeModulelist):
        return operation.dim == 0
    return isinstance(operation, Concatenate) and operation.dim > 0


def _from_slices(path: str, head: Head, empty: PreTrainedModel, dtype: torch.dtype, shard: Shard) -> Wrapped:
    """By transformers' own loader, with our sharding in the place where it would apply its own."""
    wrappers: list[Wrapped] = []

    def prepare(settings: DistributedConfig, device_map: object = None) -> tuple[DistributedConfig, Any, None]:
        return settings, device_map, None

    def distribute(model: PreTrainedModel, settings: DistributedConfig, mesh: None) -> PreTrainedModel:
        del model.config.distributed_config
        model.tie_weights()  # before sharding, so that a tied weight is one shard
        wrappers.append(shard(model))
        return model

    model_class = type(empty)
    hooks = {"prepare_distribute_model": staticmethod(prepare), "maybe_distribute_model": staticmethod(distribute)}
    hooked: Any = type(model_class.__name__, (model_class,), {**hooks, "__module__": model_class.__module__})
    model, found = hooked.from_pretrained(
        path,
        config=head.config(path),
        dtype=dtype,
        attn_implementation=ATTENTION,
        use_safetensors=True,
        distributed_config=DistributedConfig(),
        output_loading_info=True,
    )
    model.__class__ = model_class
    head.complete(path, model, found["missing_keys"])
    _check_ties(path, empty, model)
    return wrappers[0]


def _from_rank_zero(
    path: str, head: Head, empty: PreTrainedModel, dtype: torch.dtype, device: torch.device, shard: Shard
) -> Wrapped:
    """Rank 0 loads the whole model and sends each rank its shards, forgetting each parameter that it has sent."""
    wrapper = shard(empty)
    wrapper.to_empty(device=device)
    source = head.load(path, dtype) if dist.get_rank() == 0 else None
    if source is not None:
        _check_ties(path, wrapper.model, source)
    for name, parameter in wrapper.model.named_parameters():
        whole = source.get_parameter(name) if source is not None else None
        _hand_out(whole.data if whole is not None else None, parameter.detach(), device)
        if whole is not None:
            whole.data = torch.empty(0)
    for name, buffer in wrapper.model.named_buffers():
        if source is not None:
            buffer.copy_(source.get_buffer(name))
        dist.broadcast(buffer, src=0)
    return wrapper


def _hand_out(whole: Tensor | None, parameter: Tensor, device: torch.device) -> None:
    """Rank 0's ``whole`` into the shards of all ranks."""
    assert isinstance(parameter, DTensor)
    own = parameter.to_local()
    *above, last = parameter.placements
    rows = last.is_shard(0) and all(place.is_replicate() for place in above)
    if parameter.device_mesh.size() < dist.get_world_size() or not rows:
        _cut_by_each(whole, parameter, own, device)
        return
    if whole is None:
        if own.numel():
            dist.recv(own, src=0)
        return
    shards = parameter.device_mesh.size(-1)  # ranks of one place in their groups hold the same
    pieces = whole.chunk(shards)
    own.copy_(pieces[0])
    for rank in range(1, dist.get_world_size()):
        if rank % shards < len(pieces):
            dist.send(pieces[rank % shards].to(device).contiguous(), dst=rank)


def _cut_by_each(whole: Tensor | None, parameter: DTensor, own: Tensor, device: torch.device) -> None:
    """Not along the first dimension alone: every rank gets the whole parameter for a moment, and cuts its part."""
    sent = whole.to(device).contiguous() if whole is not None else torch.empty(
        parameter.shape, dtype=parameter.dtype, device=device
    )  # fmt: skip
    dist.broadcast(sent, src=0)
    part = DtensorShardOperation(parameter).shard_tensor(sent, device=device, dtype=parameter.dtype)
    assert part is not None
    own.copy_(part)


def _check_ties(path: str, expected: PreTrainedModel, loaded: PreTrainedModel) -> None:
    """transformers leaves weights untied where a file has different ones for both names; FSDP has tied them already."""
    if len(list(expected.parameters())) != len(list(loaded.parameters())):
        raise UserError(
            f"{path}: config.json ties the embeddings to the head, but the files hold two different tensors for them: "
            f"set tie_word_embeddings to false in config.json"
        )


def _own_memory(wrapper: Wrapped) -> None:
    """On a CPU a loaded weight may be a view of its file, which an export may overwrite: copy what is so."""
    for parameter in wrapper.parameters():
        assert isinstance(parameter, DTensor)
        if _is_a_view_of_a_file(parameter._local_tensor):
            parameter._local_tensor = parameter._local_tensor.clone()  # as FSDP does; DTensors ignore ``.data = ``
    for buffer in wrapper.buffers():
        if _is_a_view_of_a_file(buffer):
            buffer.data = buffer.data.clone()


def _is_a_view_of_a_file(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not tensor.untyped_storage().resizable()  # it is not torch's own memory
