"""Bytes of a rank, as they were measured, and of one device of an engine, by arithmetic. Nothing
imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from skyasync.config.schema import Config
from skyasync.inference.backends.vllm.setup import batched_tokens
from skyasync.inference.interface import EngineConfig
from skyasync.inference.settings import max_model_len
from skyasync.planning.shape import ModelShape
from skyasync.planning.vllm_report import VLLMReport

FLOAT32 = 4
GIB = 1 << 30

Lines = dict[str, int]
"""Bytes by what takes them."""

WEIGHTS = "weights"
ADAPTERS = "adapters"
OPTIMIZER_STATE = "moments"
GRADIENTS = "gradients"
GATHERED = "gathered"
ACTIVATIONS = "activations"
LOGITS = "logits"
LINES = WEIGHTS, ADAPTERS, OPTIMIZER_STATE, GRADIENTS, GATHERED, ACTIVATIONS, LOGITS
OFFLOADED: dict[str, tuple[str, ...]] = {
    "none": (), "optimizer": (OPTIMIZER_STATE,), "parameters": (WEIGHTS, ADAPTERS, OPTIMIZER_STATE, GRADIENTS),
}  # fmt: skip
"""Of a rank, what ``cpu_offload`` keeps in host memory."""

FRAGMENTATION = 0.15
"""Of what is taken and given back within a step: allocators (C's on a CPU, torch's on a GPU) keep
holes. Measured."""


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
            # an agent has as many turns as there is room for
            response = max_model_len(cfg) - prompt
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
    lengths = Lengths.of(cfg)
    experts = 0
    # those of each layer that are replayed, in a byte or two each
    if cfg.trainer.policy.router_replay != "none":
        experts = shape.layers * shape.experts_per_token * (1 if shape.experts <= 255 else 2)
    each = BYTES_PER_CELL + experts + 2 * 4 * cfg.trainer.teacher.top_k
    return cfg.trainer.train_batch_size * lengths.samples * lengths.total * each


ON_DEVICE = "resident", "scoring", "updating", "stepping", "publishing"
"""Fields of ``RankUse``: what a rank has on its device between two calls, and at the fullest moment
of each."""


@dataclass(frozen=True)
class RankUse:
    """What one rank needs.

    Args:
        resident: between two calls.
        scoring, updating, stepping, publishing: at the fullest moment of a log-probability pass, an
            update, its optimizer step alone, and of a weight sync.
        host: what ``cpu_offload`` keeps in host memory instead.
        gradients: bytes of a shard's, from the backward pass to the step.
        learnt: bytes of the weights that training changes and their optimizer state: what a
            checkpoint holds.
        tokens: of its largest micro-batch.
        micro_batches: per optimizer step.
        flops: floating-point operations of an update.
        sent: bytes of an update by kind of collective.
    """

    resident: Lines
    scoring: Lines
    updating: Lines = field(default_factory=dict)
    stepping: Lines = field(default_factory=dict)
    publishing: Lines = field(default_factory=dict)
    host: Lines = field(default_factory=dict)
    gradients: int = 0
    learnt: int = 0
    tokens: int = 0
    micro_batches: int = 0
    flops: int = 0
    sent: dict[str, int] = field(default_factory=dict)
    checkpointing: bool = False

    @property
    def everywhere(self) -> int:
        """Bytes between two calls, wherever they are."""
        return sum(self.resident.values()) + sum(
            size for what, size in self.host.items() if what != GRADIENTS
        )

    def each(self, function: Callable[[Lines], Lines]) -> RankUse:
        """The use with ``function`` applied to the lines on the device."""
        lines: dict[str, Any] = {name: function(vars(self)[name]) for name in ON_DEVICE}
        return replace(self, **lines)

    def offloaded(self, kind: str) -> RankUse:
        """With ``cpu_offload`` on a GPU: what waits in host memory is not on the device."""
        away = OFFLOADED[kind]
        host = {what: size for what, size in self.resident.items() if what in away}
        if GRADIENTS in away and self.learnt:
            host[GRADIENTS] = self.gradients
        use = self.each(
            lambda lines: {what: size for what, size in lines.items() if what not in away}
        )
        if kind == "optimizer":  # it comes for the step
            updating = max(use.updating, self.stepping, key=lambda lines: sum(lines.values()))
            use = replace(use, updating=updating, stepping=self.stepping)
        return replace(use, host=host)

    def scaled(self, tokens: float, ranks: float) -> RankUse:
        """Roughly with so many times the tokens and ranks: to choose what is worth being
        measured."""
        factors = {ACTIVATIONS: tokens} | dict.fromkeys(OFFLOADED["parameters"], 1 / ranks)

        def scale(lines: Lines) -> Lines:
            return {what: int(size * factors.get(what, 1)) for what, size in lines.items()}

        return replace(
            self.each(scale),
            host=scale(self.host),
            gradients=int(self.gradients / ranks),
            learnt=int(self.learnt / ranks),
            tokens=int(self.tokens * tokens),
        )


def fullest_of(uses: Sequence[RankUse]) -> RankUse:
    """What none of them exceeds in any phase."""
    fullest: dict[str, Any] = {
        name: max((vars(use)[name] for use in uses), key=lambda lines: sum(lines.values()))
        for name in (*ON_DEVICE, "sent")
    }
    return replace(
        uses[0],
        **fullest,
        gradients=max(use.gradients for use in uses),
        learnt=max(use.learnt for use in uses),
        flops=max(use.flops for use in uses),
    )


def with_fragmentation(lines: Lines) -> Lines:
    return lines | {
        "fragmentation": int(FRAGMENTATION * (lines.get(ACTIVATIONS, 0) + lines.get(LOGITS, 0)))
    }


GRAPHS = GIB
"""CUDA graphs and what libraries keep on a GPU, roughly."""

FORWARD_TOKENS = 2048
"""That of the embedded engine (``skyasync.inference.backends.transformers.model``, which imports
torch)."""


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
        return {
            "weights": self.weights,
            "workspace": self.workspace,
            "cache": max(self.cache, self.least_cache),
        }


def engine_memory(
    cfg: Config,
    config: EngineConfig,
    shape: ModelShape,
    vllm: VLLMReport,
    *,
    fills: bool,
    b: int,
    share: int,
) -> EngineMemory:
    """Of one device.

    Args:
        vllm: gives weights and cache, in proportion if it is of other devices; without it they are
            formulas.
        fills: its cache takes all memory that it may have.
        b: bytes of a number.
        share: bytes of a GPU that the engine may take; 0 where there is none.
    """
    parallel = cfg.generator.devices_per_engine
    weights = vllm.weights * vllm.devices // parallel or shape.parameters * b // parallel
    if fills:
        batched = batched_tokens(config, cpu=not share)
    else:
        batched = FORWARD_TOKENS
    # A forward pass over these tokens, one layer at a time, and logits that are sampled from in
    # float32.
    width = (
        shape.experts_per_token or 1
    ) * 3 * shape.intermediate // parallel + shape.shared_intermediate
    logits = min(config.max_num_seqs, batched) * shape.vocabulary * 2 * FLOAT32
    workspace = batched * (width + 4 * shape.hidden) * b + logits + (GRAPHS if share else 0)
    # that are fewer than devices are resident more than once
    kv_heads = max(1, shape.kv_heads // parallel)
    per_token = 2 * shape.layers * kv_heads * shape.head_dim * b
    needed = config.max_num_seqs * config.max_model_len * per_token
    if share:
        space = share - weights - workspace
    else:
        space = int(cfg.generator.kv_cache_gb * GIB)
    cache = min(space, needed) if not fills else space
    least = vllm.least_cache * vllm.devices // parallel or config.max_model_len * per_token
    if vllm.weights:
        tokens = max(0, cache) * vllm.tokens // max(1, vllm.cache)
    else:
        tokens = max(0, cache) // per_token
    return EngineMemory(weights, workspace, cache, least, tokens)
