"""How weights and training state leave a policy and come back.

Invariant: only tensors are written, as safetensors, so that reading a checkpoint can never run code. State is
stored by parameter name and shard offset: any number of ranks reads what any other number wrote.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, PreTrainedModel

STEP = "step"
RANDOM = "random_state"
MOMENTS = ("exp_avg", "exp_avg_sq")


def full_weights(model: PreTrainedModel, dtype: torch.dtype, keep: bool) -> dict[str, Tensor]:
    """All weights and saved buffers by Hugging Face name, whole, on the CPU; a tied weight under its first name.

    Args:
        keep: False takes part in gathering and returns nothing, for all ranks but the first.
    """
    weights: dict[str, Tensor] = {}
    saved = model.state_dict(keep_vars=True)
    seen: set[int] = set()
    for name, value in saved.items():
        if id(value) in seen:
            continue
        seen.add(id(value))
        whole = value.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        if keep:
            whole = whole.to(dtype) if whole.is_floating_point() else whole
            weights[name] = whole.cpu().contiguous()
    return weights


def training_state(model: PreTrainedModel, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Tensor]:
    """Everything that the next optimizer step depends on, as tensors that may be written to in place."""
    _materialise(optimizer)
    state: dict[str, Tensor] = {STEP: torch.tensor([step]), RANDOM: torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        state[f"model.{name}"] = parameter.data
        for moment in MOMENTS:
            state[f"optimizer.{moment}.{name}"] = optimizer.state[parameter][moment]
    return state


def _materialise(optimizer: torch.optim.Optimizer) -> None:
    """AdamW makes its moments at its first step; before that they are zero."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    **{moment: torch.zeros_like(parameter.data) for moment in MOMENTS},
                }


def save(state: dict[str, Tensor], folder: Path) -> None:
    """Every rank writes its shards into ``folder``, which must not hold another checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _quietly():
        dcp.save(state, storage_writer=writer, no_dist=not dist.is_initialized())


def load(state: dict[str, Tensor], folder: Path) -> None:
    """Fill the tensors of ``state`` in place.

    Raises:
        FileNotFoundError: if there is no checkpoint in ``folder``.
    """
    if not any(folder.glob("*.safetensors")):
        raise FileNotFoundError(f"no policy checkpoint in {folder}")
    reader = HuggingFaceStorageReader(str(folder))
    with _quietly():
        dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the warning that one rank needs no process group, and a debug line per tensor (on Ray's stderr)."""
    logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def export(model: PreTrainedModel, weights: Mapping[str, Tensor], origin: str, folder: Path) -> None:
    """Write ``weights`` as a Hugging Face folder, with the configuration and the tokenizer of ``origin``."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, state_dict=dict(weights))
    if any(Path(origin).glob("tokenizer*")) or not Path(origin).is_dir():
        AutoTokenizer.from_pretrained(origin).save_pretrained(folder)
