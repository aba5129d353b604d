"""The embedded engine with a real model and its real thread; every reference is a plain forward pass."""

from __future__ import annotations

import asyncio
import functools
import re
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from skyasync.algorithms.sampled import SampledDistribution
from skyasync.config.schema import SamplingConfig
from skyasync.errors import UserError
from skyasync.inference.backends.transformers.decoder import DecodingRow
from skyasync.inference.backends.transformers.engine import TransformersEngine
from skyasync.inference.backends.transformers.sampling import BatchSampler, keep_likely
from skyasync.inference.interface import (
    ENGINES,
    EngineConfig,
    GenerationRequest,
    SamplingParams,
)
from skyasync.models.packing import plain_layout
from skyasync.models.token_model import TokenModel
from skyasync.rollout.generator_api import sampling_params
from skyasync.weight_sync.transfers.file import remove_weights, write_weights
from skyasync.weight_sync.update import WeightUpdate
from tests.inference.output_lists import Listed, listed
from tests.inference.tiny_llama import EOS, VOCABULARY, save_tiny_llama

pytestmark = pytest.mark.slow

ENDLESS = SamplingParams(max_tokens=150, ignore_eos=True)


@asynccontextmanager
async def engine_of(model_path: str, **settings: int) -> AsyncIterator[TransformersEngine]:
    engine = ENGINES["transformers"](
        EngineConfig(model_path, threads=1, max_model_len=200, **settings)
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.shutdown()


@pytest.fixture
async def engine(untied_model: str) -> AsyncIterator[TransformersEngine]:
    async with engine_of(untied_model) as engine:
        yield engine


def prompt(i: int) -> list[int]:
    """Prompts of 1 to 23 tokens; every third is one of two, as in groups of samples."""
    return [(7 * i + j) % 256 for j in range(1 + i % 23)] if i % 3 else [40 + i % 2] * 9


def requests(count: int, sampling: SamplingParams, tag: str = "r") -> list[GenerationRequest]:
    return [GenerationRequest(f"{tag}{i}", prompt(i), sampling) for i in range(count)]


async def answers(engine: TransformersEngine, asked: Sequence[GenerationRequest]) -> list[Listed]:
    """The outputs in the order of the requests; each request has exactly one."""
    found: dict[str, Listed] = {}
    async for outputs in engine.generate(asked):
        for output in outputs:
            assert output.request_id not in found
            found[output.request_id] = listed(output)
    return [found[request.request_id] for request in asked]


async def tokens_to_flow(engine: TransformersEngine, more: int) -> None:
    """Return when the engine has generated ``more`` further tokens; it answers commands between any two tokens."""
    goal = (await engine.stats()).generated_tokens + more
    async with asyncio.timeout(60):
        while (await engine.stats()).generated_tokens < goal:
            await engine.abort([])


@functools.cache
def _loaded(model_path: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)


def forward(model_path: str, tokens: list[int]) -> torch.Tensor:
    """Logits ``[length, vocabulary]`` of a plain pass over one sequence."""
    with torch.no_grad():
        return _loaded(model_path)(torch.tensor([tokens])).logits[0]


def expected_logprobs(
    model_path: str,
    asked: GenerationRequest,
    output: Listed,
    warp: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits,
) -> torch.Tensor:
    """Log-probabilities ``[response]`` of the output's tokens by a plain pass."""
    logits = forward(model_path, [*asked.prompt_token_ids, *output.token_ids])[
        len(asked.prompt_token_ids) - 1 : -1
    ]
    return warp(logits).log_softmax(-1).gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]


def weights_of(model_path: str) -> dict[str, torch.Tensor]:
    """The weights as a trainer publishes them: each tensor once."""
    return dict(
        AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).named_parameters()
    )


@asynccontextmanager
async def published(weights: dict[str, torch.Tensor], version: int) -> AsyncIterator[WeightUpdate]:
    path = write_weights({name: weight.detach() for name, weight in weights.items()})
    yield WeightUpdate(version, "shared_memory", {"path": path})
    remove_weights(path)


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.7, 0.9)])
async def test_logprobs_are_those_of_a_plain_forward_pass(
    engine: TransformersEngine, untied_model: str, temperature: float, top_p: float
) -> None:
    asked = requests(24, SamplingParams(max_tokens=20, temperature=temperature, top_p=top_p))

    def warp(logits: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(len(logits))
        return keep_likely(
            logits / temperature,
            torch.zeros(len(logits), dtype=torch.int64),
            top_p * ones,
            0 * ones,
        )

    for request, output in zip(asked, await answers(engine, asked), strict=True):
        assert 1 <= len(output.token_ids) == len(output.logprobs) == len(output.versions) <= 20
        gap = torch.tensor(output.logprobs) - expected_logprobs(untied_model, request, output, warp)
        assert gap.abs().max() < 1e-5


def reference_logprobs(model_path: str, asked: GenerationRequest, output: Listed) -> torch.Tensor:
    """Log-probabilities of the output's tokens by a plain pass and transformers' own processors, token by token."""
    sampling, tokens, found = asked.sampling, asked.prompt_token_ids.tolist(), []
    processors = [RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)]
    processors += [
        SequenceBiasLogitsProcessor([[[t], bias] for t, bias in sampling.logit_bias.items()])
    ]
    warpers = [TemperatureLogitsWarper(sampling.temperature), TopPLogitsWarper(sampling.top_p)]
    logits = forward(model_path, tokens + output.token_ids)
    for i, token in enumerate(output.token_ids):
        scores = logits[None, len(tokens) - 1].clone()
        if sampling.allowed_token_ids:
            barred = torch.ones(VOCABULARY, dtype=torch.bool)
            barred[list(sampling.allowed_token_ids)] = False
            scores[:, barred] = -torch.inf
        for processor in reversed(processors):
            scores = processor(torch.tensor([tokens]), scores)
        counts = torch.bincount(
            torch.tensor(output.token_ids[:i], dtype=torch.int64), minlength=VOCABULARY
        )
        scores -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
        for warper in warpers:
            scores = warper(torch.tensor([tokens]), scores)
        found.append(scores.log_softmax(-1)[0, token])
        tokens.append(token)
    return torch.stack(found)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=12, temperature=0.7, top_p=0.9, repetition_penalty=1.3, logit_bias={7: 2.0}),
        SamplingParams(max_tokens=12, frequency_penalty=0.8, presence_penalty=-0.5, logit_bias={9: -3.0, 8: 4.0}),
        SamplingParams(max_tokens=12, temperature=1.3, top_p=0.8, allowed_token_ids=(*range(60), EOS), ignore_eos=True,
                       logit_bias={4: 1.0}, frequency_penalty=0.3),
    ],
)  # fmt: skip
async def test_logprobs_after_all_edits_are_those_of_transformers_own_processors(
    engine: TransformersEngine, untied_model: str, sampling: SamplingParams
) -> None:
    asked = requests(5, sampling)
    for request, output in zip(asked, await answers(engine, asked), strict=True):
        gap = torch.tensor(output.logprobs) - reference_logprobs(untied_model, request, output)
        assert gap.abs().max() < 1e-4


async def test_the_trainers_logprobs_of_filtered_samples_are_the_engines(
    engine: TransformersEngine, untied_model: str
) -> None:
    """For equal weights the ratio of trainer to behaviour policy is 1, whatever the sampling filters excluded."""
    settings = SamplingConfig(
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        min_p=0.02,
        logit_bias={"5": 1.5},
        allowed_token_ids=[*range(100), EOS],
    )
    model = TokenModel(AutoModelForCausalLM.from_pretrained(untied_model, dtype=torch.float32),
                          SampledDistribution.of(settings))  # fmt: skip
    asked = requests(12, replace(sampling_params(settings), max_tokens=16))
    for request, output in zip(asked, await answers(engine, asked), strict=True):
        tokens = torch.tensor([[*request.prompt_token_ids, *output.token_ids]])
        mask = torch.arange(tokens.shape[1])[None] >= len(request.prompt_token_ids)
        with torch.no_grad():
            found = model(plain_layout(tokens, torch.ones_like(mask), mask))["logprobs"][mask]
        assert (torch.tensor(output.logprobs) - found).abs().max() < 1e-5


async def test_bad_words_do_not_come(engine: TransformersEngine) -> None:
    tokenizer = engine._model.tokenizer
    assert tokenizer is not None
    plain = SamplingParams(max_tokens=30, ignore_eos=True)
    free = [
        tokenizer.decode(output.token_ids) for output in await answers(engine, requests(8, plain))
    ]
    word = free[0][3:5]
    barred = replace(plain, bad_words=(word, free[1][0]))
    texts = [
        tokenizer.decode(output.token_ids)
        for output in await answers(engine, requests(8, barred, "b"))
    ]
    assert any(word in text for text in free) and not any(
        word in text or free[1][0] in text for text in texts
    )


@pytest.mark.parametrize(("settings", "message"), [
    ({"logit_bias": {VOCABULARY: 1.0}}, "logit_bias has tokens from 260 to 260, the model's vocabulary has 260"),
    ({"allowed_token_ids": (1, 999)}, "allowed_token_ids has tokens from 1 to 999"),
    ({"structured_outputs": {"regex": "a"}}, "need generator.backend=vllm"),
])  # fmt: skip
async def test_what_the_engine_cannot_do_is_refused_by_name(
    engine: TransformersEngine, settings: dict[str, object], message: str
) -> None:
    (refused,) = await answers(engine, requests(1, SamplingParams(**settings)))  # type: ignore[arg-type]
    assert refused.finish_reason == "error"
    assert re.search(message, refused.error)


async def test_greedy_is_that_of_transformers(
    engine: TransformersEngine, untied_model: str
) -> None:
    asked = requests(6, SamplingParams(max_tokens=16, temperature=0.0))
    model = AutoModelForCausalLM.from_pretrained(untied_model, dtype=torch.float32)
    for request, output in zip(asked, await answers(engine, asked), strict=True):
        tokens = torch.tensor([request.prompt_token_ids.tolist()])
        reference = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=16
        )
        assert output.token_ids == reference[0, tokens.shape[1] :].tolist()


async def test_a_request_gets_the_same_tokens_alone_and_in_a_crowd(
    engine: TransformersEngine,
) -> None:
    asked = requests(64, SamplingParams(max_tokens=24, temperature=0.9))
    crowd = await answers(engine, asked)
    assert len({tuple(output.token_ids) for output in crowd}) > 32
    for i in (0, 5, 33, 63):
        (alone,) = await answers(engine, [asked[i]])
        assert alone.token_ids == crowd[i].token_ids
        assert alone.logprobs == pytest.approx(crowd[i].logprobs, abs=1e-5)


async def test_few_slots_and_a_small_cache_change_nothing_but_the_time(untied_model: str) -> None:
    asked = requests(40, SamplingParams(max_tokens=12))
    async with engine_of(untied_model) as wide, engine_of(untied_model, max_num_seqs=3) as narrow:
        expected = [output.token_ids for output in await answers(wide, asked)]
        assert [output.token_ids for output in await answers(narrow, asked)] == expected
    tight = ENGINES["transformers"](EngineConfig(untied_model, threads=1, kv_cache_gb=1e-5))
    await tight.start()
    assert [output.token_ids for output in await answers(tight, asked)] == expected
    await tight.shutdown()


async def test_requests_join_while_others_run(engine: TransformersEngine) -> None:
    long = asyncio.create_task(answers(engine, requests(4, ENDLESS, "long")))
    await tokens_to_flow(engine, 40)
    short = await answers(engine, requests(20, SamplingParams(max_tokens=3), "short"))
    assert not long.done()
    assert all(output.finish_reason for output in short)
    for output in await long:
        assert (len(output.token_ids), output.finish_reason) == (150, "length")


async def test_a_response_ends_at_a_stop_token_or_the_limit(engine: TransformersEngine) -> None:
    free = SamplingParams(max_tokens=40, seed=11, ignore_eos=True)
    (whole,) = await answers(engine, [GenerationRequest("free", [1, 2, 3], free)])
    stop = whole.token_ids[10]
    by_token, by_limit = await answers(
        engine,
        [
            GenerationRequest("token", [1, 2, 3], replace(free, stop_token_ids=(stop,))),
            GenerationRequest("limit", [1, 2, 3], replace(free, max_tokens=7)),
        ],
    )
    assert (by_token.token_ids, by_token.finish_reason) == (
        whole.token_ids[: whole.token_ids.index(stop) + 1],
        "stop",
    )
    assert (by_limit.token_ids, by_limit.finish_reason) == (whole.token_ids[:7], "length")


async def test_eos_ends_a_response_and_min_tokens_forbids_it(engine: TransformersEngine) -> None:
    asked = requests(64, SamplingParams(max_tokens=60, temperature=2.0))
    ended = [output for output in await answers(engine, asked) if output.finish_reason == "stop"]
    assert ended
    assert all(output.token_ids.index(EOS) == len(output.token_ids) - 1 for output in ended)
    later = await answers(
        engine, requests(64, SamplingParams(max_tokens=60, min_tokens=30, temperature=2.0))
    )
    assert all(EOS not in output.token_ids[:30] and len(output.token_ids) >= 30 for output in later)
    assert any(output.finish_reason == "stop" for output in later)


async def test_a_stop_string_over_several_tokens_ends_a_response(
    engine: TransformersEngine, untied_model: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(untied_model)
    ascii_only = [
        GenerationRequest(f"s{i}", [i + 1], SamplingParams(max_tokens=80, ignore_eos=True))
        for i in range(64)
    ]
    for request, output in zip(ascii_only, await answers(engine, ascii_only), strict=True):
        texts = [
            tokenizer.decode(output.token_ids[: n + 1], skip_special_tokens=True) for n in range(80)
        ]
        strings = {texts[n][-3:] for n in range(20, 80) if "\ufffd" not in texts[n][-4:]}
        if not strings:
            continue
        stop = min(strings)
        first = next(n for n in range(80) if stop in texts[n])
        sampling = SamplingParams(max_tokens=80, ignore_eos=True, stop=(stop,))
        (stopped,) = await answers(
            engine, [GenerationRequest(request.request_id, request.prompt_token_ids, sampling)]
        )
        assert (stopped.token_ids, stopped.finish_reason) == (output.token_ids[: first + 1], "stop")
        return
    raise AssertionError("no response holds three plain characters in a row")


async def test_a_response_ends_at_max_model_len(engine: TransformersEngine) -> None:
    (output,) = await answers(engine, [GenerationRequest("r", [5] * 180, ENDLESS)])
    assert (len(output.token_ids), output.finish_reason) == (20, "length")


@pytest.mark.parametrize(
    "request_, message",
    [
        (GenerationRequest("empty", [], SamplingParams()), "'empty'.*prompt is empty"),
        (
            GenerationRequest("long", [1] * 200, SamplingParams()),
            "'long'.*200 tokens.*max_model_len is 200",
        ),
        (
            GenerationRequest("alien", [3, VOCABULARY], SamplingParams()),
            "'alien'.*from 3 to 260.*vocabulary has 260",
        ),
        (
            GenerationRequest("stop", [1], SamplingParams(stop_token_ids=(10**9,), min_tokens=2)),
            "'stop'.*stop_token_ids",
        ),
    ],
)
async def test_a_request_that_cannot_be_answered_is_refused_by_name_and_the_others_are_answered(
    engine: TransformersEngine, request_: GenerationRequest, message: str
) -> None:
    good, bad = await answers(engine, [GenerationRequest("good", [1], SamplingParams()), request_])
    assert good.finish_reason in ("stop", "length")
    assert bad.finish_reason == "error"
    assert re.search(message, bad.error)
    assert len(bad.token_ids) == 0


async def test_two_unanswered_requests_may_not_share_an_id(engine: TransformersEngine) -> None:
    with pytest.raises(UserError, match="'r0'"):
        await answers(engine, [*requests(1, ENDLESS), *requests(1, ENDLESS)])


async def test_an_in_flight_weight_update_loses_no_token_and_every_token_has_its_version(
    untied_model: str, tmp_path_factory
) -> None:
    """After an update that keeps the KV cache, a pass with the old weights' cache gives the same log-probabilities."""
    other = save_tiny_llama(tmp_path_factory.mktemp("other"), tied=False, seed=1)
    asked = requests(64, SamplingParams(max_tokens=120, ignore_eos=True))
    async with (
        engine_of(untied_model, version=3) as engine,
        published(weights_of(other), 4) as update,
    ):
        running = asyncio.create_task(answers(engine, asked))
        await tokens_to_flow(engine, 64 * 10)
        await engine.pause("keep")
        before = (await engine.stats()).generated_tokens
        await engine.update_weights(update)
        assert (await engine.stats()).generated_tokens == before
        await engine.resume()
        outputs = await running
    assert sum(output.versions.count(3) for output in outputs) == before
    old, new = (
        AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in (untied_model, other)
    )
    for number, (request, output) in enumerate(zip(asked, outputs, strict=True)):
        before_update = output.versions.count(3)
        assert (
            output.versions == [3] * before_update + [4] * (120 - before_update)
            and 0 < before_update < 120
        )
        if number % 4:
            continue  # the passes below take long
        tokens = torch.tensor([[*request.prompt_token_ids, *output.token_ids]])
        start = tokens.shape[1] - 120
        with torch.no_grad():
            # The newest token before the update was sampled but not yet computed: the new weights compute it.
            first = old(tokens[:, : start + before_update - 1], use_cache=True)
            second = new(
                tokens[:, start + before_update - 1 : -1], past_key_values=first.past_key_values
            )
        logits = torch.cat([first.logits[0, start - 1 :], second.logits[0]])
        expected = logits.log_softmax(-1).gather(1, tokens[0, start:, None])[:, 0]
        assert (torch.tensor(output.logprobs) - expected).abs().max() < 2e-5


async def test_a_weight_update_needs_no_pause(untied_model: str, tmp_path_factory) -> None:
    other = save_tiny_llama(tmp_path_factory.mktemp("other"), tied=False, seed=1)
    async with engine_of(untied_model) as engine, published(weights_of(other), 1) as update:
        running = asyncio.create_task(answers(engine, requests(8, ENDLESS)))
        await tokens_to_flow(engine, 80)
        await engine.update_weights(update)
        for output in await running:
            assert output.versions == sorted(output.versions) and set(output.versions) == {0, 1}


@pytest.mark.parametrize("tied", [True, False])
async def test_an_update_equals_a_fresh_model_with_these_weights(
    tied: bool, tied_model: str, untied_model: str, tmp_path_factory
) -> None:
    other = save_tiny_llama(tmp_path_factory.mktemp("other"), tied=tied, seed=2)
    sequence = list(range(1, 60))
    async with (
        engine_of(tied_model if tied else untied_model) as engine,
        published(weights_of(other), 1) as update,
    ):
        before = (await engine.score([sequence]))[0]
        await engine.update_weights(update)
        after = (await engine.score([sequence]))[0]
    reference = (
        forward(other, sequence)[:-1]
        .log_softmax(-1)
        .gather(1, torch.tensor(sequence)[1:, None])[:, 0]
    )
    assert (torch.tensor(after) - reference).abs().max() < 1e-5
    assert (torch.tensor(before) - reference).abs().max() > 0.1


async def test_a_wrong_update_is_refused_by_name_and_changes_nothing(
    engine: TransformersEngine, untied_model: str
) -> None:
    before = await engine.score([[1, 2, 3]])
    good = {name: weight + 1 for name, weight in weights_of(untied_model).items()}
    renamed = {**good, "model.extra": torch.zeros(1)}
    del renamed["model.norm.weight"]
    reshaped = {**good, "model.norm.weight": torch.zeros(7)}
    for weights, message in (
        (renamed, r"missing \['model.norm.weight'\], unexpected \['model.extra'\]"),
        (reshaped, r"model.norm.weight is \[7\], not \[32\]"),
    ):
        async with published(weights, 1) as update:
            with pytest.raises(UserError, match=message):
                await engine.update_weights(update)
    with pytest.raises(UserError, match="shared_memory"):
        await engine.update_weights(WeightUpdate(1, "nccl", {}))
    assert await engine.score([[1, 2, 3]]) == before
    (output,) = await answers(engine, requests(1, SamplingParams(max_tokens=2, ignore_eos=True)))
    assert output.versions == [0, 0]


async def test_score_is_a_plain_forward_pass_also_while_paused(
    engine: TransformersEngine, untied_model: str
) -> None:
    sequences = [[(3 * i + j * j) % VOCABULARY for j in range(1 + 5 * i)] for i in range(9)]
    await engine.pause()
    scores = await engine.score(sequences)
    assert scores[0] == []
    for sequence, scored in zip(sequences[1:], scores[1:], strict=True):
        logprobs = forward(untied_model, sequence)[:-1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(sequence)[1:, None])[:, 0]
        assert len(scored) == len(sequence) - 1
        assert (torch.tensor(scored) - expected).abs().max() < 1e-5


async def test_a_paused_engine_accepts_requests_and_starts_them_after_resume(
    engine: TransformersEngine,
) -> None:
    await engine.pause()
    running = asyncio.create_task(
        answers(engine, requests(3, SamplingParams(max_tokens=4, ignore_eos=True)))
    )
    while (await engine.stats()).waiting < 3:
        await engine.abort([])  # so that the thread has time for a wrong step
    assert (await engine.stats()).generated_tokens == 0
    await engine.resume()
    assert [len(output.token_ids) for output in await running] == [4, 4, 4]


async def test_pause_abort_returns_what_there_is(engine: TransformersEngine) -> None:
    running = asyncio.create_task(answers(engine, requests(16, ENDLESS)))
    await tokens_to_flow(engine, 160)
    await engine.pause("abort")
    outputs = await running
    assert {output.finish_reason for output in outputs} == {"abort"}
    assert all(0 < len(o.token_ids) == len(o.logprobs) == len(o.versions) < 150 for o in outputs)
    assert (
        sum(len(output.token_ids) for output in outputs) == (await engine.stats()).generated_tokens
    )


async def test_pause_wait_drains_and_holds_back_the_new(engine: TransformersEngine) -> None:
    running = asyncio.create_task(
        answers(engine, requests(8, SamplingParams(max_tokens=100, ignore_eos=True)))
    )
    await tokens_to_flow(engine, 16)
    pausing = asyncio.create_task(engine.pause("wait"))
    await asyncio.sleep(0)
    late = asyncio.create_task(answers(engine, requests(2, SamplingParams(max_tokens=2), "late")))
    await pausing
    assert [len(output.token_ids) for output in await running] == [100] * 8
    stats = await engine.stats()
    assert (stats.generated_tokens, stats.running, stats.waiting) == (800, 0, 2)
    await engine.resume()
    assert len(await late) == 2


async def test_abort_ends_the_named_requests_only(engine: TransformersEngine) -> None:
    running = asyncio.create_task(answers(engine, requests(6, ENDLESS)))
    await tokens_to_flow(engine, 30)
    await engine.abort(["r1", "r4", "unknown"])
    reasons = [output.finish_reason for output in await running]
    assert reasons == ["length", "abort", "length", "length", "abort", "length"]


async def test_an_abort_leaves_the_others_as_they_would_have_been(
    engine: TransformersEngine,
) -> None:
    asked = requests(6, ENDLESS)
    undisturbed = await answers(engine, asked)
    running = asyncio.create_task(answers(engine, asked))
    await tokens_to_flow(engine, 300)
    await engine.abort(["r0", "r2"])
    for i, output in enumerate(await running):
        assert output.token_ids == undisturbed[i].token_ids[: len(output.token_ids)]


async def test_abandoned_requests_are_aborted(engine: TransformersEngine) -> None:
    outputs = engine.generate([GenerationRequest("left", [1], ENDLESS)])
    waiting = asyncio.create_task(anext(outputs))
    await tokens_to_flow(engine, 3)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await engine.score([[1, 2]])  # runs after the abort that leaving the context has posted
    assert (await engine.stats()).running == 0


async def test_progress_adds_up_to_what_generate_gives(engine: TransformersEngine) -> None:
    request = GenerationRequest("r", [9, 8, 7], SamplingParams(max_tokens=30, ignore_eos=True))
    answering = asyncio.create_task(answers(engine, [request]))
    parts: list[Listed] = []
    while not answering.done():
        parts += map(listed, await engine.progress())
    (whole,) = await answering
    assert (
        len(parts) > 1
        and {part.finish_reason for part in parts} == {None}
        and whole.finish_reason == "length"
    )
    tokens = [t for part in parts for t in part.token_ids]
    assert len(whole.token_ids) == 30 and tokens == whole.token_ids[: len(tokens)]
    assert [x for part in parts for x in part.logprobs] == whole.logprobs[: len(tokens)]
    assert [v for part in parts for v in part.versions] == whole.versions[: len(tokens)]


async def test_an_error_in_the_model_reaches_every_caller_with_its_traceback(
    engine: TransformersEngine,
) -> None:
    running = [asyncio.create_task(answers(engine, requests(2, ENDLESS, tag))) for tag in "ab"]
    await tokens_to_flow(engine, 20)
    core = engine

    def broken(*arguments: object) -> torch.Tensor:
        raise ZeroDivisionError("the model broke")

    core._model.decode = broken  # type: ignore[method-assign]
    for task in running:
        with pytest.raises(ZeroDivisionError) as caught:
            await asyncio.wait_for(task, 30)
        assert "in broken" in "".join(traceback.format_exception(caught.value))
    for later in (
        engine.pause(),
        engine.score([[1, 2]]),
        answers(engine, requests(1, ENDLESS, "c")),
    ):
        with pytest.raises(ZeroDivisionError, match="the model broke"):
            await later


async def test_what_fails_one_requests_sampling_fails_that_request_alone(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With settings that no check covers: at the prompt, and after it."""
    sampled = BatchSampler.__call__

    def fragile(
        self: BatchSampler, logits: torch.Tensor, positions: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for row, position in zip(self.rows, positions, strict=True):
            if position >= {"early": 0, "late": 3}.get(row.request.request_id, 99):
                raise OverflowError("no such number")
        return sampled(self, logits, positions)

    made = BatchSampler.__init__

    def remembering(self: BatchSampler, rows: Sequence[DecodingRow], device: torch.device) -> None:
        self.rows = rows  # type: ignore[attr-defined]
        made(self, rows, device)

    asked = requests(6, SamplingParams(max_tokens=8, ignore_eos=True))
    alone = await answers(engine, asked)
    monkeypatch.setattr(BatchSampler, "__init__", remembering)
    monkeypatch.setattr(BatchSampler, "__call__", fragile)
    bad = [replace(asked[0], request_id=name) for name in ("early", "late")]
    *good, early, late = await answers(engine, [*asked, *bad])
    assert [output.token_ids for output in good] == [output.token_ids for output in alone]
    for output in (early, late):
        assert (output.finish_reason, "no such number" in output.error) == ("error", True)
    assert [len(early.token_ids), len(late.token_ids)] == [0, 3]


async def test_logits_that_are_not_finite_fail_their_request_alone(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engine._model
    decode = model.decode

    def broken(*arguments: Any) -> torch.Tensor:
        logits = decode(*arguments)
        logits[0] = torch.nan
        return logits

    monkeypatch.setattr(model, "decode", broken)
    found = await answers(engine, requests(3, SamplingParams(max_tokens=2, ignore_eos=True)))
    assert sorted(output.finish_reason for output in found) == ["error", "length", "length"]
    assert "are the model's weights finite?" in next(o.error for o in found if o.error)


async def test_loading_errors_reach_start(tmp_path) -> None:
    engine = ENGINES["transformers"](EngineConfig(str(tmp_path)))
    with pytest.raises(ValueError, match="Unrecognized model"):
        await engine.start()
    await engine.shutdown()


async def test_shutdown_answers_those_who_wait_and_may_come_twice(untied_model: str) -> None:
    engine = ENGINES["transformers"](EngineConfig(untied_model, threads=1))
    await engine.start()
    running = asyncio.create_task(answers(engine, requests(4, ENDLESS)))
    await tokens_to_flow(engine, 8)
    await engine.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        await running
    with pytest.raises(RuntimeError, match="not running"):
        await engine.score([[1, 2]])
    await engine.shutdown()


async def test_sleep_needs_an_idle_engine_and_wake_undoes_it(engine: TransformersEngine) -> None:
    asked = requests(5, ENDLESS)
    running = asyncio.create_task(answers(engine, asked))
    await tokens_to_flow(engine, 10)
    with pytest.raises(UserError, match="5 requests"):
        await engine.sleep()
    expected = [output.token_ids for output in await running]
    await engine.sleep()
    await engine.wake("weights")
    await engine.wake("cache")
    assert [output.token_ids for output in await answers(engine, asked)] == expected


async def test_stats_tell_busy_from_paused(engine: TransformersEngine) -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    await answers(engine, requests(16, ENDLESS))
    worked = await engine.stats()
    await engine.pause()
    await engine.score([[1, 2, 3]])
    await engine.resume()
    stats = await engine.stats()
    assert (stats.running, stats.waiting, stats.generated_tokens) == (0, 0, 16 * 150)
    assert worked.paused_s == 0 < stats.paused_s
    assert stats.busy_s == worked.busy_s > 0
    assert stats.busy_s + stats.paused_s <= loop.time() - started
