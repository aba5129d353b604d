"""From prompts to what a generator is asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from skyasync.config.sampling import evaluation
from skyasync.config.schema import GeneratorConfig, SamplingConfig
from skyasync.inference.interface import SamplingParams
from skyasync.rollout.types import GeneratorInput, Prompt, PromptId, TrajectoryId


def request_for(
    prompts: Sequence[Prompt], generator_cfg: GeneratorConfig, *, is_eval: bool = False, samples: int = 0
) -> GeneratorInput:
    """``n_samples_per_prompt`` trajectories per prompt (or as many as an evaluation has, or ``samples``), by groups."""
    cfg = generator_cfg
    count = samples or (cfg.eval_n_samples_per_prompt if is_eval else cfg.n_samples_per_prompt)
    told = {"max_turns": cfg.max_turns} if cfg.max_turns else {}  # environments count by it
    pairs = [(prompt, repetition) for prompt in prompts for repetition in range(count)]
    return {
        "prompts": [prompt.messages for prompt, _ in pairs],
        "env_classes": [prompt.env_class for prompt, _ in pairs],
        "env_extras": [{**prompt.extras, **told} for prompt, _ in pairs],
        "sampling_params": sampling_params(evaluation(cfg) if is_eval else cfg.sampling_params),
        "trajectory_ids": [TrajectoryId(prompt.id, repetition) for prompt, repetition in pairs],
        "is_eval": is_eval,
    }


def eval_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The same prompts, marked as held out in their identity."""
    return [replace(p, id=PromptId(-1, p.id.row)) for p in prompts]


def sampling_params(cfg: SamplingConfig) -> SamplingParams:
    return SamplingParams(
        max_tokens=cfg.max_generate_length,
        min_tokens=cfg.min_tokens,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k,
        min_p=cfg.min_p,
        presence_penalty=cfg.presence_penalty,
        frequency_penalty=cfg.frequency_penalty,
        repetition_penalty=cfg.repetition_penalty,
        stop=tuple(cfg.stop),
        stop_token_ids=tuple(cfg.stop_token_ids),
        include_stop_str_in_output=cfg.include_stop_str_in_output,
        ignore_eos=cfg.ignore_eos,
        bad_words=tuple(cfg.bad_words),
        logit_bias={int(token): float(bias) for token, bias in cfg.logit_bias.items()},
        allowed_token_ids=tuple(cfg.allowed_token_ids),
        skip_special_tokens=cfg.skip_special_tokens,
        seed=None if cfg.seed < 0 else cfg.seed,
        structured_outputs=dict(cfg.structured_outputs),
        repetition_detection=dict(cfg.repetition_detection),
    )


def request_seed(seed: int | None, request_id: str) -> int | None:
    """The seed of one request: samples of a prompt must differ, and each is the same in every run."""
    if seed is None:
        return None
    return int.from_bytes(hashlib.blake2b(f"{seed} {request_id}".encode(), digest_size=7).digest(), "little")
