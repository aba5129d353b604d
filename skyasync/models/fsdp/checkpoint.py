"""How weights and training state leave a policy and come back.

Invariant: only tensors are written, as safetensors, so that reading a checkpoint can never run code. State is
stored by parameter name and shard offset: any number of ranks reads what any other number wrote. What the optimizer
keeps of a parameter is its own business; learning rates and the like are the configuration's.
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
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, PreTrainedModel

from skyasync.errors import UserError
from skyasync.models.backend import SaveResult
from skyasync.utils import manifest
from skyasync.utils.manifest import Sums
from skyasync.weight_sync.full_tensors import FullTensors, gathered
from skyasync.weight_sync.tensors import meta_tensors
from skyasync.weight_sync.transfers.file import writing

STEP = "step"
RANDOM = "random_state"
NO_GROUP = "torch.distributed is disabled"
FILE_BYTES = 1 << 27
"""A file is assembled in memory, twice, before it is written, so a shard goes into files of this size."""
SINGLE_FILE = "model.safetensors"
EXPORTED_FILE = "50GB"
"""Of an exported folder's files none is larger, as transformers would have it."""
PYTORCH = {"format": "pt"}

ADAPTER = ".lora_"
"""In the names of adapters' weights, which are all that a checkpoint holds of a model that has some."""


class ExtraPart(NamedTuple):
    """What is trained on a model's layers, is no part of the model, and is saved with it under a name of its own."""

    name: str
    module: nn.Module
    optimizer: torch.optim.Optimizer
    setting: str  # that asks for it


def full_weights(tensors: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights and saved buffers by Hugging Face name, whole, on the CPU: all of them at once. All ranks call it.

    Args:
        tensors: what ``own_tensors`` or ``Adapters.merged`` gives.
    """
    return {
        name: (whole.to(dtype) if whole.is_floating_point() else whole).cpu().contiguous()
        for name, whole in gathered(tensors)
    }


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Living shards of weights and saved buffers; a tied weight under its first name."""
    state: dict[str, Any] = dict(get_model_state_dict(model))
    names = {name for name, _ in chain(model.named_parameters(), model.named_buffers())}
    return {name: value for name, value in state.items() if name in names}


def save(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, step: int, folder: Path, extra: ExtraPart | None = None
) -> SaveResult:
    """Every rank writes its shard of everything that the next optimizer step depends on.

    Args:
        folder: must not hold another checkpoint.
    """
    state = _state(model, optimizer, step, extra)
    writer = CheckpointWriter(folder, _files(state))
    with _without_warnings():
        return writer.saved(lambda: dcp.save(state, storage_writer=writer.storage, no_dist=not dist.is_initialized()))


def begin(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    step: int,
    folder: Path,
    group: dist.ProcessGroup | None,
    extra: ExtraPart | None = None,
) -> BackgroundSave:
    """As ``save``, of a copy in host memory, which is made before this returns; a thread writes it."""
    state = _state(model, optimizer, step, extra)
    warnings.filterwarnings("ignore", message=NO_GROUP)  # for good: the thread warns later
    with _without_warnings():
        return BackgroundSave(state, CheckpointWriter(folder, _files(state)), group)


def _state(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, step: int, extra: ExtraPart | None
) -> dict[str, Tensor]:
    def moments(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state: dict[str, Any] = get_optimizer_state_dict(module, optimizer) if optimizer.state else {"state": {}}
        found: dict[str, Any] = state["state"]
        return found

    state = _tensors(model, moments(model, optimizer), step)
    return state | _extra_tensors(extra, moments(extra.module, extra.optimizer)) if extra else state


def load(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    folder: Path,
    role: str = "policy",
    key: str = "trainer.policy.model.path",
    extra: ExtraPart | None = None,
) -> int:
    """Make model, optimizer and random state what they were when they were saved, whatever they are now.

    Args:
        role, key: whose they are and what chose the model, for errors.
        extra: what was saved with them.

    Returns:
        The number of optimizer steps taken.

    Raises:
        FileNotFoundError: if there is no checkpoint in ``folder``.
        UserError: if it is of another model.
    """
    if not any(folder.glob("*.safetensors")):
        raise FileNotFoundError(f"no {role} checkpoint in {folder}")
    reader = HuggingFaceStorageReader(str(folder))
    metadata = reader.read_metadata().state_dict_metadata
    saved = metadata.keys()
    kept, moments = _empty_state(model, optimizer, saved)
    state = _tensors(model, moments, step=0)
    if extra:
        kept_extra, of_extra = _empty_state(extra.module, extra.optimizer, saved, f"{extra.name}.")
        state |= _extra_tensors(extra, of_extra)
    if strange := sorted(saved ^ state.keys()):
        where = "the checkpoint" if strange[0] in saved else f"the {role}"
        if strange[0].startswith("critic."):
            setting = extra.setting if extra else "trainer.critic.backbone=own, or without a critic"
            raise UserError(f"{folder} was not saved by a run with {setting}: only {where} has {strange[0]}")
        raise UserError(
            f"{folder} was saved by another model ({key}), or another version: only {where} has {strange[0]}"
        )
    for name, value in state.items():
        if name != RANDOM and (size := getattr(metadata[name], "size", value.shape)) != value.shape:
            raise UserError(
                f"{folder} was saved by another model ({key}): {name} is {list(size)} there and {list(value.shape)} in "
                f"the {role}"
            )
    with _without_warnings():
        dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    lenient = StateDictOptions(strict=False)
    set_optimizer_state_dict(model, optimizer, kept | {"state": moments}, options=lenient)
    if extra:
        set_optimizer_state_dict(extra.module, extra.optimizer, kept_extra | {"state": of_extra}, options=lenient)
    torch.set_rng_state(state[RANDOM])
    return int(state[STEP])


def _empty_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Collection[str], prefix: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
    """An optimizer's new state, and of it the moments that were saved: a parameter without a gradient has none."""
    optimizer.state.clear()
    optimizer.zero_grad()
    kept: dict[str, Any] = get_optimizer_state_dict(model, optimizer)  # with a state, which a step of length 0 makes
    names = {name.removeprefix(prefix) for name in saved if name.startswith(prefix)}
    return kept, {n: m for n, m in kept["state"].items() if not names.isdisjoint(_moment_names(n, m))}


def _extra_tensors(extra: ExtraPart, moments: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Its tensors by their names in a checkpoint."""
    state = {f"model.{name}": value for name, value in own_tensors(extra.module).items()}
    for name, of_parameter in moments.items():
        state |= dict(zip(_moment_names(name, of_parameter), of_parameter.values(), strict=True))
    return {f"{extra.name}.{name}": value for name, value in state.items()}


def _tensors(model: PreTrainedModel, moments: Mapping[str, Mapping[str, Tensor]], step: int) -> dict[str, Tensor]:
    """A checkpoint's tensors by name; those of model and optimizer are the living ones, to be read into."""
    state = {STEP: torch.tensor([step]), RANDOM: torch.get_rng_state()}
    kept = own_tensors(model)
    if hasattr(model, "peft_config"):
        kept = {name: value for name, value in kept.items() if ADAPTER in name}
    state |= {f"model.{name}": value for name, value in kept.items()}
    for name, of_parameter in moments.items():
        state |= dict(zip(_moment_names(name, of_parameter), of_parameter.values(), strict=True))
    return state


def _moment_names(parameter: str, moments: Mapping[str, Tensor]) -> list[str]:
    return [f"optimizer.{parameter}.{kind}" for kind in moments]


def _files(state: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of the file that each tensor goes into. All ranks take rank 0's, whose shards are the largest."""
    files: dict[str, int] = {}
    number, held = 1, 0
    for name, value in state.items():
        size = (value.to_local() if isinstance(value, DTensor) else value).nbytes
        if held and held + size > FILE_BYTES:
            number, held = number + 1, 0
        files[name], held = number, held + size
    return files


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Without the warning that one rank needs no process group, and a debug line per tensor (on Ray's stderr)."""
    logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=NO_GROUP)
        yield


def export(model: PreTrainedModel, tensors: FullTensors, origin: str, folder: Path) -> None:
    """Write weights as they come into a Hugging Face folder, with the configuration and the tokenizer of ``origin``."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, state_dict={})  # all but the weights; it would want all of these at once
    unwanted = set(model._keys_to_ignore_on_save or ())
    specs = {name: spec for name, spec in tensors.specs.items() if name not in unwanted}
    split = split_torch_state_dict_into_shards(
        meta_tensors(specs), filename_pattern="model{suffix}.safetensors", max_shard_size=EXPORTED_FILE
    )
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(writing(folder / name, {tensor: specs[tensor] for tensor in names}, PYTORCH))
            for name, names in split.filename_to_tensors.items()
        }
        for name, tensor in tensors:
            if name in specs:
                files[split.tensor_to_filename[name]].put(name, tensor)
    if split.is_sharded:
        (folder / SINGLE_FILE).unlink(missing_ok=True)
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / f"{SINGLE_FILE}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    export_tokenizer(origin, folder)


def export_tokenizer(origin: str, folder: Path) -> None:
    """That of ``origin``, if it has one."""
    if any(Path(origin).glob("tokenizer*")) or not Path(origin).is_dir():
        AutoTokenizer.from_pretrained(origin).save_pretrained(folder)


class _SummingFiles(FileSystem):
    """Takes the sums of what is written. torch syncs files before the last of their bytes have left its buffer."""

    def __init__(self) -> None:
        self.sums: Sums = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with manifest.summed(Path(path), self.sums, Path(path).name) as file:
            yield cast(io.IOBase, file)


class CheckpointWriter:
    """Where the tensors of one checkpoint go.

    Args:
        files: the number of the file that each tensor goes into.
    """

    def __init__(self, folder: Path, files: Mapping[str, int]) -> None:
        self._folder, self._files = folder, _SummingFiles()
        self.storage = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=dict(files), save_distributed=True)
        self.storage.fs, self.storage.sync_files = self._files, False

    def saved(self, write: Callable[[], Any]) -> SaveResult:
        """The result of ``write()``, which ends when this rank's tensors are written."""
        try:
            write()
            manifest.sync_folder(self._folder)
        except OSError as error:
            return SaveResult(problem=_error_text(error))
        except CheckpointException as error:
            return SaveResult(problem=_error_text(disk_error(error)))
        return SaveResult(self._files.sums)


class BackgroundSave:
    """A checkpoint that is written while training continues, from a copy in host memory.

    Args:
        group: of all ranks, on their CPUs, for nothing else; None for a single process.
    """

    def __init__(self, state: dict[str, Tensor], writer: CheckpointWriter, group: dist.ProcessGroup | None) -> None:
        self._writer = writer
        self._future = cast(
            "Future[Any]",
            dcp.async_save(state, storage_writer=writer.storage, process_group=group, no_dist=group is None),
        )

    def saved(self) -> SaveResult | None:
        """None while it is being written."""
        return self._writer.saved(self._future.result) if self._future.done() else None


def disk_error(error: CheckpointException) -> OSError:
    """The error of the disk.

    Raises:
        BaseException: the first failure of another kind.
    """
    failures = [failure for failure, _ in error.failures.values()]
    for failure in failures:
        if not isinstance(failure, OSError):
            raise failure from None
    return cast(OSError, failures[0])


def _error_text(error: OSError) -> str:
    where = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{where}" + (" (disk full)" if error.errno == errno.ENOSPC else "")
