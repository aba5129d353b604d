"""``skyasync export``: a checkpoint's policy as a Hugging Face folder; checkpoints by their names.

Invariant: the weights are the checkpoint's, for any number of ranks that wrote it; no worker,
engine or Ray is started.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from skyasync.cli.commands import Arguments, take_options
from skyasync.config.model_files import model_path
from skyasync.config.resume import STATE
from skyasync.errors import UserError, unknown
from skyasync.observability.report.settings import read
from skyasync.trainer.checkpoint.checkpoints import CONFIG, Checkpoints, glance, read_best

if TYPE_CHECKING:
    import torch
    from torch import Tensor

HELP = """\
usage: skyasync export CHECKPOINT|RUN [--best] [--out FOLDER] [--dtype auto|float32|bfloat16] [--model PATH]

Writes the policy of a checkpoint as a Hugging Face folder: safetensors, configuration, tokenizer. For a run it is the
newest checkpoint, or with --best the best one.

--out    the new folder, by default hf next to the checkpoint
--dtype  auto is the dtype of the model that the run started from
--model  the model that the run started from, if it has moved
"""
DTYPES = ("auto", "float32", "bfloat16")
_PREFIX = "model."  # of the weights among a checkpoint's tensors


def export(argv: Arguments) -> None:
    """Write the folder, and print its path."""
    examples = {"--out": "FOLDER", "--dtype": "bfloat16", "--model": "PATH"}
    options, names = take_options(argv, examples, ["--best"])
    if len(names) != 1:
        raise UserError(f"skyasync export takes one checkpoint, or one run; {len(names)} are named")
    checkpoint = find_checkpoint(names[0], best="--best" in options)
    out = Path(options.get("--out") or checkpoint / "hf")
    write(checkpoint, out, dtype=options.get("--dtype", "auto"), model=options.get("--model", ""))
    print(out)


def write(checkpoint: Path, out: Path, *, dtype: str = "auto", model: str = "") -> None:
    """Write a checkpoint's policy as a Hugging Face folder.

    Args:
        out: the new folder.
        dtype: one of ``DTYPES``.
        model: has the configuration and the tokenizer; by default that of the checkpoint's run.

    Raises:
        UserError: if the checkpoint has no policy, or the model does not exist.
    """
    if dtype not in DTYPES:
        raise UserError(unknown("--dtype", dtype, DTYPES))
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: name a new folder with --out")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is there and not empty: name another folder with --out")
    try:
        recorded_state = json.loads((checkpoint / CONFIG).read_text(encoding="utf-8"))
        policy = recorded_state["config"].get("trainer", {}).get("policy", {})
    except (OSError, ValueError, KeyError, TypeError):  # a checkpoint without them needs --model
        policy = {}
    settings = policy.get("model", {})
    origin = model or str(settings.get("path", ""))
    if not origin or (origin.startswith("/") and not Path(origin).is_dir()):
        problem = f"not there: {origin}" if origin else "not known"
        raise UserError(
            f"the model that {checkpoint} was trained from is {problem}; "
            f"name it (for its configuration and tokenizer) with --model PATH"
        )
    if model:
        origin = model_path(model, "--model")
    # After the checks of arguments: these imports take seconds.
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from skyasync.models.fsdp import checkpoint as files
    from skyasync.models.token_model import training_config
    from skyasync.weight_sync.full_tensors import FileLayout, FullTensors, specs_in

    config = training_config(origin, settings.get("config_kwargs"))
    if dtype == "auto":
        name = str(config.dtype).rpartition(".")[2]
    else:
        name = dtype
    torch_dtype: torch.dtype = vars(torch).get(name, torch.float32)
    weights = read_weights(checkpoint)
    lora = policy.get("lora", {})
    if lora.get("rank"):
        from skyasync.models.lora import merge

        weights = merge(weights, origin, lora, torch_dtype)
    with torch.device("meta"):  # names and shapes, without memory
        model_shape = AutoModelForCausalLM.from_config(config, dtype=torch_dtype)
    # Only extra names: a tied weight stands once in a checkpoint.
    extra_names = sorted(weights.keys() - model_shape.state_dict().keys())
    if extra_names:
        raise UserError(
            f"{checkpoint} is of another model than {origin}: only the checkpoint has {extra_names[0]}"
        )
    disable_progress_bar()
    layout = FileLayout(model_shape, specs_in(weights, torch_dtype))
    files.export(model_shape, FullTensors(weights, torch_dtype, layout), origin, out)


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """All full tensors of a checkpoint's policy by their Hugging Face names."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from skyasync.utils.weight_files import weights_of

    folder = checkpoint / "policy"
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{checkpoint} holds no policy")
    reader = HuggingFaceStorageReader(str(folder))
    with weights_of(folder):  # errors of the files name the folder
        metadata = reader.read_metadata().state_dict_metadata
    state: dict[str, Tensor] = {}
    for name, tensor in metadata.items():
        if name.startswith(_PREFIX) and isinstance(tensor, TensorStorageMetadata):
            state[name] = torch.empty(tensor.size, dtype=tensor.properties.dtype)
    with weights_of(folder), warnings.catch_warnings():
        # One process reads the shards of all ranks.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=reader, no_dist=True)
    return {name.removeprefix(_PREFIX): value for name, value in state.items()}


def find_checkpoint(name: str, *, best: bool = False) -> Path:
    """The checkpoint of this name, or the newest complete or the best one of a run of this name.

    Raises:
        UserError: if there is none, or it is damaged.
    """
    folder = Path(name).expanduser()
    if (folder / STATE).is_file():
        if best:
            raise UserError(
                f"--best chooses among the checkpoints of a run, and {folder} is one checkpoint"
            )
        problem = glance(folder)
        if problem:
            raise UserError(f"checkpoint {folder} cannot be used: {problem}")
        return folder
    if not folder.is_dir():
        raise UserError(
            f"there is no folder {folder}: name a checkpoint's, or a run's that has some"
        )
    checkpoints = checkpoints_of_run(folder)
    if best:
        best_checkpoint = read_best(checkpoints)
        if best_checkpoint is None:
            raise UserError(
                f"{folder} has no best checkpoint: a run with trainer.ckpt_best_metric keeps one"
            )
        return find_checkpoint(str(checkpoints / best_checkpoint.folder))
    newest = Checkpoints(checkpoints).latest()
    if newest is None:
        raise UserError(f"{folder} has no checkpoint: a run with trainer.ckpt_interval keeps some")
    return newest


def checkpoints_of_run(run: Path) -> Path:
    """The folder of a run's checkpoints: ``trainer.ckpt_path``, its default, or ``run`` itself."""
    configured_path = read(run / "config.yaml").get("trainer.ckpt_path")
    if configured_path and Path(str(configured_path)).is_dir():
        return Path(str(configured_path))
    default = run / "checkpoints"
    if default.is_dir():
        return default
    return run  # it may be the folder of checkpoints
