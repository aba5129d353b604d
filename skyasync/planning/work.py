"""How much a rank computes at once, from the settings: every prompt and every response at its longest.

Invariant: the arithmetic of ``skyasync.models.packing``, for a batch whose rows are all alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from skyasync.config.schema import Config
from skyasync.models.limits import MICRO_BATCH_TOKENS, MIN_SAVED_TOKENS
from skyasync.planning.activations import Pass
from skyasync.planning.shape import ModelShape

BYTES_PER_CELL = 40
"""Of a training batch: tokens 8, masks 2, and up to seven numbers per token."""


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


def largest_micro_batch(
    cfg: Config, shape: ModelShape, *, gpus: bool, ranks: int, rows_limit: int, context: int = 1
) -> tuple[Pass, int]:
    """The widest micro-batch of a rank, and how many there are per optimizer step.

    Args:
        ranks: that have rows of their own, each with ``context`` that split them.
    """
    lengths, trainer = Lengths.of(cfg), cfg.trainer
    cap = context * (trainer.micro_batch_tokens or MICRO_BATCH_TOKENS["cuda" if gpus else "cpu"])
    prompts = trainer.policy_mini_batch_size or trainer.train_batch_size
    rows = max(1, math.ceil(prompts * lengths.samples / ranks))
    rings = context > 1 and trainer.parallel.context_kind == "ring"  # whose pieces know no mask
    together = 1 if rings else _rows_sharing_a_prompt(lengths, shape, cap, rows_limit)
    width = lengths.prompt + together * lengths.response
    in_all = math.ceil(rows / together)
    at_once = min(in_all, max(1, cap // width), max(1, rows_limit // together) if rows_limit else in_all)
    tokens, scored = at_once * width, at_once * together * lengths.response
    work = Pass(-(-tokens // context), width, -(-scored // context), masked=together > 1, context=context)
    return work, math.ceil(in_all / at_once)


def _rows_sharing_a_prompt(lengths: Lengths, shape: ModelShape, cap: int, rows_limit: int) -> int:
    """1 where nothing is shared."""
    saved = (lengths.samples - 1) * lengths.prompt / (lengths.samples * lengths.total)
    if not shape.shares_prefixes or saved < MIN_SAVED_TOKENS:
        return 1
    cheapest = int(math.sqrt(lengths.prompt**2 + 6 * shape.hidden * lengths.prompt))
    room = max(1, min(cheapest, cap - lengths.prompt))
    most = min(lengths.samples, rows_limit or lengths.samples)
    return max(1, min(most, math.ceil(room / lengths.response)))


def batch_bytes(cfg: Config, shape: ModelShape) -> int:
    """A training batch as tensors."""
    lengths = Lengths.of(cfg)
    each = BYTES_PER_CELL + expert_bytes(cfg, shape) + 2 * 4 * cfg.trainer.teacher.top_k
    return cfg.trainer.train_batch_size * lengths.samples * lengths.total * each


def expert_bytes(cfg: Config, shape: ModelShape) -> int:
    """Of a token: the experts that are replayed, in every layer."""
    if cfg.trainer.policy.router_replay == "none":
        return 0
    return shape.layers * shape.experts_per_token * (1 if shape.experts <= 255 else 2)  # of experts, else none known
