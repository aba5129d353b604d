"""A lower bound of the memory that training takes: a run that cannot fit is refused before it starts.

Invariant: it never refuses a run that would fit. Only weights, gradients and optimizer state of the policy are counted,
by the size of its files; ``skyasync plan`` measures the rest.
"""

from __future__ import annotations

from pathlib import Path

from skyasync.config.model_files import CONFIG, read_json
from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.utils.machine import Machine

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_FROZEN = {"": 2.0, "nf4": 0.5, "int8": 1.0}  # bytes of a weight below adapters, at least
_STATE = {"adamw": 8, "adamw_8bit": 2, "muon": 4}  # bytes of optimizer state of a parameter, at least


def check_memory(cfg: Config, machine: Machine) -> None:
    """Raises ``UserError`` if the trained policy alone is larger than the machine.

    Args:
        machine: where all ranks of one node are.
    """
    key, path = "trainer.policy.model.path", cfg.trainer.policy.model.path
    count = parameters(Path(path))
    placement = cfg.trainer.placement
    needed = count * bytes_per_parameter(cfg)
    if machine.gpus:
        ranks = placement.policy_num_nodes * placement.policy_num_gpus_per_node
        needed /= cfg.trainer.policy.fsdp_size or ranks
        available, where = machine.gpu_memory, "each GPU"
        way_out = f"more ranks than {ranks} (trainer.placement), "
        if cfg.trainer.policy.cpu_offload != "none":
            return
    else:
        available, where, way_out = machine.host_memory, "this machine", ""
    if needed <= available:
        return
    what = "weights" if cfg.trainer.policy.lora.rank else "weights, gradients and optimizer state"
    raise UserError(
        f"{key}={path}: the {what} of its {count / 1e9:.3g}B parameters take at least {needed / 2**30:.0f} GiB, and "
        f"{where} has {available / 2**30:.0f} GiB: use {way_out}adapters (trainer.policy.lora.rank) or a smaller "
        f"model; skyasync plan says what fits"
    )


def parameters(folder: Path) -> int:
    """Parameters in the files of a local folder; 0 where there are none to look at."""
    if not (folder / CONFIG).is_file():
        return 0
    settings = read_json(folder / CONFIG, str(folder))
    dtype = str(settings.get("dtype") or settings.get("torch_dtype") or "float32")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) // _BYTES.get(dtype, 4)


def bytes_per_parameter(cfg: Config) -> float:
    """What a trained parameter takes on the ranks that share it."""
    policy = cfg.trainer.policy
    if policy.lora.rank or policy.freeze:
        return _FROZEN[policy.lora.base_dtype]
    rounded = policy.optimizer_config.bf16_stochastic_round
    state = _STATE[policy.optimizer_config.name]
    return 4 + (state / 2 if rounded else state + 4)
