"""Bytes of a rank, as they were measured, and of one device of an engine, by arithmetic. Nothing imports torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from skyasync.config.schema import Config
from skyasync.inference.backends.vllm.setup import MIN_BATCHED_TOKENS
from skyasync.inference.interface import EngineConfig
from skyasync.planning.shape import ModelShape

FLOAT32 = 4
GIB = 1 << 30

Lines = dict[str, int]
"""Bytes by what takes them."""

WEIGHTS, OPTIMIZER, GRADIENTS, GATHERED = "weights", "optimizer state", "gradients", "gathered"
ACTIVATIONS, TEMPORARY = "activations", "temporary"

FRAGMENTATION = 0.15
"""Of what is taken and given back within a step: allocators (C's on a CPU, torch's on a GPU) keep holes. Measured."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of the longest prompt and of the longest rest of an episode, and samples per prompt."""

    prompt: int
    response: int
    samples: int

    @classmethod
    def of(cls, cfg: Config) -> Lengths:
        generator, prompt = cfg.generator, cfg.trainer.max_prompt_length
        response = generator.sampling_params.max_generate_length * (generator.max_turns or 1)
        if generator.max_model_len:
            response = min(response, generator.max_model_len - prompt)
        return cls(prompt, response, generator.n_samples_per_prompt)

    @property
    def total(self) -> int:
        return self.prompt + self.response


def rows_of_a_rank(cfg: Config, ranks: int) -> int:
    """In an optimizer step of so many ranks with rows of their own."""
    prompts = cfg.trainer.policy_mini_batch_size or cfg.trainer.train_batch_size
    return max(1, math.ceil(prompts * cfg.generator.n_samples_per_prompt / ranks))


BYTES_PER_CELL = 40
"""Of a training batch: tokens 8, masks 2, and up to seven numbers per token."""


def batch_bytes(cfg: Config, shape: ModelShape) -> int:
    """A training batch as tensors."""
    lengths, experts = Lengths.of(cfg), 0
    if cfg.trainer.policy.router_replay != "none":  # those of each layer that are replayed, in a byte or two each
        experts = shape.layers * shape.experts_per_token * (1 if shape.experts <= 255 else 2)
    each = BYTES_PER_CELL + experts + 2 * 4 * cfg.trainer.teacher.top_k
    return cfg.trainer.train_batch_size * lengths.samples * lengths.total * each


@dataclass(frozen=True)
class RankUse:
    """What one rank needs.

    Args:
        held: between two calls.
        scoring, updating, stepping, publishing: at the fullest moment of a log-probability pass, an update, its
            optimizer step alone, and of a weight sync.
        gradients: of a shard, from the backward pass to the step.
        trained: of the weights that training changes.
        learnt: these and the optimizer state: what a checkpoint holds.
        tokens: of its largest micro-batch.
        micro_batches: per optimizer step.
        flops: floating-point operations of an update.
        sent: bytes of an update by kind of collective.
    """

    held: Lines
    scoring: Lines
    updating: Lines = field(default_factory=dict)
    stepping: Lines = field(default_factory=dict)
    publishing: Lines = field(default_factory=dict)
    gradients: int = 0
    trained: int = 0
    learnt: int = 0
    tokens: int = 0
    micro_batches: int = 0
    flops: int = 0
    sent: dict[str, int] = field(default_factory=dict)
    checkpointing: bool = False

    def offloaded(self, kind: str) -> RankUse:
        """With ``cpu_offload``: what waits in host memory is not on the device."""
        away = {"none": (), "optimizer": (OPTIMIZER,), "parameters": (WEIGHTS, OPTIMIZER, GRADIENTS)}[kind]
        if not away:
            return self

        def here(lines: Lines) -> Lines:
            return {what: size for what, size in lines.items() if what not in away}

        updating = here(self.updating)
        if kind == "optimizer":  # it comes for the step
            updating = max(updating, self.stepping, key=lambda lines: sum(lines.values()))
        return replace(
            self, held=here(self.held), scoring=here(self.scoring), updating=updating, publishing=here(self.publishing)
        )

    def on_host(self, kind: str) -> Lines:
        """What ``cpu_offload`` puts there, for one rank."""
        away = {"none": (), "optimizer": (OPTIMIZER,), "parameters": (WEIGHTS, OPTIMIZER)}[kind]
        lines = {f"{what} on the host": size for what, size in self.held.items() if what in away}
        return lines | ({f"{GRADIENTS} on the host": self.gradients} if kind == "parameters" and self.learnt else {})

    def scaled(self, tokens: float, ranks: float) -> RankUse:
        """Roughly with so many times the tokens and ranks: to choose what is worth being measured."""
        factors = {ACTIVATIONS: tokens, TEMPORARY: tokens} | dict.fromkeys((WEIGHTS, OPTIMIZER, GRADIENTS), 1 / ranks)

        def lines(found: Lines) -> Lines:
            return {what: int(size * factors.get(what, 1)) for what, size in found.items()}

        return replace(
            self, held=lines(self.held), scoring=lines(self.scoring), updating=lines(self.updating),
            stepping=lines(self.stepping), publishing=lines(self.publishing), gradients=int(self.gradients / ranks),
            trained=int(self.trained / ranks), learnt=int(self.learnt / ranks), tokens=int(self.tokens * tokens),
        )  # fmt: skip


def with_holes(lines: Lines) -> Lines:
    return lines | {"fragmentation": int(FRAGMENTATION * sum(lines.get(what, 0) for what in (ACTIVATIONS, TEMPORARY)))}


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
