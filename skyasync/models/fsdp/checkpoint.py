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
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel

from skyasync.errors import UserError
from skyasync.models.backend import SaveResult
from skyasync.models.fsdp.gradient_projection import PREVIOUS
from skyasync.models.fsdp.sharding import local
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
"""Size of a checkpoint's files: torch assembles a file in memory, twice, before it writes it."""
SINGLE_FILE = "model.safetensors"
EXPORTED_FILE = "50GB"
"""Largest file of an exported folder, transformers' default."""
PYTORCH = {"format": "pt"}

ADAPTER = ".lora_"
"""Part of the names of adapters' weights.

A checkpoint of a model with adapters holds no other weights.
"""


class ExtraPart(NamedTuple):
    """A module that is trained on a model's layers, and saved with the model."""

    name: str
    module: nn.Module
    optimizer: torch.optim.Optimizer
    setting: str  # that enables it


def full_weights(tensors: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights and saved buffers by Hugging Face name, whole, on the CPU: all of them at once.

    All ranks call it.

    Args:
        tensors: from ``own_tensors`` or ``Adapters.merged``.
    """
    result = {}
    for name, tensor in gathered(tensors):
        if tensor.is_floating_point():  # counters and masks stay as they are
            tensor = tensor.to(dtype)
        result[name] = tensor.cpu().contiguous()
    return result


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's own shards of weights and saved buffers; a tied weight under its first name."""
    names = dict(model.named_parameters()).keys() | dict(model.named_buffers()).keys()
    state = cast("dict[str, Tensor]", get_model_state_dict(model))
    return {name: value for name, value in state.items() if name in names}


def save(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    step: int,
    folder: Path,
    extra: ExtraPart | None = None,
) -> SaveResult:
    """Write this rank's shard of everything that the next optimizer step depends on.

    Args:
        folder: must not hold another checkpoint.
    """
    state = _state(model, optimizer, step, extra)
    writer = CheckpointWriter(folder, state)

    def write() -> None:
        dcp.save(state, storage_writer=writer.storage, no_dist=not dist.is_initialized())

    with _without_warnings():
        return writer.result(write)


def begin(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    step: int,
    folder: Path,
    group: dist.ProcessGroup | None,
    extra: ExtraPart | None = None,
) -> Callable[[], SaveResult | None]:
    """Begin to save a copy in host memory, which is made before this returns.

    A thread writes it.

    Args:
        group: of all ranks, on their CPUs, for nothing else; None for a single process.

    Returns:
        A function that returns the result; None while it is being written.
    """
    state = _state(model, optimizer, step, extra)
    writer = CheckpointWriter(folder, state)
    warnings.filterwarnings("ignore", message=NO_GROUP)  # permanently: the thread warns later
    with _without_warnings():
        saving = dcp.async_save(
            state, storage_writer=writer.storage, process_group=group, no_dist=group is None
        )
    future = cast("Future[Any]", saving)

    def result() -> SaveResult | None:
        return writer.result(future.result) if future.done() else None

    return result


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
    saved_names = metadata.keys()
    state = {STEP: torch.tensor([0]), RANDOM: torch.get_rng_state()}
    optimizer_states = []
    for prefix, module, module_optimizer in _modules(model, optimizer, extra):
        module_optimizer.state.clear()
        module_optimizer.zero_grad()
        # torch makes the state by a step of length 0.
        empty: dict[str, Any] = get_optimizer_state_dict(module, module_optimizer)
        empty["state"] = _saved_state(empty["state"], f"{prefix}optimizer", saved_names)
        optimizer_states.append(empty)
        state |= _tensors(prefix, module, empty["state"])
    model_names: Collection[str] = state.keys()
    if all_names:
        model_names = all_names(model_names)
    differences = saved_names ^ set(model_names)
    # A run that now has max_grad_cosine, or no more, may restore this checkpoint.
    mismatches = sorted(name for name in differences if not name.endswith(f".{PREVIOUS}"))
    if mismatches:
        name = mismatches[0]
        holder = "the checkpoint" if name in saved_names else f"the {role}"
        if name.startswith("critic."):
            setting = "trainer.critic.backbone=own, or without a critic"
            if extra:
                setting = extra.setting
            raise UserError(
                f"{folder} was not saved by a run with {setting}: only {holder} has {name}"
            )
        raise UserError(
            f"{folder} was saved by another model ({key}), or another version: only {holder} has {name}"
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
    lenient = StateDictOptions(strict=False)  # parameters without a gradient have no state
    modules = _modules(model, optimizer, extra)
    for (_, module, module_optimizer), values in zip(modules, optimizer_states, strict=True):
        set_optimizer_state_dict(module, module_optimizer, values, options=lenient)
    torch.set_rng_state(state[RANDOM])
    return int(state[STEP])


def _saved_state(
    state: dict[str, Any],
    prefix: str,
    saved_names: Collection[str],
) -> dict[str, Any]:
    """The part of an optimizer's state that a checkpoint has.

    A parameter that never had a gradient has no saved state; a run without ``max_grad_cosine`` has
    no previous gradients.
    """
    result = {}
    for parameter, values in state.items():
        names = [name for name in values if f"{prefix}.{parameter}.{name}" in saved_names]
        if names:
            # Any other missing tensor is an error, which the comparison of names reports.
            if PREVIOUS not in names:
                values.pop(PREVIOUS, None)
            result[parameter] = values
    return result


def _modules(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    extra: ExtraPart | None,
) -> list[tuple[str, nn.Module, torch.optim.Optimizer]]:
    """Modules of a checkpoint, with the prefixes of their names and with their optimizers."""
    modules = [("", model, optimizer)]
    if extra:
        modules.append((f"{extra.name}.", extra.module, extra.optimizer))
    return modules


def _state(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    step: int,
    extra: ExtraPart | None,
) -> dict[str, Tensor]:
    """Everything that a checkpoint holds, by name."""
    state = {STEP: torch.tensor([step]), RANDOM: torch.get_rng_state()}
    for prefix, module, module_optimizer in _modules(model, optimizer, extra):
        values: Any = {}
        if module_optimizer.state:  # else torch would make one by a step of length 0
            values = get_optimizer_state_dict(module, module_optimizer)["state"]
        state |= _tensors(prefix, module, values)
    return state


def _tensors(
    prefix: str,
    module: nn.Module,
    optimizer_state: Mapping[str, Mapping[str, Tensor]],
) -> dict[str, Tensor]:
    """The tensors of a module and of its optimizer by name.

    They are not copies, so that a checkpoint can be read into them.
    """
    has_adapters = hasattr(module, "peft_config")
    tensors = {}
    for name, value in own_tensors(module).items():
        if not has_adapters or ADAPTER in name:
            tensors[f"{prefix}model.{name}"] = value
    for parameter, values in optimizer_state.items():
        for name, value in values.items():
            tensors[f"{prefix}optimizer.{parameter}.{name}"] = value
    return tensors


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence torch's warning of one rank without a process group, and its debug lines.

    There is a debug line per tensor, which Ray would print on stderr.
    """
    logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=NO_GROUP)
        yield


def export(model: PreTrainedModel, tensors: FullTensors, origin: str, folder: Path) -> None:
    """Write weights, one at a time, into a Hugging Face folder.

    The folder gets the model's configuration, and the tokenizer of ``origin``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # All but the weights: it would need all of these at once.
    model.save_pretrained(folder, state_dict={})
    ignored_names = set(model._keys_to_ignore_on_save or ())
    specs = {name: spec for name, spec in tensors.specs.items() if name not in ignored_names}
    split = split_torch_state_dict_into_shards(
        meta_tensors(specs),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=EXPORTED_FILE,
    )
    with ExitStack() as stack:
        files = {}
        for file_name, names in split.filename_to_tensors.items():
            file_specs = {name: specs[name] for name in names}
            file = writing(folder / file_name, file_specs, PYTORCH)
            files[file_name] = stack.enter_context(file)
        # Tensors come in the model's order, which is not that of the files: all are open.
        for name, tensor in tensors:
            if name in specs:
                files[split.tensor_to_filename[name]].put(name, tensor)
    if split.is_sharded:
        # save_pretrained wrote one without tensors.
        (folder / SINGLE_FILE).unlink(missing_ok=True)
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / f"{SINGLE_FILE}.index.json").write_text(text)
    export_tokenizer(origin, folder)
    if is_vision(model.config):
        AutoProcessor.from_pretrained(origin).save_pretrained(folder)


def export_tokenizer(origin: str, folder: Path) -> None:
    """Copy the tokenizer of ``origin``, if it has one."""
    if any(Path(origin).glob("tokenizer*")) or not Path(origin).is_dir():
        AutoTokenizer.from_pretrained(origin).save_pretrained(folder)


class _SummingFiles(FileSystem):
    """Computes checksums of files, and syncs them.

    torch syncs files before the last of their bytes have left its buffer.
    """

    def __init__(self) -> None:
        self.sums: Sums = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with manifest.summed(Path(path), self.sums, Path(path).name) as file:
            yield cast(io.IOBase, file)


class _OwnFiles(HuggingFaceStorageWriter):
    """Writes each rank's tensors by its own table of tensors and files.

    torch's class takes rank 0's table for all, which may lack tensors.
    """

    def write_data(
        self,
        plan: SavePlan,
        planner: SavePlanner,
    ) -> torch.futures.Future[list[WriteResult]]:
        storage = {**plan.storage_data, "fqn_to_index_mapping": self.fqn_to_index_mapping}
        return super().write_data(replace(plan, storage_data=storage), planner)


class CheckpointWriter:
    """The files of one checkpoint, and which tensor goes into which."""

    def __init__(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        file_numbers: dict[str, int] = {}  # by name of a tensor
        number = 1
        file_bytes = 0
        for name, value in state.items():
            size = local(value).nbytes
            if file_bytes and file_bytes + size > FILE_BYTES:
                number += 1
                file_bytes = 0
            file_numbers[name] = number
            file_bytes += size
        self._folder = folder
        self._files = _SummingFiles()
        self.storage = _OwnFiles(
            str(folder), fqn_to_index_mapping=file_numbers, save_distributed=True
        )
        self.storage.fs = self._files
        self.storage.sync_files = False  # ``_SummingFiles`` does, when all bytes are written

    def result(self, write: Callable[[], Any]) -> SaveResult:
        """Call ``write``, which returns when this rank's tensors are written.

        Raises:
            BaseException: the first failure that is not the disk's.
        """
        try:
            write()
            manifest.sync_folder(self._folder)
        except (OSError, CheckpointException) as error:
            failures: list[BaseException] = [error]
            if isinstance(error, CheckpointException):
                # Of all ranks: torch raises them on each one.
                failures = [failure for failure, _ in error.failures.values()]
            for failure in failures:
                if not isinstance(failure, OSError):
                    raise failure from None
            disk_error = cast(OSError, failures[0])
            where = f": {disk_error.filename}" if disk_error.filename else ""
            full = " (disk full)" if disk_error.errno == errno.ENOSPC else ""
            return SaveResult(problem=f"{disk_error.strerror or disk_error}{where}{full}")
        return SaveResult(self._files.sums)
