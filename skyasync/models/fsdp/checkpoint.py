"""Checkpoints and exported folders of a model that trains.

Invariant: only tensors are written, as safetensors, so that reading a checkpoint can never run
code. State is stored by parameter name and shard offset: any number of ranks reads what any other
number wrote. The optimizer decides which state a parameter has; learning rates and the like are in
the configuration.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel

from skyasync.errors import UserError
from skyasync.models.backend import SaveResult
from skyasync.models.fsdp.gradient_projection import PREVIOUS
from skyasync.models.vision import is_vision
from skyasync.utils import manifest
from skyasync.utils.manifest import Sums
from skyasync.utils.weight_files import weights_of
from skyasync.weight_sync.full_tensors import FullTensors, gathered
from skyasync.weight_sync.tensors import meta_tensors
from skyasync.weight_sync.transfers.file import writing

STEP = "step"
RANDOM = "random_state"
NO_GROUP = "torch.distributed is disabled"
FILE_BYTES = 1 << 27
"""A file is assembled in memory, twice, before it is written, so a shard is split into files of
this size."""
SINGLE_FILE = "model.safetensors"
EXPORTED_FILE = "50GB"
"""Largest file of an exported folder, transformers' default."""
PYTORCH = {"format": "pt"}

ADAPTER = ".lora_"
"""In the names of adapters' weights, which are all that a checkpoint holds of a model with
adapters."""


class ExtraPart(NamedTuple):
    """A module that is trained on a model's layers and saved with the model, under a name of its
    own."""

    name: str
    module: nn.Module
    optimizer: torch.optim.Optimizer
    setting: str  # that enables it


def full_weights(tensors: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights and saved buffers by Hugging Face name, whole, on the CPU: all of them at once. All
    ranks call it.

    Args:
        tensors: what ``own_tensors`` or ``Adapters.merged`` gives.
    """
    return {
        name: (whole.to(dtype) if whole.is_floating_point() else whole).cpu().contiguous()
        for name, whole in gathered(tensors)
    }


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's own shards of weights and saved buffers; a tied weight under its first name."""
    names = {name for name, _ in chain(model.named_parameters(), model.named_buffers())}
    state = cast("dict[str, Tensor]", get_model_state_dict(model))
    return {name: value for name, value in state.items() if name in names}


def save(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    step: int,
    folder: Path,
    extra: ExtraPart | None = None,
) -> SaveResult:
    """Every rank writes its shard of everything that the next optimizer step depends on.

    Args:
        folder: must not hold another checkpoint.
    """
    state = _state(model, optimizer, step, extra)
    writer = CheckpointWriter(folder, state)
    with _without_warnings():
        return writer.result(
            lambda: dcp.save(
                state, storage_writer=writer.storage, no_dist=not dist.is_initialized()
            )
        )


def begin(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    step: int,
    folder: Path,
    group: dist.ProcessGroup | None,
    extra: ExtraPart | None = None,
) -> Callable[[], SaveResult | None]:
    """As ``save``, of a copy in host memory, which is made before this returns; a thread writes it.

    Args:
        group: of all ranks, on their CPUs, for nothing else; None for a single process.

    Returns:
        A function that returns the result; None while it is being written.
    """
    state = _state(model, optimizer, step, extra)
    writer = CheckpointWriter(folder, state)
    warnings.filterwarnings("ignore", message=NO_GROUP)  # permanently: the thread warns later
    with _without_warnings():
        future = cast(
            "Future[Any]",
            dcp.async_save(
                state, storage_writer=writer.storage, process_group=group, no_dist=group is None
            ),
        )
    return lambda: writer.result(future.result) if future.done() else None


def load(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    folder: Path,
    role: str = "policy",
    key: str = "trainer.policy.model.path",
    extra: ExtraPart | None = None,
    all_names: Callable[[Collection[str]], set[str]] | None = None,
) -> int:
    """Restore model, optimizer and random state.

    Args:
        role, key: the role, and the key that chose its model, for errors.
        extra: what was saved with them.
        all_names: of all ranks together, by those of this one: stages of a pipeline have tensors of
            their own.

    Returns:
        The number of optimizer steps taken.

    Raises:
        FileNotFoundError: if there is no checkpoint in ``folder``.
        UserError: if it is of another model.
    """
    if not any(folder.glob("*.safetensors")):
        raise FileNotFoundError(f"no {role} checkpoint in {folder}")
    reader = HuggingFaceStorageReader(str(folder))
    with weights_of(folder):
        metadata = reader.read_metadata().state_dict_metadata
    saved = metadata.keys()
    state = {STEP: torch.tensor([0]), RANDOM: torch.get_rng_state()}
    optimizer_states: list[dict[str, Any]] = []
    for prefix, module, own_optimizer in _modules(model, optimizer, extra):
        own_optimizer.state.clear()
        own_optimizer.zero_grad()
        empty: dict[str, Any] = get_optimizer_state_dict(
            module, own_optimizer
        )  # made by a step of length 0
        names = {name.removeprefix(prefix) for name in saved if name.startswith(prefix)}
        # A parameter that never had a gradient has no saved state; a run without max_grad_cosine
        # has no previous ones.
        empty["state"] = {
            parameter: {
                k: v
                for k, v in values.items()
                if k != PREVIOUS or f"optimizer.{parameter}.{k}" in names
            }
            for parameter, values in empty["state"].items()
            if any(f"optimizer.{parameter}.{kind}" in names for kind in values)
        }
        optimizer_states.append(empty)
        state |= _tensors(prefix, module, empty["state"])
    different = saved ^ (all_names(state.keys()) if all_names else state.keys())
    strange = sorted(name for name in different if not name.endswith(f".{PREVIOUS}"))
    if strange:
        if strange[0] in saved:
            where = "the checkpoint"
        else:
            where = f"the {role}"
        if strange[0].startswith("critic."):
            if extra:
                setting = extra.setting
            else:
                setting = "trainer.critic.backbone=own, or without a critic"
            raise UserError(
                f"{folder} was not saved by a run with {setting}: only {where} has {strange[0]}"
            )
        raise UserError(
            f"{folder} was saved by another model ({key}), or another version: only {where} has {strange[0]}"
        )
    for name, value in state.items():
        size = cast(TensorStorageMetadata, metadata[name]).size
        if name != RANDOM and size != value.shape:
            raise UserError(
                f"{folder} was saved by another model ({key}): {name} is {list(size)} there and {list(value.shape)} in "
                f"the {role}"
            )
    with weights_of(folder), _without_warnings():
        dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    lenient = StateDictOptions(strict=False)
    for (_, module, own_optimizer), values in zip(
        _modules(model, optimizer, extra), optimizer_states, strict=True
    ):
        set_optimizer_state_dict(module, own_optimizer, values, options=lenient)
    torch.set_rng_state(state[RANDOM])
    return int(state[STEP])


def _modules(
    model: nn.Module, optimizer: torch.optim.Optimizer, extra: ExtraPart | None
) -> list[tuple[str, nn.Module, torch.optim.Optimizer]]:
    """What a checkpoint holds, each with the prefix of its names."""
    return [
        ("", model, optimizer),
        *([(f"{extra.name}.", extra.module, extra.optimizer)] if extra else []),
    ]


def _state(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, step: int, extra: ExtraPart | None
) -> dict[str, Tensor]:
    state = {STEP: torch.tensor([step]), RANDOM: torch.get_rng_state()}
    for prefix, module, own_optimizer in _modules(model, optimizer, extra):
        if own_optimizer.state:
            values = get_optimizer_state_dict(module, own_optimizer)["state"]
        else:
            values = {}
        state |= _tensors(prefix, module, cast("dict[str, dict[str, Tensor]]", values))
    return state


def _tensors(
    prefix: str, module: nn.Module, optimizer_state: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """The tensors of a module and of its optimizer by name; not copies, so that they can be read
    into."""
    own = own_tensors(module)
    if hasattr(module, "peft_config"):
        own = {name: value for name, value in own.items() if ADAPTER in name}
    tensors = {f"{prefix}model.{name}": value for name, value in own.items()}
    for parameter, values in optimizer_state.items():
        tensors |= {
            f"{prefix}optimizer.{parameter}.{kind}": value for kind, value in values.items()
        }
    return tensors


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Without the warning about one rank without a process group, and a debug line per tensor (on
    Ray's stderr)."""
    logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=NO_GROUP)
        yield


def export(model: PreTrainedModel, tensors: FullTensors, origin: str, folder: Path) -> None:
    """Write weights, one at a time, into a Hugging Face folder, with the configuration and the
    tokenizer of ``origin``."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(
        folder, state_dict={}
    )  # all but the weights: it would need all of these at once
    ignored = set(model._keys_to_ignore_on_save or ())
    specs = {name: spec for name, spec in tensors.specs.items() if name not in ignored}
    split = split_torch_state_dict_into_shards(
        meta_tensors(specs),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=EXPORTED_FILE,
    )
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(
                writing(folder / name, {tensor: specs[tensor] for tensor in names}, PYTORCH)
            )
            for name, names in split.filename_to_tensors.items()
        }
        for name, tensor in tensors:
            if name in specs:
                files[split.tensor_to_filename[name]].put(name, tensor)
    if split.is_sharded:
        (folder / SINGLE_FILE).unlink(missing_ok=True)
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / f"{SINGLE_FILE}.index.json").write_text(
            json.dumps(index, indent=2, sort_keys=True) + "\n"
        )
    export_tokenizer(origin, folder)
    if is_vision(model.config):
        AutoProcessor.from_pretrained(origin).save_pretrained(folder)


def export_tokenizer(origin: str, folder: Path) -> None:
    """Copy the tokenizer of ``origin``, if it has one."""
    if any(Path(origin).glob("tokenizer*")) or not Path(origin).is_dir():
        AutoTokenizer.from_pretrained(origin).save_pretrained(folder)


class _SummingFiles(FileSystem):
    """Computes the sums of what is written. torch syncs files before the last of their bytes have
    left its buffer."""

    def __init__(self) -> None:
        self.sums: Sums = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with manifest.summed(Path(path), self.sums, Path(path).name) as file:
            yield cast(io.IOBase, file)


class _OwnFiles(HuggingFaceStorageWriter):
    """Which tensor goes into which file is each rank's own: torch's takes rank 0's for all, which
    may lack tensors."""

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        storage = {**plan.storage_data, "fqn_to_index_mapping": self.fqn_to_index_mapping}
        return super().write_data(replace(plan, storage_data=storage), planner)


class CheckpointWriter:
    """The files of one checkpoint, and which tensor goes into which."""

    def __init__(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        numbers: dict[str, int] = {}
        number = 1
        filled = 0
        for name, value in state.items():
            size = (value.to_local() if isinstance(value, DTensor) else value).nbytes
            if filled and filled + size > FILE_BYTES:
                number = number + 1
                filled = 0
            numbers[name] = number
            filled = filled + size
        self._folder = folder
        self._files = _SummingFiles()
        self.storage = _OwnFiles(str(folder), fqn_to_index_mapping=numbers, save_distributed=True)
        self.storage.fs = self._files
        self.storage.sync_files = False

    def result(self, write: Callable[[], Any]) -> SaveResult:
        """The result of ``write()``, which returns when this rank's tensors are written.

        Raises:
            BaseException: the first failure that is not the disk's.
        """
        try:
            write()
            manifest.sync_folder(self._folder)
        except (OSError, CheckpointException) as error:
            failures: list[BaseException] = [error]
            if isinstance(error, CheckpointException):
                failures = [failure for failure, _ in error.failures.values()]
            for failure in failures:
                if not isinstance(failure, OSError):
                    raise failure from None
            first = cast(OSError, failures[0])
            where = f": {first.filename}" if first.filename else ""
            full = " (disk full)" if first.errno == errno.ENOSPC else ""
            return SaveResult(problem=f"{first.strerror or first}{where}{full}")
        return SaveResult(self._files.sums)
