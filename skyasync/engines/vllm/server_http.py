"""The routes of a vLLM server, and its JSON as ours."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from skyasync.engines.http import Begun
from skyasync.engines.protocol import FinishReason, GenerationRequest, SamplingParams

GENERATE = "/inference/v1/generate"
PREFIX = "generate-tokens-"  # that the server puts before the name of a request
DEAD = ("EngineDead", "EngineCore encountered")
ENDS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort", "repetition": "length"}


def cache_share(metrics: str) -> float | None:
    """How much of the cache is taken, by the text of ``/metrics``: the mean of its engines; None if it does not say."""
    found = [float(value) for value in re.findall(r"^vllm:kv_cache_usage_perc\{.*\} (\S+)$", metrics, re.MULTILINE)]
    return sum(found) / len(found) if found else None


def hear(begun: Begun, choice: Mapping[str, Any]) -> None:
    """A piece of an answer."""
    content: Sequence[Mapping[str, Any]] = (choice.get("logprobs") or {}).get("content") or ()
    begun.hear(choice.get("token_ids") or (), [float(each["logprob"]) for each in content])


def body_of(request: GenerationRequest, salt: str) -> dict[str, Any]:
    """A request as the server reads it."""
    return {
        "request_id": request.request_id,
        "token_ids": request.prompt_token_ids.tolist(),
        "sampling_params": sampling_of(request.sampling),
        "cache_salt": salt,
        "stream": True,
    }


def sampling_of(sampling: SamplingParams) -> dict[str, Any]:
    """The fields of vLLM's ``SamplingParams``, with the log-probability of each sampled token."""
    rare: dict[str, Any] = {
        "stop": list(sampling.stop),
        "bad_words": list(sampling.bad_words),
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()},
        "allowed_token_ids": list(sampling.allowed_token_ids),
        "structured_outputs": sampling.structured_outputs,
        "repetition_detection": sampling.repetition_detection,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    return {name: value for name, value in rare.items() if value} | {
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "include_stop_str_in_output": sampling.include_stop_str_in_output,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": sampling.skip_special_tokens,
        "seed": sampling.seed,
        "logprobs": 0,
        "detokenize": bool(sampling.stop),
    }


def scoring_body(sequence: Sequence[int], salt: str) -> dict[str, Any]:
    """For the log-probabilities of a prompt."""
    return {
        "token_ids": [int(token) for token in sequence],
        "sampling_params": {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False},
        "cache_salt": salt,
    }


def prompt_scores(answer: Mapping[str, Any], sequence: Sequence[int]) -> list[float] | None:
    """Of each token after the first; None if the server was cut before it had them."""
    found = answer.get("prompt_logprobs")
    if not found or len(found) != len(sequence):
        return None
    return [float(each[str(int(token))]["logprob"]) for each, token in zip(found[1:], sequence[1:], strict=True)]
