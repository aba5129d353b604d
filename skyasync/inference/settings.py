"""The configuration of a run in the terms of ``EngineConfig``.

Invariant: pure functions of the configuration and of whether there are GPUs. What cannot work is
rejected here, before an engine starts.
"""

from __future__ import annotations

import sys
from math import ceil

from skyasync.config.model_files import config_file, read_json
from skyasync.config.schema import Config
from skyasync.config.schema.generator import BETWEEN_GPUS
from skyasync.config.schema.sampling import backend, sampling_groups
from skyasync.errors import UserError
from skyasync.inference.interface import ENGINES, EngineConfig
from skyasync.registry import resolve_reference
from skyasync.weight_sync.verify.log_probabilities import BFLOAT16, FLOAT32, Rounding

_BETWEEN_GPUS = {
    "nccl": "weights go to the engines from GPU to GPU",
    "cuda_ipc": "engines read the weights on the GPUs that they share with the policy",
}
POSITIONS = "max_position_embeddings"
FEW_TURNS = 4  # for which max_model_len suffices if generator.max_turns is not set
MACHINE_MEMORY = "memory of this machine (/dev/shm, or the temporary folder)"


def engine_config(cfg: Config, *, gpus: bool) -> EngineConfig:
    """Raises ``UserError`` for settings that this machine or the chosen engine cannot carry out."""
    generator = cfg.generator
    trainer = cfg.trainer
    name = backend(cfg)
    can = ENGINES.about(name).can
    limits = can["gpu_limits"] if gpus else can["cpu_limits"]
    if limits:
        for problem in resolve_reference(limits, kind="check of an engine")(cfg):
            raise UserError(problem)

    model = trainer.policy.model
    batched_tokens = generator.max_num_batched_tokens
    if 0 < batched_tokens < generator.max_num_seqs:
        raise UserError(
            f"generator.max_num_batched_tokens={batched_tokens} is less than generator.max_num_seqs="
            f"{generator.max_num_seqs}, and each of these sequences gets a token per step: raise the one, lower the "
            f"other, or leave it at 0"
        )
    sleep_setting = ""
    awake_setting = ""
    if trainer.placement.colocate_all:
        sleep_setting = "trainer.placement.colocate_all=true"
        awake_setting = "trainer.placement.colocate_all=false"
    if generator.hybrid_engines:
        sleep_setting = f"generator.hybrid_engines={generator.hybrid_engines}"
        awake_setting = "generator.hybrid_engines=0"
    device = "GPU" if gpus else "CPU"
    if sleep_setting and device.lower() not in can["sleeps_on"]:
        raise UserError(
            f"{sleep_setting} puts engines to sleep during training, which generator.backend={name} cannot do on a "
            f"{device}: set generator.backend=transformers, or {awake_setting}"
        )
    return EngineConfig(
        model_path=model.path,
        dtype=generator.dtype if generator.dtype != "auto" else model.dtype,
        max_model_len=max_model_len(cfg),
        max_num_seqs=generator.max_num_seqs,
        max_num_batched_tokens=batched_tokens,
        tensor_parallel_size=generator.inference_engine_tensor_parallel_size,
        gpu_memory_utilization=generator.gpu_memory_utilization / engines_per_device(cfg),
        kv_cache_gb=generator.kv_cache_gb,
        seed=trainer.seed,
        weight_sync_backend=weight_sync_backend(cfg, gpus=gpus),
        extra={
            "sleep_mode": bool(sleep_setting),
            "one_per_prompt": not generator.is_num_return_sequences_expand,
            "engine_kwargs": dict(generator.engine_kwargs),
            "adapter_rank": adapter_rank(cfg),
            "routed_experts": trainer.policy.router_replay != "none",
            "config_kwargs": dict(model.config_kwargs),
            "float32_head": trainer.policy.head_dtype == "float32",
        },
    )


def max_model_len(cfg: Config) -> int:
    """Tokens of a sequence in the engine, at which an episode ends: ``generator.max_model_len``.

    With 0 an episode has room for its turns: each is a response, and text before it that is as long
    as a prompt may be.
    """
    generator = cfg.generator
    model = cfg.trainer.policy.model
    if generator.max_model_len:
        return generator.max_model_len
    file = config_file(model.path)
    try:
        shape = read_json(file, model.path) if file else {POSITIONS: sys.maxsize}
        positions = int((shape | model.config_kwargs)[POSITIONS])
    except (UserError, KeyError, TypeError, ValueError):
        positions = sys.maxsize  # the check of the model raises the error
    response = 0  # the longest of training and evaluation
    for sampling in sampling_groups(generator).values():
        response = max(response, sampling.max_generate_length)
    turn = cfg.trainer.max_prompt_length + response
    episode = (generator.max_turns or FEW_TURNS) * turn
    return max(min(episode, positions), turn)


def adapter_rank(cfg: Config) -> int:
    """Rank of the adapters if engines are sent adapters alone; 0 if they are sent weights."""
    lora = cfg.trainer.policy.lora
    if lora.sync == "adapter":
        return lora.rank
    return 0


def rounding(cfg: Config, *, gpus: bool) -> Rounding:
    """The effect of rounding on a log-probability, for the dtypes of policy and engine."""
    dtypes = {cfg.trainer.policy.model.dtype, engine_config(cfg, gpus=gpus).dtype}
    exact = {"float32"} if gpus else {"float32", "auto"}  # auto is bfloat16 on a GPU
    if dtypes <= exact:
        return FLOAT32
    return BFLOAT16


def engines_per_device(cfg: Config) -> int:
    """The most engines that have a device together, as ``plan_slots`` places them."""
    placement = cfg.trainer.placement
    if placement.colocate_all:
        return ceil(cfg.generator.own_engines / placement.policy_ranks)
    return 1


def colocated_rank(engine: int, ranks: int) -> int:
    """The policy's rank on an engine's device, with ``trainer.placement.colocate_all``."""
    return engine % ranks


def weight_sync_backend(cfg: Config, *, gpus: bool) -> str:
    """The transfer of weights: ``generator.weight_sync_backend``, with ``auto`` resolved."""
    configured_backend = cfg.generator.weight_sync_backend
    if configured_backend in BETWEEN_GPUS and not gpus:
        raise UserError(
            f"generator.weight_sync_backend={configured_backend} needs GPUs, and the cluster has none: use shared_memory"
        )
    is_colocated = cfg.trainer.placement.colocate_all
    # The checks of the configuration reject cuda_ipc without colocate_all. A tool that separates
    # engines and policy afterwards gets what auto stands for.
    if configured_backend != "auto" and (is_colocated or configured_backend != "cuda_ipc"):
        return configured_backend
    by_file = (
        cfg.generator.weight_sync_mode == "delta"
        or adapter_rank(cfg)
        or cfg.generator.hybrid_engines
    )
    direct_transfer = "cuda_ipc" if is_colocated else "nccl"
    transfers = ENGINES.about(backend(cfg)).can["weight_sync"]
    if gpus and not by_file and direct_transfer in transfers:
        return direct_transfer
    return str(transfers[0])


def loads_as_files(cfg: Config) -> bool:
    """Whether the run's engines load weights by the names of the model's files."""
    # An engine of the user's may be known to their program alone.
    engine = ENGINES.builtins().get(backend(cfg))
    return engine is not None and bool(engine.can["loads_as_files"])


def maps_weights(cfg: Config) -> bool:
    """Whether the trainer writes weights into shared memory that its engines map, not into a file.

    Deltas and adapters are added to weights that an engine has itself.
    """
    # An engine of the user's may be known to their program alone.
    engine = ENGINES.builtins().get(backend(cfg))
    if engine is None or sys.platform != "linux":  # it needs /dev/shm
        return False
    if not engine.can["computes_on_mapped_weights"] and not engine.can["reads_mapped_weights"]:
        return False
    if cfg.generator.weight_sync_mode != "full" or adapter_rank(cfg):
        return False
    return not cfg.generator.weight_sync_dir


def computes_on_mapped_weights(cfg: Config) -> bool:
    """Whether the engines compute on the mapped weights, without a copy of their own."""
    if not maps_weights(cfg):
        return False
    engine = ENGINES.about(backend(cfg))
    return bool(engine.can["computes_on_mapped_weights"])


def chosen_engine(cfg: Config) -> str:
    """The engine of the run, and why it is this one; empty for a run without engines."""
    generator = cfg.generator
    name = backend(cfg)
    if generator.engines:
        return f"{name} (generator.engines: {len(generator.engines)})"
    if generator.num_inference_engines == 0:
        return ""
    if generator.backend != "auto":
        return f"{name} (generator.backend)"
    return f"{name} (generator.backend=auto: vLLM is {'' if name == 'vllm' else 'not '}installed)"


def chosen_backend(cfg: Config, *, gpus: bool) -> str:
    """A line with the transfer that ``auto`` stands for, and why; empty if the run names one."""
    if cfg.generator.weight_sync_backend != "auto":
        return ""
    transfer = weight_sync_backend(cfg, gpus=gpus)
    if transfer != "shared_memory":
        reason = _BETWEEN_GPUS.get(transfer, f"the {backend(cfg)} engine's own way")
        return f"generator.weight_sync_backend=auto is {transfer}: {reason}"
    delta = cfg.generator.weight_sync_mode == "delta"
    adapters = adapter_rank(cfg)
    if maps_weights(cfg):
        dtype = cfg.generator.dtype
        if not computes_on_mapped_weights(cfg):
            description = f"mapped memory, which the {backend(cfg)} engine loads"
        elif dtype in ("auto", cfg.trainer.policy.model.dtype):
            description = "mapped memory, on which the engines compute"
        else:
            description = f"mapped memory, from which the engines copy (generator.dtype={dtype} is not the policy's)"
    else:
        content = "of the weights"
        if adapters:
            content = "of the adapters alone (trainer.policy.lora.sync=adapter)"
        elif delta:
            content = "of what has changed (generator.weight_sync_mode=delta)"
        location = cfg.generator.weight_sync_dir or MACHINE_MEMORY
        description = f"a file {content} in {location}"
    reason = ""
    if gpus and not (delta or adapters):
        reason = f" (the {backend(cfg)} engine has no other way)"
    if crosses_nodes(cfg):
        description += "; engines on other nodes get theirs by broadcast"
    return f"generator.weight_sync_backend=auto is shared_memory{reason}: {description}"


def crosses_nodes(cfg: Config) -> bool:
    """Whether weights that do not go by NCCL may have to reach engines on other nodes."""
    generator = cfg.generator
    return bool(cfg.ray.address) and generator.own_engines > 0 and not generator.weight_sync_dir
