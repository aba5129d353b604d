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
"""With this environment variable transformers reads a parameter only when its turn has come."""


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
        converters = [
            c for c in get_model_conversion_mapping(empty) if isinstance(c, WeightConverter)
        ]
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
                parameter._local_tensor = (
                    parameter._local_tensor.clone()
                )  # as FSDP does; DTensors ignore ``.data = ``
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
        converters: what joins several tensors of the files. Slices can be joined if they are slices
            of the result: experts that are stacked, and tensors that are joined along another
                dimension than the shards'.
    """
    for converter in converters:
        targets = [re.compile(pattern) for pattern in converter.target_patterns]
        parameters = [
            p
            for name, p in model.named_parameters()
            if any(target.search(name) for target in targets)
        ]
        if any(len(parameter.chunk(min_chunks)) < min_chunks for parameter in parameters):
            return False
        cut = {(place(parameter) or Shard(0)).dim for parameter in parameters}
        for operation in converter.operations:
            stacks = isinstance(operation, MergeModulelist) and operation.dim == 0
            joins = isinstance(operation, Concatenate) and operation.dim not in {0, *cut}
            if not (stacks or joins):
                return False
    return True


def _is_view_of_file(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu" and not tensor.untyped_storage().resizable()
    )  # torch's own memory is resizable


def _read(
    path: str,
    head: Head,
    empty: PreTrainedModel,
    dtype: torch.dtype,
    begin: Callable[[PreTrainedModel], None],
    *,
    sequential: bool,
) -> PreTrainedModel:
    """A model with the weights of the files, by transformers' own loader with our sharding instead
    of its own.

    Args:
        begin: called with the model before anything is read.
        sequential: read one parameter at a time.
    """

    def prepare(
        settings: DistributedConfig, device_map: object = None
    ) -> tuple[DistributedConfig, Any, None]:
        return settings, device_map, None

    def distribute(
        model: PreTrainedModel, settings: DistributedConfig, mesh: None
    ) -> PreTrainedModel:
        del model.config.distributed_config
        begin(model)
        return model

    model_class = type(empty)
    hooks = {
        "prepare_distribute_model": staticmethod(prepare),
        "maybe_distribute_model": staticmethod(distribute),
    }
    hooked: Any = type(
        model_class.__name__, (model_class,), {**hooks, "__module__": model_class.__module__}
    )
    with _one_parameter_at_a_time() if sequential else nullcontext(), _ranks_without_experts():
        model = head.load(path, dtype, hooked, distributed_config=DistributedConfig())
    model.__class__ = model_class
    return model


@contextmanager
def _one_parameter_at_a_time() -> Iterator[None]:
    """The tensors that make a parameter are read when they are joined, and freed after it.

    transformers' threads would read all of them at once, and C's allocator would not return their
    memory.
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


@contextmanager
def _ranks_without_experts() -> Iterator[None]:
    """A rank whose shard of stacked experts is empty stacks nothing; transformers would stack an
    empty list."""
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
                _, width, *rest = shard.shape  # the width is that of all that is joined afterwards
                input_dict[name] = torch.empty(
                    0, width // len(input_dict), *rest, dtype=shard.dtype
                )
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
    """Rank 0 reads parameters in the files' order, and sends each rank its shards of one before it
    reads the next."""
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
    """Whole parameters from rank 0 into the shards of all ranks, each once; rank 0 sends its number
    first.

    Args:
        model: sharded; this rank's shards are filled in.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._shards = dict(model.named_parameters())
        self._names = list(self._shards)
        of_each = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        self._tied = {name for name, p in self._shards.items() if of_each[id(p)] > 1}

    def send(
        self, read: Callable[[Callable[[PreTrainedModel], None]], PreTrainedModel]
    ) -> PreTrainedModel:
        """On rank 0: what ``read`` returns, each parameter freed once it has been sent."""
        prefixes: dict[nn.Module, str] = {}
        sent: set[str] = set()

        def begin(model: PreTrainedModel) -> None:
            prefixes.update(
                {module: f"{name}." if name else "" for name, module in model.named_modules()}
            )

        def send_registered(
            module: nn.Module, name: str, parameter: nn.Parameter
        ) -> nn.Parameter | None:
            full = prefixes.get(module, "") + name
            loaded = module in prefixes and getattr(
                parameter, "_is_hf_initialized", False
            )  # else it is to be drawn
            if not loaded or full in sent or full not in self._shards or full in self._tied:
                return None  # tied ones are compared first, by transformers
            self._send(full, parameter)
            sent.add(full)
            empty = nn.Parameter(
                torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
            )
            empty._is_hf_initialized = True  # type: ignore[attr-defined]
            return empty

        hook = register_module_parameter_registration_hook(send_registered)  # type: ignore[arg-type]
        try:
            source = read(begin)
        finally:
            hook.remove()
        for name in [name for name in self._names if name not in sent]:
            self._send(name, source.get_parameter(name))
        return source

    def receive(self) -> None:
        """On the other ranks."""
        number = torch.empty((), dtype=torch.int64, device=self._device)
        for _ in self._names:
            dist.broadcast(number, src=0)
            _send_shards(None, self._shards[self._names[int(number)]].detach(), self._device)
            give_back()

    def _send(self, name: str, whole: Tensor) -> None:
        dist.broadcast(torch.tensor(self._names.index(name), device=self._device), src=0)
        _send_shards(whole.detach(), self._shards[name].detach(), self._device)


def _send_shards(whole: Tensor | None, parameter: Tensor, device: torch.device) -> None:
    """Rank 0's ``whole`` into the shards of all ranks."""
    assert isinstance(parameter, DTensor)
    own = parameter.to_local()
    *above, last = parameter.placements
    by_rows = last.is_shard(0) and all(placement.is_replicate() for placement in above)
    if parameter.device_mesh.size() < dist.get_world_size() or not by_rows:
        # Not sharded along the first dimension alone: every rank gets the whole parameter for a
        # moment.
        if whole is None:
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        whole = whole.to(device).contiguous()
        dist.broadcast(whole, src=0)
        shard = DtensorShardOperation(parameter).shard_tensor(
            whole, device=device, dtype=parameter.dtype
        )
        assert shard is not None
        own.copy_(shard)
    elif whole is None:
        if own.numel():
            dist.recv(own, src=0)
    else:
        count = parameter.device_mesh.size(-1)  # ranks with one coordinate in it hold the same
        shards = whole.chunk(count)
        own.copy_(shards[0])
        for rank in range(1, dist.get_world_size()):
            if rank % count < len(shards):
                dist.send(shards[rank % count].to(device).contiguous(), dst=rank)


def _check_ties(path: str, parameters: int, loaded: PreTrainedModel) -> None:
    """transformers leaves weights untied if a file has different ones for both names; FSDP has tied
    them already."""
    if parameters != len(list(loaded.parameters())):
        raise UserError(
            f"{path}: config.json ties the embeddings to the head, but the files hold two different tensors for them: "
            f"set tie_word_embeddings to false in config.json"
        )


def decoder_layers(wrapper: TokenModel) -> list[nn.Module]:
    """By the names of classes that transformers would not split; FSDP gives each sharded one a
    class of its own."""
    names = set(wrapper.model._no_split_modules or ())
    return [m for m in wrapper.modules() if any(base.__name__ in names for base in type(m).__mro__)]


COMPILE_KEY = "trainer.policy.torch_compile"


def compile_layers(layers: Iterable[nn.Module], device: torch.device) -> None:
    """Compile each layer at its first call.

    Raises:
        UserError: without a compiler.
    """
    check_compiler(device)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def check_compiler(device: torch.device) -> None:
    """Raises ``UserError`` without a C++ compiler for a CPU, or Triton for a GPU."""
    if device.type == "cpu":
        compiler = os.environ.get("CXX")
        if not any(shutil.which(name) for name in ([compiler] if compiler else ["g++", "clang++"])):
            raise UserError(
                f"{COMPILE_KEY}=true compiles with a C++ compiler on a CPU, and there is no "
                f"{compiler or 'g++ or clang++'} here: install one, name it in the environment's CXX, or leave the key "
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
    """Raise ``UserError`` if Triton, which compiles the attention of packed sequences on a GPU,
    cannot build a kernel.

    Triton builds the launcher of each kernel with a C compiler and Python's headers
    (``triton.runtime.build``), at the first update, when a batch has already been generated.
    """
    if device.type != "cuda":
        return
    named = os.environ.get("CC", "")
    compilers = [named] if named else ["gcc", "clang"]
    if not any(shutil.which(name) for name in compilers):
        raise UserError(
            f"the attention of packed sequences is compiled on a GPU, which needs a C compiler, and there is no "
            f"{' or '.join(compilers)} here: install gcc, or name a compiler in the environment's CC"
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        raise UserError(
            f"the attention of packed sequences is compiled on a GPU, which needs Python's headers, and there is no "
            f"{header}: install them (Debian, Ubuntu: python3-dev)"
        )


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
    """For ``gradient_checkpointing_enable`` of transformers' models.

    Args:
        selective: save the results of ``SAVED`` operations; else only a layer's input.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, list(SAVED))
    return options
