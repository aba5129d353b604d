"""The JSON of an SGLang server as ours, by its own ``io_struct.py`` and ``http_server.py`` (0.5.23).

Its log-probabilities are of the tempered distribution, after penalties and biases, and before top-k, top-p and min-p:
those are refused here, as is what it has no word for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyasync.engines.http import Begun
from skyasync.engines.protocol import ENGINES, FinishReason, GenerationRequest, SamplingParams
from skyasync.errors import UserError

GENERATE = "/generate"
INTERVAL = 16  # tokens of a piece of an answer
ENDS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_OFF = SamplingParams()


def body_of(request: GenerationRequest, name: str, salt: str) -> dict[str, Any]:
    """A request as the server reads it.

    Args:
        name: that it has at the server, which must not have heard it before.
    """
    return {
        "rid": name,
        "input_ids": request.prompt_token_ids.tolist(),
        "sampling_params": sampling_of(request.sampling),
        "return_logprob": True,
        "extra_key": salt,
        "stream": True,
    }


def sampling_of(sampling: SamplingParams) -> dict[str, Any]:
    """The fields of SGLang's ``SamplingParams``.

    Raises:
        UserError: naming what it lacks.
    """
    for name in ENGINES.about("sglang_server").can["lacks"]:
        if getattr(sampling, name) != getattr(_OFF, name) and not (name == "top_k" and sampling.top_k <= 0):
            raise UserError(
                f"{name}={getattr(sampling, name)!r} is not for SGLang servers: they do not have it, or their "
                f"log-probabilities are of the distribution before it; remove it"
            )
    rare: dict[str, Any] = {
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()},
    }
    return {name: value for name, value in rare.items() if value} | {
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": sampling.skip_special_tokens,
        "sampling_seed": None if sampling.seed is None else sampling.seed % 2**31,
        "stream_interval": INTERVAL,
    }


def hear(begun: Begun, chunk: Mapping[str, Any]) -> None:
    """A piece of an answer, which repeats what was told before unless the server was started otherwise."""
    about = chunk["meta_info"]
    new = int(about["completion_tokens"]) - len(begun.tokens)
    if new <= 0:
        return
    found: Sequence[Sequence[Any]] = (about.get("output_token_logprobs") or ())[-new:]
    if len(found) != new:
        raise RuntimeError(f"{new} tokens of {begun.request.request_id} have {len(found)} log-probabilities")
    begun.hear([int(each[1]) for each in found], [float(each[0]) for each in found])


def scoring_body(sequence: Sequence[int], name: str, salt: str) -> dict[str, Any]:
    """For the log-probabilities of a prompt."""
    return {
        "rid": name,
        "input_ids": [int(token) for token in sequence],
        "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "extra_key": salt,
    }


def prompt_scores(answer: Mapping[str, Any], sequence: Sequence[int]) -> list[float] | None:
    """Of each token after the first; None if the server was cut before it had them."""
    about = answer["meta_info"]
    found = about.get("input_token_logprobs") or ()
    if (about.get("finish_reason") or {}).get("type") == "abort" or len(found) != len(sequence):
        return None
    return [float(each[0]) for each in found[1:]]
