"""Bytes of batches and of one device of an engine, by arithmetic. Nothing imports torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from skyasync.config.schema import Config
from skyasync.inference.backends.vllm.setup import batched_tokens
from skyasync.inference.interface import EngineConfig
from skyasync.inference.settings import max_model_len
from skyasync.models.rank_memory import ACTIVATIONS, LOGITS, Lines
from skyasync.planning.shape import ModelShape

FLOAT32 = 4
GIB = 1 << 30

FRAGMENTATION = 0.15
"""Of what is allocated and freed within a step: allocators (C's on a CPU, torch's on a GPU) keep
holes. Measured."""

BYTES_PER_CELL = 40
"""Of a training batch: tokens 8, masks 2, and up to seven numbers per token."""

GRAPHS = GIB
"""CUDA graphs and what libraries keep on a GPU, roughly."""

FORWARD_TOKENS = 2048
"""Of the transformers engine (``skyasync.inference.backends.transformers.model``, which imports
torch)."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of the longest prompt and of the longest rest of an episode, and samples per
    prompt."""

    prompt: int
    response: int
    samples: int

    @classmethod
    def of(cls, cfg: Config) -> Lengths:
        generator = cfg.generator
        prompt = cfg.trainer.max_prompt_length
        response = generator.sampling_params.max_generate_length
        if generator.max_turns > 1:
            response = min(response * generator.max_turns, max_model_len(cfg) - prompt)
        elif not generator.max_turns and (generator.agent_program or generator.agent_func_path):
            # An agent has as many turns as the engine has room for.
            response = max_model_len(cfg) - prompt
        return cls(prompt, response, generator.n_samples_per_prompt)

    @property
    def total(self) -> int:
        return self.prompt + self.response


def rows_of_a_rank(cfg: Config, ranks: int) -> int:
    """Rows in an optimizer step of so many ranks that have different rows."""
    prompts = cfg.trainer.policy_mini_batch_size or cfg.trainer.train_batch_size
    return max(1, math.ceil(prompts * cfg.generator.n_samples_per_prompt / ranks))


def batch_bytes(cfg: Config) -> int:
    """A training batch as tensors."""
    lengths = Lengths.of(cfg)
    cell = BYTES_PER_CELL + 2 * FLOAT32 * cfg.trainer.teacher.top_k
    return cfg.trainer.train_batch_size * lengths.samples * lengths.total * cell


def with_fragmentation(lines: Lines) -> Lines:
    transient = lines.get(ACTIVATIONS, 0) + lines.get(LOGITS, 0)
    return lines | {"fragmentation": int(FRAGMENTATION * transient)}


@dataclass(frozen=True)
class EngineMemory:
    """Bytes per device.

    Args:
        least_cache: holds one sequence of full length.
        tokens: that the caches of the engine's devices hold together.
    """

    weights: int
    workspace: int
    cache: int
    least_cache: int
    tokens: int

    @property
    def lines(self) -> Lines:
        cache = max(self.cache, self.least_cache)
        return {"weights": self.weights, "workspace": self.workspace, "cache": cache}


def engine_memory(
    cfg: Config,
    config: EngineConfig,
    shape: ModelShape,
    *,
    fills: bool,
    element_bytes: int,
    device_bytes: int,
) -> EngineMemory:
    """What one device of an engine holds.

    Args:
        fills: its cache takes all memory that it may have.
        element_bytes: of a weight.
        device_bytes: of a GPU, that the engine may take; 0 where there is none.
    """
    parallel = cfg.generator.devices_per_engine
    weights = shape.parameters * element_bytes // parallel
    batched = batched_tokens(config, cpu=not device_bytes) if fills else FORWARD_TOKENS
    # A forward pass over these tokens, one layer at a time, and logits that are sampled from in
    # float32.
    experts = max(1, shape.experts_per_token)
    width = experts * 3 * shape.intermediate // parallel + shape.shared_intermediate
    workspace = batched * (width + 4 * shape.hidden) * element_bytes
    workspace += min(config.max_num_seqs, batched) * shape.vocabulary * 2 * FLOAT32
    # KV heads that are fewer than the devices are there more than once.
    kv_heads = max(1, shape.kv_heads // parallel)
    # Keys and values of each layer.
    token_bytes = 2 * shape.layers * kv_heads * shape.head_dim * element_bytes
    if device_bytes:
        workspace += GRAPHS
        cache = device_bytes - weights - workspace  # vLLM takes what is left of its share
    else:
        cache = int(cfg.generator.kv_cache_gb * GIB)
    if not fills:  # no more than all sequences of full length
        cache = min(cache, config.max_num_seqs * config.max_model_len * token_bytes)
    least_cache = config.max_model_len * token_bytes
    return EngineMemory(weights, workspace, cache, least_cache, max(0, cache) // token_bytes)
