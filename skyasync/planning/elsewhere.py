"""What a weight sync takes of a host that has engines, but not the policy's rank 0.

Invariant: every engine there receives all weights by broadcast, while it still has those of the sync before.
"""

from __future__ import annotations

from skyasync.config.generation import BETWEEN_GPUS
from skyasync.config.schema import Config
from skyasync.engines.settings import adapter_rank, computes_on_mapped_weights, crosses_nodes, engine_config
from skyasync.planning.activations import FLOAT32
from skyasync.planning.engine_memory import EngineMemory
from skyasync.planning.shape import ModelShape
from skyasync.planning.training_memory import Lines, Rank


def received(cfg: Config, shape: ModelShape, rank: Rank, engines: int, *, gpus: bool) -> Lines:
    """Of the engines there; nothing if there is no such host, or weights go from GPU to GPU.

    Args:
        shape: the whole policy's.
        engines: on such a host.
    """
    way = engine_config(cfg, gpus=gpus).weight_sync_backend
    if way in BETWEEN_GPUS or not _carried(cfg, gpus=gpus):
        return {}
    if adapter_rank(cfg):
        return {"received weights": engines * rank.adapters * FLOAT32}
    copies = 2 if computes_on_mapped_weights(cfg) else cfg.generator.inference_engine_tensor_parallel_size
    return {"received weights": engines * copies * shape.parameters * rank.b}


def _carried(cfg: Config, *, gpus: bool) -> bool:
    """Whether there may be such a host: other nodes of the policy, or, of engines apart from it, any of a cluster."""
    if gpus and cfg.trainer.placement.policy_num_nodes > 1:
        return cfg.generator.own_engines > 0 and not cfg.generator.weight_sync_dir
    return crosses_nodes(cfg) and not (gpus and cfg.trainer.placement.colocate_all)


def engines_in_memory(cfg: Config, engine: EngineMemory) -> Lines:
    """Of one engine without GPUs, besides the weights that it receives, on which it may compute."""
    own_dtype = cfg.generator.dtype not in ("auto", cfg.trainer.policy.model.dtype)
    copies = own_dtype or not computes_on_mapped_weights(cfg)
    return {what: size for what, size in engine.lines.items() if copies or what != "weights"}
