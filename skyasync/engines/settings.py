"""What the engines of a run are told: its configuration in the terms of ``EngineConfig``.

Invariant: pure functions of the configuration and of whether there are GPUs; what cannot work is refused here, before
an engine starts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from skyasync.config.sampling import backend, sampling_groups
from skyasync.config.schema import Config
from skyasync.engines.protocol import EngineConfig
from skyasync.errors import UserError

FEW_TURNS = 4  # that there is room for where generator.max_turns does not say


def engine_config(cfg: Config, *, gpus: bool) -> EngineConfig:
    """Raises ``UserError`` for settings that this machine or the chosen engine cannot carry out."""
    generator, trainer = cfg.generator, cfg.trainer
    return EngineConfig(
        model_path=trainer.policy.model.path,
        dtype=generator.dtype if generator.dtype != "auto" else trainer.policy.model.dtype,
        max_model_len=generator.max_model_len or _room(cfg),
        max_num_seqs=generator.max_num_seqs,
        tensor_parallel_size=generator.inference_engine_tensor_parallel_size,
        gpu_memory_utilization=generator.gpu_memory_utilization,
        kv_cache_gb=generator.kv_cache_gb,
        seed=trainer.seed,
        weight_sync_backend=_weight_sync_backend(cfg, gpus=gpus),
        extra={"sleep_mode": _sleep(cfg, gpus=gpus), "one_per_prompt": not generator.is_num_return_sequences_expand},
    )


def sync_tolerance(cfg: Config, *, gpus: bool) -> float:
    """The largest gap of a weight sync's probe log-probabilities."""
    dtypes = {cfg.trainer.policy.model.dtype, engine_config(cfg, gpus=gpus).dtype}
    exact = dtypes <= ({"float32"} if gpus else {"float32", "auto"})
    return cfg.generator.weight_sync_tolerance or (1e-4 if exact else 1.0)


def _room(cfg: Config) -> int:
    """Tokens of an episode, what stands between its responses being as long as a prompt may be."""
    prompt, turns = cfg.trainer.max_prompt_length, cfg.generator.max_turns or FEW_TURNS
    response = max(sampling.max_generate_length for sampling in sampling_groups(cfg.generator).values())
    context = _context(cfg.trainer.policy.model.path)
    return max(min(turns * (prompt + response), context), prompt + response)


def _context(model: str) -> int:
    """Most positions of the model, if its ``config.json`` is on this machine and says so; else no bound."""
    from huggingface_hub import try_to_load_from_cache

    file = Path(model) / "config.json"
    if not file.is_file():
        cached = try_to_load_from_cache(model, "config.json") if model.count("/") == 1 else None
        file = Path(cached) if isinstance(cached, str) else file
    settings = json.loads(file.read_text()) if file.is_file() else {}
    return int(settings.get("max_position_embeddings") or sys.maxsize)


def _sleep(cfg: Config, *, gpus: bool) -> bool:
    """Whether the engines give their devices away while the policy is trained."""
    colocated = cfg.trainer.placement.colocate_all
    if colocated and not gpus and backend(cfg) == "vllm":
        raise UserError(
            "trainer.placement.colocate_all=true puts engines to sleep during training, which vLLM cannot do on a "
            "CPU: set generator.backend=transformers, or trainer.placement.colocate_all=false"
        )
    return colocated


def _weight_sync_backend(cfg: Config, *, gpus: bool) -> str:
    chosen = cfg.generator.weight_sync_backend
    if chosen == "nccl" and not gpus:
        raise UserError("generator.weight_sync_backend=nccl needs GPUs, and the cluster has none: use shared_memory")
    if chosen == "nccl" and backend(cfg) != "vllm":
        raise UserError("generator.weight_sync_backend=nccl needs generator.backend=vllm; use shared_memory")
    return "shared_memory" if chosen == "auto" else chosen
