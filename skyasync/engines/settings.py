"""What the engines of a run are told: its configuration in the terms of ``EngineConfig``.

Invariant: pure functions of the configuration and of whether there are GPUs; what cannot work is refused here, before
an engine starts.
"""

from __future__ import annotations

from skyasync.config.sampling import backend
from skyasync.config.schema import Config
from skyasync.engines.protocol import ENGINES, EngineConfig
from skyasync.errors import UserError


def engine_config(cfg: Config, *, gpus: bool) -> EngineConfig:
    """Raises ``UserError`` for settings that this machine or the chosen engine cannot carry out."""
    generator, trainer = cfg.generator, cfg.trainer
    response = generator.sampling_params.max_generate_length
    response = max(response, generator.eval_sampling_params.max_generate_length)
    return EngineConfig(
        model_path=trainer.policy.model.path,
        dtype=generator.dtype if generator.dtype != "auto" else trainer.policy.model.dtype,
        max_model_len=generator.max_model_len or trainer.max_prompt_length + response * generator.max_turns,
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


def _weight_sync_backend(cfg: Config, *, gpus: bool) -> str:
    chosen = cfg.generator.weight_sync_backend
    if chosen == "nccl" and not gpus:
        raise UserError("generator.weight_sync_backend=nccl needs GPUs, and the cluster has none: use shared_memory")
    return "shared_memory" if chosen == "auto" else chosen
