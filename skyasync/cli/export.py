"""``skyasync export``: a checkpoint's policy as a Hugging Face folder; and the checkpoint that a
name means.

Invariant: the weights are the checkpoint's, whatever number of ranks wrote it; no worker, engine or
Ray is started.
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
    """Write the folder, and say where it is."""
    examples = {"--out": "FOLDER", "--dtype": "bfloat16", "--model": "PATH"}
    options, names = take_options(argv, examples, ["--best"])
    if len(names) != 1:
        raise UserError(f"skyasync export takes one checkpoint, or one run; {len(names)} are named")
    checkpoint = find_checkpoint(names[0], best="--best" in options)
    out = Path(options.get("--out") or checkpoint / "hf")
    write(checkpoint, out, dtype=options.get("--dtype", "auto"), model=options.get("--model", ""))
    print(out)


def write(checkpoint: Path, out: Path, *, dtype: str = "auto", model: str = "") -> None:
    """Args: as of the command; ``model`` is by default the one that the checkpoint's run began
    with.

    Raises:
        UserError: if the checkpoint holds no policy, or the model it began with is not there.
    """
    if dtype not in DTYPES:
        raise UserError(unknown("--dtype", dtype, DTYPES))
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: name a new folder with --out")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is there and not empty: name another folder with --out")
    try:
        recorded = json.loads((checkpoint / CONFIG).read_text(encoding="utf-8"))
        policy = recorded["config"].get("trainer", {}).get("policy", {})
    except (OSError, ValueError, KeyError, TypeError):
        policy = {}
    settings = policy.get("model", {})
    origin = model or str(settings.get("path", ""))
    if not origin or (origin.startswith("/") and not Path(origin).is_dir()):
        raise UserError(
            f"the model that {checkpoint} was trained from is {'not there: ' + origin if origin else 'not known'}; "
            f"name it (for its configuration and tokenizer) with --model PATH"
        )
    if model:
        origin = model_path(model, "--model")
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
    chosen: torch.dtype = vars(torch).get(name, torch.float32)
    weights = read_weights(checkpoint)
    lora = policy.get("lora", {})
    if lora.get("rank"):
        from skyasync.models.lora import merge

        weights = merge(weights, origin, lora, chosen)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=chosen)
    strange = sorted(weights.keys() - empty.state_dict().keys())
    if strange:
        raise UserError(
            f"{checkpoint} is of another model than {origin}: only the checkpoint has {strange[0]}"
        )
    disable_progress_bar()
    files.export(
        empty,
        FullTensors(weights, chosen, FileLayout(empty, specs_in(weights, chosen))),
        origin,
        out,
    )


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """All weights of a checkpoint's policy, whole, by their Hugging Face names."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from skyasync.utils.weight_files import weights_of

    folder = checkpoint / "policy"
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{checkpoint} holds no policy")
    reader = HuggingFaceStorageReader(str(folder))
    with weights_of(folder):
        metadata = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in metadata.items()
        if name.startswith(_PREFIX) and isinstance(about, TensorStorageMetadata)
    }
    with weights_of(folder), warnings.catch_warnings():
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
    inside = checkpoints_of_run(folder)
    if best:
        recorded = read_best(inside)
        if recorded is None:
            raise UserError(
                f"{folder} has no best checkpoint: a run with trainer.ckpt_best_metric keeps one"
            )
        return find_checkpoint(str(inside / recorded.folder))
    newest = Checkpoints(inside).latest()
    if newest is None:
        raise UserError(f"{folder} has no checkpoint: a run with trainer.ckpt_interval keeps some")
    return newest


def checkpoints_of_run(run: Path) -> Path:
    """The folder of a run's checkpoints, also one that ``trainer.ckpt_path`` named; the folder
    itself of no run."""
    configured = read(run / "config.yaml").get("trainer.ckpt_path")
    folders = ([Path(str(configured))] if configured else []) + [run / "checkpoints"]
    return next((folder for folder in folders if folder.is_dir()), run)
