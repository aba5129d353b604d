"""The answer to a request is bitwise independent of the other requests in its batch and of their arrival times."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from skyasync.inference.backends.transformers.decoder import Decoder, DecodingRow
from skyasync.inference.backends.transformers.model import (
    COLUMNS,
    ENOUGH_ROWS,
    ROWS,
    EmbeddedModel,
    even_columns,
    even_rows,
)
from skyasync.inference.backends.transformers.sampling import stream_key
from skyasync.inference.interface import EngineConfig, GenerationRequest, SamplingParams
from tests.inference.tiny_llama import save_tiny_llama

PROMPTS, SAMPLES = 5, 4
Answers = list[tuple[list[int], list[float]]]


@given(st.integers(1, 10_000))
def test_sizes_are_rounded_up_where_they_are_odd(size: int) -> None:
    assert size <= even_rows(size) < size + ROWS and (
        size >= ENOUGH_ROWS or even_rows(size) % ROWS == 0
    )
    assert size <= even_columns(size) < size + COLUMNS and even_columns(size) % COLUMNS == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> EmbeddedModel:
    return EmbeddedModel(
        EngineConfig(model_path=save_tiny_llama(Path(tmp_path_factory.mktemp("model")), tied=True))
    )


@pytest.fixture(params=[1, 2], scope="module")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def together(model: EmbeddedModel, threads: int) -> Answers:
    return answers(model, [])


def requests() -> list[DecodingRow]:
    """Requests with prompts of 4 to 19 tokens and as many different response lengths."""
    draw, rows = np.random.default_rng(1), []
    for prompt in range(PROMPTS):
        tokens = draw.integers(5, 30, size=draw.integers(4, 20))
        for sample in range(SAMPLES):
            limit = 5 + (prompt + 3 * sample) % 7
            asked = GenerationRequest(
                f"{prompt}-{sample}", tokens, SamplingParams(max_tokens=limit)
            )
            key = stream_key(None, 0, asked.request_id)
            rows.append(
                DecodingRow(asked, tokens.tolist(), key=key, limit=limit, stop_ids=frozenset())
            )
    return rows


def answers(model: EmbeddedModel, arrivals: list[int]) -> Answers:
    """Outputs of all requests; ``arriving`` requests are added before each step, the rest before the next one."""
    decoder = Decoder(model, version=0, max_num_seqs=64, cache_bytes=1 << 26)
    rows, numbers = requests(), iter(arrivals)
    to_come = list(rows)
    while to_come or decoder.busy:
        for _ in range(min(len(to_come), next(numbers, len(to_come)))):
            decoder.waiting.append(to_come.pop(0))
        if decoder.busy:
            decoder.step()
    outputs = [row.output() for row in rows]
    return [(output.token_ids.tolist(), output.logprobs.tolist()) for output in outputs]


@settings(max_examples=15, deadline=None)
@given(arrivals=st.lists(st.integers(0, 7), max_size=20))
def test_answers_do_not_depend_on_who_else_is_there(
    model: EmbeddedModel, together: Answers, arrivals: list[int]
) -> None:
    assert answers(model, arrivals) == together


def test_a_prompt_may_fill_the_models_positions(tmp_path: Path) -> None:
    GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=20, n_embd=8, n_layer=1, n_head=2)
    ).save_pretrained(tmp_path)
    model = EmbeddedModel(EngineConfig(model_path=str(tmp_path), max_model_len=20))
    with torch.inference_mode():
        logits, *_ = model.prefill([[1] * 19])
    assert logits.shape == (1, 32)
    assert len(model.score([[1] * 20])[0]) == 19
