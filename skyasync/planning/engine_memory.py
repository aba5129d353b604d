"""Bytes of one device of an inference engine.

Invariant: what vLLM takes on a GPU is its share of the device, whatever the model: the cache gets what weights and
workspace leave of it, and must hold one sequence of full length at least.
"""

from __future__ import annotations

from dataclasses import dataclass

from skyasync.config.schema import Config
from skyasync.inference.backends.vllm.setup import MIN_BATCHED_TOKENS
from skyasync.inference.interface import EngineConfig
from skyasync.planning.activations import FLOAT32
from skyasync.planning.shape import ModelShape

GIB = 1 << 30
GRAPHS = GIB
"""CUDA graphs and what libraries keep on a GPU, roughly."""

FORWARD_TOKENS = 2048
"""That of the embedded engine (``skyasync.inference.backends.transformers.model``, which imports torch)."""


@dataclass(frozen=True)
class EngineMemory:
    """Per device. ``least_cache`` holds one sequence of full length."""

    weights: int
    workspace: int
    cache: int
    least_cache: int
    tokens: int  # that the caches of the engine's devices hold together

    @property
    def lines(self) -> dict[str, int]:
        return {"weights": self.weights, "workspace": self.workspace, "cache": max(self.cache, self.least_cache)}


def engine_memory(
    cfg: Config, config: EngineConfig, shape: ModelShape, *, backend: str, b: int, share: int
) -> EngineMemory:
    """Of one device.

    Args:
        b: bytes of a number.
        share: bytes of a GPU that the engine may take; 0 where there is none.
    """
    parallel = cfg.generator.devices_per_engine
    weights = shape.parameters * b // parallel
    batched = max(MIN_BATCHED_TOKENS, config.max_model_len) if backend == "vllm" else FORWARD_TOKENS
    batched = getattr(cfg.generator, "max_num_batched_tokens", 0) or batched
    workspace = _workspace(shape, batched, min(config.max_num_seqs, batched), b, parallel) + (GRAPHS if share else 0)
    per_token = cache_bytes_per_token(shape, b, parallel)
    wanted = config.max_num_seqs * config.max_model_len * per_token
    room = share - weights - workspace if share else int(cfg.generator.kv_cache_gb * GIB)
    cache = min(room, wanted) if backend != "vllm" else room
    return EngineMemory(weights, workspace, cache, config.max_model_len * per_token, max(0, cache) // per_token)


def cache_bytes_per_token(shape: ModelShape, b: int, parallel: int) -> int:
    """Keys and values of all layers; heads that are fewer than devices are held more than once."""
    return 2 * shape.layers * max(1, shape.kv_heads // parallel) * shape.head_dim * b


def _workspace(shape: ModelShape, tokens: int, sequences: int, b: int, parallel: int) -> int:
    """A forward pass over ``tokens``, one layer at a time, and the logits of ``sequences``, sampled from in float32."""
    width = (shape.experts_per_token or 1) * 3 * shape.intermediate // parallel + shape.shared_intermediate
    return tokens * (width + 4 * shape.hidden) * b + sequences * shape.vocabulary * 2 * FLOAT32
