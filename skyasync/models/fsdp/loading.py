"""A model's weights, from its files into the ranks that train it.

Invariant: what a rank holds is bit for bit its part of what ``from_pretrained`` gives (parameters, tied or not, and
buffers), and the ranks together hold the model about once while it loads. The model is built and sharded without
memory (on torch's meta device); then each rank reads its own slices of the files:

    config ──▶ empty model ──▶ sharded, still empty ──▶ slices from the files, renamed and merged by transformers

Some models' files must be joined in ways that slices cannot: there rank 0 reads one parameter after the other, whole,
and hands out the shards of each before it reads the next.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter
from transformers.distributed import DistributedConfig
from transformers.distributed.sharding_utils import DtensorShardOperation

from skyasync.errors import UserError
from skyasync.heap import give_back
from skyasync.models.config import ONE_AT_A_TIME
from skyasync.models.heads import Head
from skyasync.models.token_model import ATTENTION, TokenModel

WrapAndShard = Callable[[PreTrainedModel], TokenModel]

SEQUENTIAL = "HF_DEACTIVATE_ASYNC_LOAD"
"""With this environment variable transformers reads a parameter only when its turn has come."""


def load_sharded(path: str, head: Head, dtype: torch.dtype, device: torch.device, shard: WrapAndShard) -> TokenModel:
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
            _copy_views_of_files(wrapper)
        else:
            wrapper = _from_rank_zero(path, head, empty, dtype, device, shard)
    return wrapper.to(device)


def _can_be_sliced(model: PreTrainedModel) -> bool:
    """Whether all that happens to the files' tensors happens within a slice of the first dimension."""
    converters = _converters(model)
    if not converters:
        return True
    ranks = dist.get_world_size()
    every_rank_has_rows = all(len(parameter.chunk(ranks)) == ranks for parameter in model.base_model.parameters())
    return every_rank_has_rows and all(_keeps_rows(op) for c in converters for op in c.operations)


def _converters(model: PreTrainedModel) -> list[WeightConverter]:
    """What joins several tensors of its files."""
    return [c for c in get_model_conversion_mapping(model) if isinstance(c, WeightConverter)]


def _keeps_rows(operation: ConversionOps) -> bool:
    """Stacking experts, of which a rank has some, does; so does joining along another dimension than the shards'."""
    if isinstance(operation, MergeModulelist):
        return operation.dim == 0
    return isinstance(operation, Concatenate) and operation.dim > 0


def _from_slices(path: str, head: Head, empty: PreTrainedModel, dtype: torch.dtype, shard: WrapAndShard) -> TokenModel:
    """By transformers' own loader, which applies our sharding instead of its own."""
    wrappers: list[TokenModel] = []

    def distribute(model: PreTrainedModel) -> None:
        model.tie_weights()  # before sharding, so that a tied weight is one shard
        wrappers.append(shard(model))

    model = _read(path, head, empty, dtype, distribute)
    _check_ties(path, empty, model)
    return wrappers[0]


def _read(
    path: str, head: Head, empty: PreTrainedModel, dtype: torch.dtype, begin: Callable[[PreTrainedModel], None]
) -> PreTrainedModel:
    """The files into a model that ``begin`` is shown before anything is read."""

    def prepare(settings: DistributedConfig, device_map: object = None) -> tuple[DistributedConfig, Any, None]:
        return settings, device_map, None

    def distribute(model: PreTrainedModel, settings: DistributedConfig, mesh: None) -> PreTrainedModel:
        del model.config.distributed_config
        begin(model)
        return model

    model_class = type(empty)
    hooks = {"prepare_distribute_model": staticmethod(prepare), "maybe_distribute_model": staticmethod(distribute)}
    hooked: Any = type(model_class.__name__, (model_class,), {**hooks, "__module__": model_class.__module__})
    with _one_parameter_at_a_time() if _converters(empty) else nullcontext():
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
    loaded: PreTrainedModel = model
    return loaded


@contextmanager
def _one_parameter_at_a_time() -> Iterator[None]:
    """A parameter's pieces are read when it is their turn to be joined, and given back once they are.

    transformers' threads would read all pieces at once, and C's allocator keep what it is given.
    """
    before = os.environ.get(SEQUENTIAL)
    os.environ[SEQUENTIAL] = "1"
    hook = register_module_parameter_registration_hook(lambda module, name, parameter: give_back())
    try:
        yield
    finally:
        hook.remove()
        os.environ.pop(SEQUENTIAL)
        if before is not None:
            os.environ[SEQUENTIAL] = before


def _from_rank_zero(
    path: str, head: Head, empty: PreTrainedModel, dtype: torch.dtype, device: torch.device, shard: WrapAndShard
) -> TokenModel:
    """Rank 0 reads parameters in the files' order, and sends each rank its shards of one before it reads the next."""
    wrapper = shard(empty)
    wrapper.to_empty(device=device)
    post, source = _ShardSender(wrapper.model, device), None
    if dist.get_rank() == 0:
        source = post.send(lambda begin: _read(path, head, empty, dtype, begin))
        _check_ties(path, wrapper.model, source)
    else:
        post.receive()
    for name, buffer in wrapper.model.named_buffers():
        if source is not None:
            buffer.copy_(source.get_buffer(name))
        dist.broadcast(buffer, src=0)
    return wrapper


class _ShardSender:
    """Whole parameters from rank 0 into the shards of all ranks, each once; rank 0 says which one comes, then sends it.

    Args:
        model: sharded; this rank's shards are filled in.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device, self._shards = device, dict(model.named_parameters())
        self._names = list(self._shards)
        of_each = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        self._tied = {name for name, p in self._shards.items() if of_each[id(p)] > 1}

    def send(self, read: Callable[[Callable[[PreTrainedModel], None]], PreTrainedModel]) -> PreTrainedModel:
        """On rank 0: what ``read`` gives, each parameter forgotten once it has been sent."""
        prefixes: dict[nn.Module, str] = {}
        sent: set[str] = set()

        def begin(model: PreTrainedModel) -> None:
            prefixes.update({module: f"{name}." if name else "" for name, module in model.named_modules()})

        def put_there(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
            full = prefixes.get(module, "") + name
            read_in = module in prefixes and getattr(parameter, "_is_hf_initialized", False)  # not one to be drawn
            if not read_in or full in sent or full not in self._shards or full in self._tied:
                return None  # tied ones are compared first, by transformers
            self._send_shards(full, parameter)
            sent.add(full)
            left = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
            left._is_hf_initialized = True  # type: ignore[attr-defined]
            return left

        hook = register_module_parameter_registration_hook(put_there)  # type: ignore[arg-type]
        try:
            source = read(begin)
        finally:
            hook.remove()
        for name in [name for name in self._names if name not in sent]:
            self._send_shards(name, source.get_parameter(name))
        return source

    def receive(self) -> None:
        """On the other ranks."""
        coming = torch.empty((), dtype=torch.int64, device=self._device)
        for _ in self._names:
            dist.broadcast(coming, src=0)
            _send_shards(None, self._shards[self._names[int(coming)]].detach(), self._device)
            give_back()

    def _send_shards(self, name: str, whole: Tensor) -> None:
        dist.broadcast(torch.tensor(self._names.index(name), device=self._device), src=0)
        _send_shards(whole.detach(), self._shards[name].detach(), self._device)


def _send_shards(whole: Tensor | None, parameter: Tensor, device: torch.device) -> None:
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


def _copy_views_of_files(wrapper: TokenModel) -> None:
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
