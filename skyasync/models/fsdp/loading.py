"""A model's weights, from its files into the ranks that train it.

Invariant: a rank's shards are bitwise its part of what ``from_pretrained`` gives (parameters, tied
or not, and buffers). While the model loads, all ranks together hold it about once. The model is
built and sharded without memory (on torch's meta device); then each rank reads its own slices of
the files:

    config ──▶ empty model ──▶ sharded, still empty ──▶ slices from the files, renamed and merged by
    transformers

Some models' files must be joined in ways that slices cannot: there rank 0 reads one parameter after
the other, whole, and sends the shards of each before it reads the next.

Decoder layers are compiled, and recomputed in the backward pass. Neither changes what is computed:
recomputing is bitwise, compiling up to rounding. Equal layers share compiled code, lengths may
change without compiling again, and FSDP's hooks and checkpointing stay outside.
"""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.distributed import DistributedConfig
from transformers.distributed.sharding_utils import DtensorShardOperation

from skyasync.errors import UserError
from skyasync.heap import give_back
from skyasync.models.config import ONE_AT_A_TIME
from skyasync.models.fsdp.sharding import local
from skyasync.models.heads import Head
from skyasync.models.token_model import TokenModel

WrapAndShard = Callable[[PreTrainedModel], TokenModel]
Placement = Callable[[nn.Parameter], Shard | None]

SEQUENTIAL = "HF_DEACTIVATE_ASYNC_LOAD"
"""Environment variable with which transformers reads a parameter only when it needs it."""


def load_sharded(
    path: str,
    head: Head,
    dtype: torch.dtype,
    device: torch.device,
    shard: WrapAndShard,
    place: Placement,
    min_chunks: int = 1,
    *,
    stages: int = 1,
) -> TokenModel:
    """A model from a folder or hub name, of which each rank holds its shards, on ``device``.

    All ranks of the default process group call it together.

    Args:
        head: what kind of model it is.
        shard: wraps a model whose parameters have no memory yet, and applies FSDP to it.
        place: where that cuts a parameter; None: by rows.
        min_chunks: into which rows of joined parameters must divide, so that each rank has some.
        stages: of a pipeline; ``shard`` leaves each rank the layers of its own.

    Raises:
        UserError: if it is no such model, or its files contradict its configuration.
    """
    with ONE_AT_A_TIME, head.loading():
        empty = head.empty(path, dtype)
        # Others only rename tensors, which slices can be.
        mapping = get_model_conversion_mapping(empty)
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        if not can_be_sliced(empty, converters, place, min_chunks):
            if stages > 1:
                raise UserError(
                    f"trainer.parallel.pipeline={stages}: {path} holds tensors that must be joined whole, which one "
                    f"rank does for all layers: set it to 1"
                )
            return _from_rank_zero(path, head, empty, dtype, device, shard).to(device)
        wrappers: list[TokenModel] = []
        counts: list[int] = []  # of parameters, tied ones once

        def distribute(model: PreTrainedModel) -> None:
            model.tie_weights()  # before sharding, so that a tied weight is one shard
            wrappers.append(shard(model))
            counts.append(len(list(model.parameters())))

        model = _read(path, head, empty, dtype, distribute, sequential=bool(converters))
        _check_ties(path, counts[0], model)
        (wrapper,) = wrappers
        # On a CPU a loaded weight may be a view of its file, which an export may overwrite.
        for parameter in wrapper.parameters():
            assert isinstance(parameter, DTensor)
            if _is_view_of_file(parameter._local_tensor):
                # As FSDP does; DTensors ignore ``.data = ``.
                parameter._local_tensor = parameter._local_tensor.clone()
        for buffer in wrapper.buffers():
            if _is_view_of_file(buffer):
                buffer.data = buffer.data.clone()
    return wrapper.to(device)


def can_be_sliced(
    model: PreTrainedModel,
    converters: Sequence[WeightConverter],
    place: Placement,
    min_chunks: int = 1,
) -> bool:
    """Whether each rank can read its shards out of the files.

    Args:
        converters: join several tensors of the files. Slices can be joined if they are slices of
            the result: experts that are stacked, and tensors that are joined along another
            dimension than the shards'.
    """
    for converter in converters:
        targets = [re.compile(pattern) for pattern in converter.target_patterns]
        shard_dims = set()
        for name, parameter in model.named_parameters():
            if not any(target.search(name) for target in targets):
                continue
            if len(parameter.chunk(min_chunks)) < min_chunks:
                return False  # some ranks would have no rows of it
            placement = place(parameter) or Shard(0)
            shard_dims.add(placement.dim)
        for operation in converter.operations:
            stacks = isinstance(operation, MergeModulelist) and operation.dim == 0
            joins = isinstance(operation, Concatenate) and operation.dim not in {0, *shard_dims}
            if not (stacks or joins):
                return False
    return True


def _is_view_of_file(tensor: Tensor) -> bool:
    # torch's own memory is resizable, a mapped file is not.
    return tensor.device.type == "cpu" and not tensor.untyped_storage().resizable()


def _read(
    path: str,
    head: Head,
    empty: PreTrainedModel,
    dtype: torch.dtype,
    begin: Callable[[PreTrainedModel], None],
    *,
    sequential: bool,
) -> PreTrainedModel:
    """Load a model with the weights of the files, by transformers' loader with our sharding.

    Args:
        begin: called with the model before anything is read.
        sequential: read one parameter at a time.
    """

    def prepare(
        settings: DistributedConfig, device_map: object = None
    ) -> tuple[DistributedConfig, Any, None]:
        return settings, device_map, None

    def distribute(
        model: PreTrainedModel,
        settings: DistributedConfig,
        mesh: None,
    ) -> PreTrainedModel:
        del model.config.distributed_config
        begin(model)
        return model

    model_class = type(empty)
    # A subclass replaces two steps of ``from_pretrained``: transformers has no setting for them.
    attributes = {
        "prepare_distribute_model": staticmethod(prepare),
        "maybe_distribute_model": staticmethod(distribute),
        "__module__": model_class.__module__,
    }
    hooked_class: Any = type(model_class.__name__, (model_class,), attributes)
    with _one_parameter_at_a_time() if sequential else nullcontext(), _ranks_without_experts():
        model = head.load(path, dtype, hooked_class, distributed_config=DistributedConfig())
    model.__class__ = model_class
    return model


@contextmanager
def _one_parameter_at_a_time() -> Iterator[None]:
    """The tensors that make a parameter are read when they are joined, and freed after it.

    transformers' threads would read all of them at once, and C's allocator would not return their
    memory.
    """
    previous_value = os.environ.get(SEQUENTIAL)
    os.environ[SEQUENTIAL] = "1"

    def free_memory(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        give_back()

    # transformers registers a parameter when it has joined and freed what makes it.
    hook = register_module_parameter_registration_hook(free_memory)
    try:
        yield
    finally:
        hook.remove()
        os.environ.pop(SEQUENTIAL)
        if previous_value is not None:
            os.environ[SEQUENTIAL] = previous_value


@contextmanager
def _ranks_without_experts() -> Iterator[None]:
    """Let a rank whose shard of stacked experts is empty stack nothing.

    transformers would stack an empty list, which is an error.
    """
    convert: Callable[..., dict[str, Tensor]] = MergeModulelist.convert

    def convert_any(
        operation: MergeModulelist,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        *,
        model: PreTrainedModel,
        full_layer_name: str,
        **options: object,
    ) -> dict[str, Tensor]:
        for name, tensors in input_dict.items():
            if len(tensors) == 0:
                shard = local(model.get_parameter(full_layer_name))
                # The width is that of all that is joined afterwards, such as gate and up.
                _, width, *inner_sizes = shard.shape
                shape = (0, width // len(input_dict), *inner_sizes)
                input_dict[name] = torch.empty(shape, dtype=shard.dtype)
        options |= {"model": model, "full_layer_name": full_layer_name}
        return convert(operation, input_dict, source_patterns, target_patterns, **options)

    MergeModulelist.convert = convert_any  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        MergeModulelist.convert = convert  # type: ignore[method-assign, assignment]


def _from_rank_zero(
    path: str,
    head: Head,
    empty: PreTrainedModel,
    dtype: torch.dtype,
    device: torch.device,
    shard: WrapAndShard,
) -> TokenModel:
    """Let rank 0 read parameters one after the other, and send each rank its shards.

    The order is that of the files: rank 0 holds one whole parameter at a time.
    """
    wrapper = shard(empty)
    wrapper.to_empty(device=device)
    sender = _ShardSender(wrapper.model, device)
    source = None
    if dist.get_rank() == 0:
        source = sender.send(lambda begin: _read(path, head, empty, dtype, begin, sequential=True))
        _check_ties(path, len(list(wrapper.model.parameters())), source)
    else:
        sender.receive()
    for name, buffer in wrapper.model.named_buffers():
        if source is not None:
            buffer.copy_(source.get_buffer(name))
        dist.broadcast(buffer, src=0)
    return wrapper


class _ShardSender:
    """Sends whole parameters from rank 0 into the shards of all ranks, each once.

    Rank 0 sends a parameter's number first: the files' order is not that of the model.

    Args:
        model: sharded; this rank's shards are filled in.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._shards = dict(model.named_parameters())
        self._names = list(self._shards)
        # A tied parameter has several names.
        name_counts = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        self._tied_names = {name for name, p in self._shards.items() if name_counts[id(p)] > 1}

    def send(
        self, read: Callable[[Callable[[PreTrainedModel], None]], PreTrainedModel]
    ) -> PreTrainedModel:
        """Read on rank 0, and send each parameter, which is freed once it has been sent."""
        prefixes: dict[nn.Module, str] = {}
        sent_names: set[str] = set()

        def begin(model: PreTrainedModel) -> None:
            for name, module in model.named_modules():
                prefixes[module] = f"{name}." if name else ""

        def send_registered(
            module: nn.Module,
            name: str,
            parameter: nn.Parameter,
        ) -> nn.Parameter | None:
            if module not in prefixes:  # it is not of the model, or the model is being built
                return None
            full_name = prefixes[module] + name
            # transformers marks what it has read; the rest of a module is still to be drawn.
            if not getattr(parameter, "_is_hf_initialized", False):
                return None
            if full_name in sent_names or full_name not in self._shards:
                return None
            if full_name in self._tied_names:  # transformers compares both names' tensors first
                return None
            self._send(full_name, parameter)
            sent_names.add(full_name)
            data = torch.empty_like(parameter, device="meta")
            empty = nn.Parameter(data, requires_grad=parameter.requires_grad)
            empty._is_hf_initialized = True  # type: ignore[attr-defined]
            return empty

        hook = register_module_parameter_registration_hook(send_registered)  # type: ignore[arg-type]
        try:
            source = read(begin)
        finally:
            hook.remove()
        for name in self._names:
            if name not in sent_names:
                self._send(name, source.get_parameter(name))
        return source

    def receive(self) -> None:
        """Receive, on the other ranks, what rank 0 sends."""
        number = torch.empty((), dtype=torch.int64, device=self._device)
        for _ in self._names:
            dist.broadcast(number, src=0)
            _send_shards(None, self._shards[self._names[int(number)]].detach(), self._device)
            give_back()

    def _send(self, name: str, full_tensor: Tensor) -> None:
        dist.broadcast(torch.tensor(self._names.index(name), device=self._device), src=0)
        _send_shards(full_tensor.detach(), self._shards[name].detach(), self._device)


def _send_shards(full_tensor: Tensor | None, parameter: Tensor, device: torch.device) -> None:
    """Send rank 0's ``full_tensor`` into the shards of all ranks."""
    assert isinstance(parameter, DTensor)
    local_shard = parameter.to_local()
    *outer_placements, shard_placement = parameter.placements
    # The outer dimension is that of HSDP's replicas.
    by_rows = shard_placement.is_shard(0) and all(
        placement.is_replicate() for placement in outer_placements
    )
    if parameter.device_mesh.size() < dist.get_world_size() or not by_rows:
        # Not sharded along the first dimension alone: every rank gets the whole parameter for a
        # moment.
        if full_tensor is None:
            full_tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        full_tensor = full_tensor.to(device).contiguous()
        dist.broadcast(full_tensor, src=0)
        shard = DtensorShardOperation(parameter).shard_tensor(
            full_tensor, device=device, dtype=parameter.dtype
        )
        assert shard is not None
        local_shard.copy_(shard)
    elif full_tensor is None:
        if local_shard.numel():
            dist.recv(local_shard, src=0)
    else:
        count = parameter.device_mesh.size(-1)  # ranks with one coordinate in it hold the same
        shards = full_tensor.chunk(count)
        local_shard.copy_(shards[0])
        for rank in range(1, dist.get_world_size()):
            if rank % count < len(shards):
                dist.send(shards[rank % count].to(device).contiguous(), dst=rank)


def _check_ties(path: str, parameters: int, model: PreTrainedModel) -> None:
    """Raise ``UserError`` if the files have different tensors for tied weights.

    transformers then leaves them untied; FSDP has tied them already.
    """
    if parameters != len(list(model.parameters())):
        raise UserError(
            f"{path}: config.json ties the embeddings to the head, but the files hold two different tensors for them: "
            f"set tie_word_embeddings to false in config.json"
        )


def decoder_layers(wrapper: TokenModel) -> list[nn.Module]:
    """The layers of a model, by the names of classes that transformers would not split.

    Base classes count: FSDP gives each layer that it shards a class of its own.
    """
    names = set(wrapper.model._no_split_modules or ())
    layers = []
    for module in wrapper.modules():
        if any(base.__name__ in names for base in type(module).__mro__):
            layers.append(module)
    return layers


COMPILE_KEY = "trainer.policy.torch_compile"


def compile_layers(layers: Iterable[nn.Module], device: torch.device) -> None:
    """Compile each layer at its first call.

    Raises:
        UserError: without a compiler.
    """
    check_compiler(device)
    for layer in layers:
        # Not the module: FSDP's hooks and checkpointing stay outside. Dynamic: lengths change.
        layer.forward = torch.compile(layer.forward, dynamic=True)


def check_compiler(device: torch.device) -> None:
    """Raise ``UserError`` without a C++ compiler for a CPU, or Triton for a GPU."""
    if device.type == "cpu":
        missing_compiler = _missing_compiler("CXX", ["g++", "clang++"])
        if missing_compiler:
            raise UserError(
                f"{COMPILE_KEY}=true compiles with a C++ compiler on a CPU, and there is no "
                f"{missing_compiler} here: install one, name it in the environment's CXX, or leave the key "
                f"out"
            )
        return
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"{COMPILE_KEY}=true needs Triton on a GPU, which is not installed here: {error}"
        ) from error


def check_attention_compiler(device: torch.device) -> None:
    """Raise ``UserError`` if Triton cannot build the attention of packed sequences on a GPU.

    Triton builds the launcher of each kernel with a C compiler and Python's headers
    (``triton.runtime.build``), at the first update, when a batch has already been generated.
    """
    if device.type != "cuda":
        return
    missing_compiler = _missing_compiler("CC", ["gcc", "clang"])
    if missing_compiler:
        raise UserError(
            f"the attention of packed sequences is compiled on a GPU, which needs a C compiler, and there is no "
            f"{missing_compiler} here: install gcc, or name a compiler in the environment's CC"
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        raise UserError(
            f"the attention of packed sequences is compiled on a GPU, which needs Python's headers, and there is no "
            f"{header}: install them (Debian, Ubuntu: python3-dev)"
        )


def _missing_compiler(variable: str, compilers: list[str]) -> str:
    """The names of a missing compiler; "" if it is installed.

    Args:
        variable: of the environment: names another compiler than ``compilers``.
    """
    compiler = os.environ.get(variable)
    if compiler:
        compilers = [compiler]
    if any(map(shutil.which, compilers)):
        return ""
    return " or ".join(compilers)


_ATEN = torch.ops.aten
SAVED = (
    _ATEN.mm.default,
    _ATEN.mm.dtype,
    _ATEN.addmm.default,
    _ATEN._grouped_mm.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
)
"""Operations whose results are not recomputed: they take nearly all of a layer's time."""


def checkpointing_options(*, selective: bool) -> dict[str, Any]:
    """Options of ``gradient_checkpointing_enable`` of transformers' models.

    Args:
        selective: save the results of ``SAVED`` operations; else only a layer's input.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, list(SAVED))
    return options
