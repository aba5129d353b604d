"""What the engines of a run are told: its configuration in the terms of ``EngineConfig``.

Invariant: pure functions of the configuration and of whether there are GPUs; what cannot work is refused here, before
an engine starts.
"""

from __future__ import annotations

import os
import sys
from math import ceil

from skyasync.config.model_files import config_file, read_json
from skyasync.config.schema import Config, GeneratorConfig, ModelConfig
from skyasync.config.schema.sampling import backend, sampling_groups
from skyasync.config.schema.weight_sync import BETWEEN_GPUS
from skyasync.errors import UserError
from skyasync.inference.interface import ENGINES, EngineConfig
from skyasync.registry import resolve_reference
from skyasync.weight_sync.verify.log_probabilities import BFLOAT16, FLOAT32, Rounding

_BETWEEN_GPUS = {
    "nccl": "weights go to the engines from GPU to GPU",
    "cuda_ipc": "engines read the weights on the GPUs that they share with the policy",
}
FEW_TURNS = 4  # that there is room for where generator.max_turns does not say


def engine_config(cfg: Config, *, gpus: bool) -> EngineConfig:
    """Raises ``UserError`` for settings that this machine or the chosen engine cannot carry out."""
    generator, trainer = cfg.generator, cfg.trainer
    limits = ENGINES.about(backend(cfg)).can["cpu_limits"]
    if limits and not gpus:
        for problem in resolve_reference(limits, kind="check of an engine on a CPU")(cfg):
            raise UserError(problem)
    return EngineConfig(
        model_path=trainer.policy.model.path,
        dtype=generator.dtype if generator.dtype != "auto" else trainer.policy.model.dtype,
        max_model_len=generator.max_model_len or _room(cfg),
        max_num_seqs=generator.max_num_seqs,
        max_num_batched_tokens=_batched_tokens(generator),
        tensor_parallel_size=generator.inference_engine_tensor_parallel_size,
        gpu_memory_utilization=generator.gpu_memory_utilization / engines_per_device(cfg),
        kv_cache_gb=generator.kv_cache_gb,
        seed=trainer.seed,
        weight_sync_backend=weight_sync_backend(cfg, gpus=gpus),
        extra={
            "sleep_mode": _sleep(cfg, gpus=gpus),
            "one_per_prompt": not generator.is_num_return_sequences_expand,
            "engine_kwargs": dict(generator.engine_kwargs),
            "adapter_rank": adapter_rank(cfg),
            "routed_experts": replays_routers(cfg),
            "config_kwargs": dict(trainer.policy.model.config_kwargs),
        },
    )


def replays_routers(cfg: Config) -> bool:
    """Whether engines say which experts they chose, for the trainer to choose the same."""
    return cfg.trainer.policy.router_replay != "none"


def adapter_rank(cfg: Config) -> int:
    """Of the adapters that engines are sent alone; 0 where they are sent weights."""
    lora = cfg.trainer.policy.lora
    return lora.rank if lora.sync == "adapter" else 0


def rounding(cfg: Config, *, gpus: bool) -> Rounding:
    """What rounding can do to a log-probability, for the dtypes of policy and engine."""
    dtypes = {cfg.trainer.policy.model.dtype, engine_config(cfg, gpus=gpus).dtype}
    return FLOAT32 if dtypes <= ({"float32"} if gpus else {"float32", "auto"}) else BFLOAT16


def _room(cfg: Config) -> int:
    """Tokens of an episode, what stands between its responses being as long as a prompt may be."""
    prompt, turns = cfg.trainer.max_prompt_length, cfg.generator.max_turns or FEW_TURNS
    response = max(sampling.max_generate_length for sampling in sampling_groups(cfg.generator).values())
    context = _context(cfg.trainer.policy.model)
    return max(min(turns * (prompt + response), context), prompt + response)


def _context(model: ModelConfig) -> int:
    """Most positions of the model, if its ``config.json`` is on this machine and says so; else no bound."""
    name, file = "max_position_embeddings", config_file(model.path)
    try:
        return int({**(read_json(file, model.path) if file else {name: sys.maxsize}), **model.config_kwargs}[name])
    except (UserError, KeyError, TypeError, ValueError):  # what is wrong is said where the model is checked
        return sys.maxsize


def _sleep(cfg: Config, *, gpus: bool) -> bool:
    """Whether the engines give their devices away while the policy is trained."""
    colocated = cfg.trainer.placement.colocate_all
    can = ENGINES.about(backend(cfg)).can["sleeps_on"]
    if colocated and ("gpu" if gpus else "cpu") not in can:
        raise UserError(
            f"trainer.placement.colocate_all=true puts engines to sleep during training, which generator.backend="
            f"{backend(cfg)} cannot do on a {'GPU' if gpus else 'CPU'}: set generator.backend=transformers, or "
            f"trainer.placement.colocate_all=false"
        )
    return colocated


def engines_per_device(cfg: Config) -> int:
    """The most engines that have a device together, as ``plan_slots`` places them."""
    placement = cfg.trainer.placement
    ranks = placement.policy_num_nodes * placement.policy_num_gpus_per_node
    return ceil(cfg.generator.own_engines / ranks) if placement.colocate_all else 1


def colocated_rank(engine: int, ranks: int) -> int:
    """The policy's rank that shares its device with an engine, with ``trainer.placement.colocate_all``."""
    return engine % ranks


def _batched_tokens(generator: GeneratorConfig) -> int:
    asked = generator.max_num_batched_tokens
    if 0 < asked < generator.max_num_seqs:
        raise UserError(
            f"generator.max_num_batched_tokens={asked} is less than generator.max_num_seqs={generator.max_num_seqs}, "
            f"and each of these sequences gets a token per step: raise the one, lower the other, or leave it at 0"
        )
    return asked


def weight_sync_backend(cfg: Config, *, gpus: bool) -> str:
    """How the weights travel: what ``generator.weight_sync_backend`` says, or what ``auto`` stands for here."""
    chosen = cfg.generator.weight_sync_backend
    if chosen in BETWEEN_GPUS and not gpus:
        raise UserError(
            f"generator.weight_sync_backend={chosen} needs GPUs, and the cluster has none: use shared_memory"
        )
    together = cfg.trainer.placement.colocate_all
    if chosen != "auto" and (together or chosen != "cuda_ipc"):  # which is refused, but where tools put them apart
        return chosen
    by_file = cfg.generator.weight_sync_mode == "delta" or adapter_rank(cfg)
    way = "cuda_ipc" if together else "nccl"
    return way if gpus and not by_file and way in ENGINES.about(backend(cfg)).can["weight_sync"] else "shared_memory"


def loads_as_files(cfg: Config) -> bool:
    """Whether the run's engines load weights by the names of the model's files."""
    engine = ENGINES.builtins().get(backend(cfg))  # an engine of the user's may be known to their program alone
    return engine is not None and bool(engine.can["loads_as_files"])


def maps_weights(cfg: Config) -> bool:
    """Whether the trainer writes weights into memory of the machine that its engines have mapped, and into no file.

    Changes and adapters are put into weights that an engine has itself.
    """
    engine = ENGINES.builtins().get(backend(cfg))  # one of the user's may be known to their program alone
    able = engine is not None and (engine.can["computes_on_mapped_weights"] or engine.can["reads_mapped_weights"])
    whole = cfg.generator.weight_sync_mode == "full" and not adapter_rank(cfg)
    return bool(able) and whole and not cfg.generator.weight_sync_dir and hasattr(os, "memfd_create")


def computes_on_mapped_weights(cfg: Config) -> bool:
    """Whether they compute on it then, without a copy of their own."""
    return maps_weights(cfg) and bool(ENGINES.about(backend(cfg)).can["computes_on_mapped_weights"])


def chosen_backend(cfg: Config, *, gpus: bool) -> str:
    """A line that says what ``auto`` has come to, and why; empty where there was nothing to choose."""
    if cfg.generator.weight_sync_backend != "auto":
        return ""
    if (way := weight_sync_backend(cfg, gpus=gpus)) in BETWEEN_GPUS:
        return f"generator.weight_sync_backend=auto is {way}: {_BETWEEN_GPUS[way]}"
    why = ""
    if gpus and not (cfg.generator.weight_sync_mode == "delta" or adapter_rank(cfg)):
        why = f" (the {backend(cfg)} engine has no other way)"
    others = "; engines on other nodes get theirs by broadcast" if crosses_nodes(cfg) else ""
    return f"generator.weight_sync_backend=auto is shared_memory{why}: {_way(cfg)}{others}"


def crosses_nodes(cfg: Config) -> bool:
    """Whether weights that do not go by NCCL may have to be carried to engines on other nodes of a cluster."""
    return bool(cfg.ray.address) and cfg.generator.own_engines > 0 and not cfg.generator.weight_sync_dir


def _way(cfg: Config) -> str:
    """What weights travel by where it is not NCCL."""
    if computes_on_mapped_weights(cfg):
        dtype = cfg.generator.dtype
        if dtype in ("auto", cfg.trainer.policy.model.dtype):
            return "mapped memory, on which the engines compute"
        return f"mapped memory, from which the engines copy (generator.dtype={dtype} is not the policy's)"
    if maps_weights(cfg):
        return f"mapped memory, which the {backend(cfg)} engine loads"
    where = cfg.generator.weight_sync_dir or "memory of this machine (/dev/shm, or the temporary folder)"
    what = "of the weights"
    if adapter_rank(cfg):
        what = "of the adapters alone (trainer.policy.lora.sync=adapter)"
    elif cfg.generator.weight_sync_mode == "delta":
        what = "of what has changed (generator.weight_sync_mode=delta)"
    return f"a file {what} in {where}"
