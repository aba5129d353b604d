"""A real vLLM engine: one untied tiny Llama in one engine for the whole file."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from skyasync.algorithms.sampled import SampledDistribution
from skyasync.config.schema import SamplingConfig
from skyasync.errors import UserError
from skyasync.inference.backends.transformers.decoder import DecodingRow
from skyasync.inference.backends.transformers.sampling import LogitEdits, keep_likely, tokenised
from skyasync.inference.backends.vllm.engine import EngineFailedError, VLLMEngine
from skyasync.inference.backends.vllm.process_guard import guarded
from skyasync.inference.interface import EngineConfig, GenerationRequest, SamplingParams
from skyasync.models.packing import plain_layout
from skyasync.models.token_model import TokenModel
from skyasync.rollout.generator_api import sampling_params
from skyasync.weight_sync.transfers.file import remove_weights
from skyasync.weight_sync.update import WeightUpdate
from tests import fork_server
from tests.inference.backends.vllm.models import (
    EOS,
    VOCABULARY,
    perturb,
    publish,
    save_model,
    token_logprobs,
)
from tests.inference.output_lists import Listed, listed

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

TOLERANCE = 1e-4
MAX_RUNNING = 16
LONG = SamplingParams(max_tokens=300, ignore_eos=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (another process brings it about)
            await asyncio.sleep(0.001)


class Engine(VLLMEngine):
    """The engine and the trainer's model."""

    model: LlamaForCausalLM

    async def answer(self, *requests: GenerationRequest) -> list[Listed]:
        answers = {
            output.request_id: listed(output)
            async for batch in self.generate(requests)
            for output in batch
        }
        return [answers[request.request_id] for request in requests]

    async def sync(self, *, change: bool = True) -> int:
        version = self.version + 1
        if change:
            perturb(self.model, seed=version)
        update = publish(self.model, version)
        await self.update_weights(update)
        remove_weights(update.info["path"])
        return version

    async def until_running(self, count: int) -> None:
        await until(lambda: len(self.token_counts()) >= count)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(
    engines_session: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Engine]:
    folder = tmp_path_factory.mktemp("untied")
    model = save_model(folder, tied=False)
    engine = Engine(
        EngineConfig(
            str(folder), max_model_len=512, max_num_seqs=MAX_RUNNING, threads=1, kv_cache_gb=0.25, version=3,
        )
    )  # fmt: skip
    engine.model = model
    await engine.start()
    yield engine
    await engine.shutdown()
    await engine.shutdown()  # safe to call twice


def request(name: str, prompt: list[int] | None = None, **sampling: object) -> GenerationRequest:
    return GenerationRequest(name, prompt or [2, 3, 4, 5], SamplingParams(**sampling))  # type: ignore[arg-type]


def has_sockets(folder: str) -> bool:
    return any(path.is_socket() for path in Path(folder).iterdir())


def is_there(path: str) -> bool:
    return os.path.exists(path)


def gap(output: Listed, expected: torch.Tensor) -> float:
    assert len(output.logprobs) == len(expected)
    return (torch.tensor(output.logprobs) - expected).abs().max().item()


def reference(model: LlamaForCausalLM, prompt: list[int], output: Listed, temperature: float = 1.0):
    return token_logprobs(model, prompt + output.token_ids, temperature)[len(prompt) - 1 :]


@pytest.mark.parametrize(
    ("prompt", "settings"),
    [
        ([5, VOCABULARY + 9], {}),
        ([5], {"stop_token_ids": (VOCABULARY + 9,)}),
        ([5], {"logit_bias": {VOCABULARY + 9: 1.0}}),
        ([5], {"allowed_token_ids": (VOCABULARY + 9,)}),
        ([5], {"min_tokens": 9, "max_tokens": 3}),
        ([5], {"structured_outputs": {"regex": "("}}),
        ([5], {"structured_outputs": {"no": "such"}}),
        ([], {}),
        ([5] * 5000, {}),
    ],
)
async def test_a_request_that_cannot_be_answered_fails_alone(
    engine: Engine, prompt: list[int], settings: dict[str, Any]
) -> None:
    short = SamplingParams(max_tokens=3, ignore_eos=True)
    bad = GenerationRequest("bad", prompt, replace(short, **settings))
    good, refused = await engine.answer(GenerationRequest("good", [5, 6], short), bad)
    assert (good.finish_reason, len(good.token_ids)) == ("length", 3)
    assert (refused.finish_reason, refused.token_ids) == ("error", [])
    assert "request 'bad' cannot be answered" in refused.error
    assert engine.states() == []


async def test_numbers_at_the_ends_of_their_bounds_are_carried_out(engine: Engine) -> None:
    ends: list[dict[str, Any]] = [
        {"top_k": 2**31 - 1}, {"temperature": 0.01}, {"temperature": 2.0}, {"top_p": 1e-300}, {"min_p": 1e-300},
        {"repetition_penalty": 0.01}, {"repetition_penalty": 100.0}, {"seed": 2**62}, {"logit_bias": {5: 100.0}},
        {"repetition_penalty": 100.0, "temperature": 0.01, "logit_bias": {5: -100.0}, "frequency_penalty": -2.0},
    ]  # fmt: skip
    asked = [SamplingParams(max_tokens=3, ignore_eos=True, **each) for each in ends]
    found = await engine.answer(
        *(GenerationRequest(f"end{i}", [5, 6], each) for i, each in enumerate(asked))
    )
    assert [output.error for output in found] == [""] * len(ends)
    assert np.isfinite([value for output in found for value in output.logprobs]).all()


async def test_every_request_is_answered_once_with_as_many_logprobs_and_versions_as_tokens(
    engine: Engine,
) -> None:
    requests = [request(f"many-{i}", [2 + i % 9, 5], max_tokens=1 + i % 20) for i in range(100)]
    batches = [batch async for batch in engine.generate(requests)]
    outputs = [listed(output) for batch in batches for output in batch]
    assert sorted(o.request_id for o in outputs) == sorted(r.request_id for r in requests)
    assert len(batches) < len(requests), "requests that finish together are delivered together"
    assert all(len(o.token_ids) == len(o.logprobs) == len(o.versions) > 0 for o in outputs)
    assert {o.finish_reason for o in outputs} <= {"stop", "length"}
    assert {version for o in outputs for version in o.versions} == {3}


async def test_logprobs_are_those_of_the_distribution_sampled_from(engine: Engine) -> None:
    prompt = [7, 8, 9]
    common = {"max_tokens": 40, "ignore_eos": True}
    requests = [
        request("plain", prompt, **common),
        request("greedy", prompt, temperature=0.0, **common),
        request("nucleus", prompt, temperature=0.7, top_p=0.9, **common),
        request("top-k", prompt, temperature=1.3, top_k=5, **common),
    ]
    plain, greedy, nucleus, top_k = await engine.answer(*requests)
    assert gap(plain, reference(engine.model, prompt, plain)) <= TOLERANCE
    assert gap(greedy, reference(engine.model, prompt, greedy)) <= TOLERANCE
    assert (
        gap(nucleus, _truncated(engine.model, prompt, nucleus, temperature=0.7, top_p=0.9))
        <= TOLERANCE
    )
    assert (
        gap(top_k, _truncated(engine.model, prompt, top_k, temperature=1.3, top_k=5)) <= TOLERANCE
    )


async def test_logprobs_after_penalties_bias_and_bans_are_those_of_the_embedded_engines_sampler(
    engine: Engine,
) -> None:
    """Both engines define every setting alike: the embedded sampler computes what vLLM reports."""
    prompt = [7, 8, 9]
    common = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.7, "top_p": 0.9}
    requests = [
        request(
            "penalised",
            prompt,
            repetition_penalty=1.3,
            frequency_penalty=0.4,
            presence_penalty=0.2,
            **common,
        ),
        request(
            "biased",
            prompt,
            logit_bias={5: 2.0, 7: -1.0},
            allowed_token_ids=tuple(range(2, 60)),
            **common,
        ),
        request(
            "banned", prompt, bad_words=("w23", "w45", "w11"), repetition_penalty=1.2, **common
        ),
    ]
    encode = AutoTokenizer.from_pretrained(engine.config.model_path).encode
    for asked, output in zip(requests, await engine.answer(*requests), strict=True):
        bans = tokenised(asked.sampling.bad_words, partial(encode, add_special_tokens=False))
        assert gap(output, _by_our_sampler(engine.model, asked, output, bans)) <= TOLERANCE
    assert bans == ((23,), (0,), (45,), (0,), (1, 0)), "one word of one token, and one of two"


@torch.no_grad()
def _by_our_sampler(
    model: LlamaForCausalLM,
    asked: GenerationRequest,
    output: Listed,
    bad_words: tuple[tuple[int, ...], ...],
) -> torch.Tensor:
    prompt, sampling = asked.prompt_token_ids.tolist(), asked.sampling
    logits = model(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
    one = torch.ones(1)
    found = []
    for i, token in enumerate(output.token_ids):
        row = DecodingRow(asked, prompt, 0, 99, frozenset(), bad_words=bad_words)
        row.token_ids.extend(output.token_ids[:i])
        scores = logits[i : i + 1].clone()
        LogitEdits([row], torch.device("cpu"))(scores, np.array([i]))
        kept = keep_likely(
            scores / sampling.temperature, 0 * one.long(), sampling.top_p * one, 0 * one
        )
        found.append(kept.log_softmax(-1)[0, token])
    return torch.stack(found)


async def test_the_trainers_logprobs_of_filtered_samples_are_the_engines(engine: Engine) -> None:
    settings = SamplingConfig(
        temperature=0.7, top_p=0.9, top_k=20, min_p=0.02, logit_bias={"5": 1.5}, ignore_eos=True
    )
    model = TokenModel(engine.model, SampledDistribution.of(settings))
    asked = GenerationRequest(
        "filtered", [7, 8, 9], replace(sampling_params(settings), max_tokens=30)
    )
    (output,) = await engine.answer(asked)
    tokens = torch.tensor([[*asked.prompt_token_ids, *output.token_ids]])
    mask = torch.arange(tokens.shape[1])[None] >= 3
    with torch.no_grad():
        assert (
            gap(output, model(plain_layout(tokens, torch.ones_like(mask), mask))["logprobs"][mask])
            <= TOLERANCE
        )


@pytest.fixture
def one_per_prompt(engine: Engine) -> Iterator[None]:
    engine.config.extra["one_per_prompt"] = True
    yield
    del engine.config.extra["one_per_prompt"]


async def requests_to_vllm(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, *requests: GenerationRequest
):
    """The answers, and the ``n`` of each request that vLLM received."""
    counts: list[int] = []
    outputs = engine.outputs

    def counting(name, tokens, parameters, images):
        counts.append(parameters.n)
        return outputs(name, tokens, parameters, images)

    monkeypatch.setattr(engine, "outputs", counting)
    return await engine.answer(*requests), counts


async def test_requests_that_differ_in_their_id_alone_are_one_request_of_n_samples(
    engine: Engine, one_per_prompt: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [request(f"n{i}", [7, 8, 9], max_tokens=3 + 20 * (i > 3)) for i in range(8)]
    requests += [request(f"s{i}", [7, 8, 9], max_tokens=3, seed=i) for i in range(2)] + [
        request("other", [4, 5])
    ]
    answers, counts = await requests_to_vllm(engine, monkeypatch, *requests)
    assert sorted(counts) == [1, 1, 1, 4, 4]
    assert len({tuple(answer.token_ids) for answer in answers[4:8]}) > 1, "samples differ"
    for asked, answer in zip(requests, answers, strict=True):
        assert answer.request_id == asked.request_id and len(answer.versions) == len(
            answer.token_ids
        )
        assert (
            gap(answer, reference(engine.model, asked.prompt_token_ids.tolist(), answer))
            <= TOLERANCE
        )
    assert (await engine.stats()).running == 0


async def test_a_bundle_ends_when_all_of_it_is_aborted_and_its_aborted_members_say_so(
    engine: Engine, one_per_prompt: None
) -> None:
    requests = [request(f"b{i}", [7, 8, 9], max_tokens=300, ignore_eos=True) for i in range(3)]
    answers = asyncio.create_task(engine.answer(*requests))
    await engine.until_running(3)
    await engine.abort(["b0"])
    stats = await engine.stats()
    assert stats.running == 3
    assert stats.cache_used == 3 + sum(engine.token_counts()) < stats.cache_tokens, (
        "the prompt is there once"
    )
    await engine.abort(["b1", "b2"])
    assert {answer.finish_reason for answer in await answers} == {"abort"}


async def test_a_request_of_several_samples_survives_a_weight_update_with_a_version_per_token(
    engine: Engine, one_per_prompt: None
) -> None:
    before = engine.version
    requests = [request(f"u{i}", [7, 8, 9], max_tokens=200, ignore_eos=True) for i in range(4)]
    answers = asyncio.create_task(engine.answer(*requests))
    await engine.until_running(4)
    after = await engine.sync()
    for answer in await answers:
        assert set(answer.versions) <= {before, after} and answer.versions[-1] == after
        assert answer.versions == sorted(answer.versions) and len(answer.logprobs) == 200


async def test_vllm_ends_a_response_that_repeats_itself_as_one_cut_by_its_length(
    engine: Engine,
) -> None:
    repetition = {"max_pattern_size": 2, "min_count": 4}
    (output,) = await engine.answer(
        request(
            "again",
            allowed_token_ids=(5,),
            max_tokens=60,
            ignore_eos=True,
            repetition_detection=repetition,
        )
    )
    assert output.finish_reason == "length" and len(output.token_ids) < 60


@torch.no_grad()
def _truncated(
    model: LlamaForCausalLM, prompt: list[int], output: Listed, temperature: float, top_p: float = 1.0,
    top_k: int = VOCABULARY,
) -> torch.Tensor:  # fmt: skip
    logits = (
        model(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
        / temperature
    )
    probabilities, order = logits.softmax(-1).sort(descending=True)
    before = probabilities.cumsum(-1) - probabilities
    keep = (before < top_p) & (torch.arange(VOCABULARY) < top_k)
    kept = torch.zeros_like(keep).scatter(-1, order, keep)
    logprobs = logits.masked_fill(~kept, float("-inf")).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]


async def test_score_is_the_models_own_and_independent_of_what_is_cached(engine: Engine) -> None:
    sequences = [[4], [5, 6], list(range(2, 90)) * 3]
    for _ in range(2):  # the second time, the prompt is in the cache
        scores = await engine.score(sequences)
        assert [len(score) for score in scores] == [0, 1, 263]
        for sequence, score in zip(sequences[1:], scores[1:], strict=True):
            assert (
                torch.tensor(score) - token_logprobs(engine.model, sequence)
            ).abs().max() <= TOLERANCE
    assert await engine.score([np.array(sequences[1], np.int32)]) == [scores[1]], (
        "tokens come as arrays too"
    )


async def test_the_token_that_ends_a_response_is_part_of_it(engine: Engine) -> None:
    (free,) = await engine.answer(request("free", max_tokens=30, temperature=0.0, ignore_eos=True))
    stop = free.token_ids[10]
    first = free.token_ids.index(stop)
    (by_token,) = await engine.answer(
        request("token", max_tokens=30, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
    )
    (by_text,) = await engine.answer(
        request("text", max_tokens=30, temperature=0.0, ignore_eos=True, stop=(f"w{stop}",))
    )
    assert by_token.token_ids == free.token_ids[: first + 1]
    assert by_token.finish_reason == by_text.finish_reason == "stop"
    assert len(by_text.token_ids) == len(by_text.logprobs) == len(by_text.versions) <= first + 1
    ended = await engine.answer(*(request(f"eos-{i}", max_tokens=400) for i in range(32)))
    assert any(o.finish_reason == "stop" and o.token_ids[-1] == EOS for o in ended)


async def test_a_seed_fixes_the_sample_and_long_prompts_survive_it(engine: Engine) -> None:
    prompt = list(range(2, 90)) * 4
    requests = [
        request(f"seed-{i}", prompt, max_tokens=20, seed=i // 2, ignore_eos=True) for i in range(64)
    ]
    outputs = await engine.answer(*requests)
    for even, odd in zip(outputs[::2], outputs[1::2], strict=True):
        assert even.token_ids == odd.token_ids
    assert outputs[0].token_ids != outputs[2].token_ids


async def test_generated_tokens_are_counted(engine: Engine) -> None:
    before = (await engine.stats()).generated_tokens
    await engine.answer(request("counted", max_tokens=50, temperature=0.0, ignore_eos=True))
    assert (await engine.stats()).generated_tokens == before + 50


async def test_an_in_flight_weight_update_loses_no_token_and_versions_are_exact(
    engine: Engine,
) -> None:
    old_version, old_model = engine.version, _copy(engine.model)
    requests = [GenerationRequest(f"swap-{i}", [2 + i, 5, 6], LONG) for i in range(64)]
    answers = asyncio.create_task(engine.answer(*requests))
    await engine.until_running(MAX_RUNNING)
    await engine.pause("keep")
    new_version = await engine.sync()
    await engine.resume()
    outputs = await answers
    assert [len(o.token_ids) for o in outputs] == [300] * 64
    assert all(o.versions == sorted(o.versions) for o in outputs)
    swapped = [o for o in outputs if set(o.versions) == {old_version, new_version}]
    started_over = [o for o in outputs if set(o.versions) == {new_version}]
    assert len(swapped) >= 1 and len(started_over) >= 64 - 2 * MAX_RUNNING
    for request_, output in zip(requests, outputs, strict=True):
        expected = _across_an_update(
            old_model, engine.model, request_.prompt_token_ids.tolist(), output, old_version
        )
        assert gap(output, expected) <= TOLERANCE


@torch.no_grad()
def _across_an_update(
    old: LlamaForCausalLM,
    new: LlamaForCausalLM,
    prompt: list[int],
    output: Listed,
    old_version: int,
) -> torch.Tensor:
    """The old model computed the tokens of the old version; the new one computed the rest, on the old KV cache."""
    by_old = output.versions.count(old_version)
    tokens = torch.tensor([prompt + output.token_ids])
    if by_old == 0:
        return reference(new, prompt, output)
    seen = len(prompt) + by_old - 1  # keys and values of the newest token are not computed yet
    first = old(tokens[:, :seen], use_cache=True)
    logits = first.logits
    if seen < tokens.shape[1]:
        rest = new(tokens[:, seen:], past_key_values=first.past_key_values)
        logits = torch.cat([logits, rest.logits], dim=1)
    logprobs = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]


def _copy(model: LlamaForCausalLM) -> LlamaForCausalLM:
    copy = LlamaForCausalLM(model.config).eval()
    copy.load_state_dict(model.state_dict())
    return copy


async def test_no_prompt_finds_the_cache_of_older_weights(engine: Engine) -> None:
    prompt = list(range(2, 90)) * 4  # several blocks
    await engine.answer(request("fills", prompt, max_tokens=4, ignore_eos=True))
    await engine.pause()
    waiting = asyncio.create_task(
        engine.answer(request("waits", prompt, max_tokens=4, ignore_eos=True))
    )
    await until(lambda: bool(engine.states()))
    version = await engine.sync()
    await engine.resume()
    (fresh,) = await engine.answer(request("fresh", prompt, max_tokens=4, ignore_eos=True))
    for output in (fresh, *await waiting):
        assert set(output.versions) == {version}
        assert gap(output, reference(engine.model, prompt, output)) <= TOLERANCE


@pytest.mark.matrix
async def test_paused_means_that_no_token_is_computed_and_new_requests_wait(engine: Engine) -> None:
    running = asyncio.create_task(engine.answer(GenerationRequest("kept", [2, 3], LONG)))
    await engine.until_running(1)
    await engine.pause("keep")
    paused = await engine.stats()
    late = asyncio.create_task(engine.answer(request("late", max_tokens=3, ignore_eos=True)))
    await engine.llm.get_weight_version()  # a round trip through the core
    still = await engine.stats()
    assert still.generated_tokens == paused.generated_tokens
    assert still.busy_s == paused.busy_s and still.paused_s > paused.paused_s
    assert (still.running, still.waiting) == (1, 1)
    await engine.resume()
    assert [len(o.token_ids) for o in await running + await late] == [300, 3]


async def test_abort_returns_what_there_was(engine: Engine) -> None:
    requests = [GenerationRequest(f"cut-{i}", [2 + i, 5], LONG) for i in range(4)]
    answers = asyncio.create_task(engine.answer(*requests))
    await engine.until_running(4)
    await engine.abort(["cut-0", "never heard of"])
    await engine.abort(["cut-1"])
    await engine.pause("abort")
    await engine.resume()
    outputs = await answers
    assert [o.finish_reason for o in outputs] == ["abort"] * 4
    assert all(0 < len(o.token_ids) == len(o.logprobs) == len(o.versions) < 300 for o in outputs)
    survivors = asyncio.create_task(engine.answer(*requests))
    await engine.until_running(4)
    await engine.abort()
    assert {o.finish_reason for o in await survivors} == {"abort"}


async def test_pause_in_wait_mode_lets_requests_finish(engine: Engine) -> None:
    answers = asyncio.create_task(engine.answer(GenerationRequest("drained", [2, 3], LONG)))
    await engine.until_running(1)
    await engine.pause("wait")
    (output,) = await asyncio.wait_for(answers, timeout=5)
    assert len(output.token_ids) == 300
    await engine.resume()


async def test_leaving_generate_early_frees_the_engine(engine: Engine) -> None:
    requests = [GenerationRequest(f"left-{i}", [2 + i, 5], LONG) for i in range(4)]
    answers = asyncio.create_task(engine.answer(*requests))
    await engine.until_running(4)
    assert (await engine.stats()).cache_used == 4 * 2 + sum(engine.token_counts())
    answers.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answers
    await until(lambda: not engine.states())
    stats = await engine.stats()
    assert (stats.running, stats.waiting, stats.cache_used) == (0, 0, 0)


async def test_what_it_cannot_do_is_refused(engine: Engine) -> None:
    with pytest.raises(UserError, match="no sleep mode on a CPU"):
        await engine.sleep()
    with pytest.raises(ValueError, match=r"'shared_memory'.*'nccl'"):
        await engine.update_weights(WeightUpdate(version=99, backend="nccl", info={}))
    (output,) = await engine.answer(request("too long", [2] * 600))
    assert output.finish_reason == "error" and "512" in output.error


async def test_progress_is_reported_once_also_across_an_update_and_the_answer_is_complete(
    engine: Engine,
) -> None:
    first, count = engine.version, 3
    told: dict[str, list[tuple[int, float, int]]] = {f"progress-{i}": [] for i in range(count)}
    asked = [request(f"progress-{i}", max_tokens=300, ignore_eos=True) for i in range(count)]
    answering = asyncio.create_task(engine.answer(*asked))
    await engine.until_running(count)
    while not answering.done():
        for output in map(listed, await engine.progress()):
            assert output.finish_reason is None
            told[output.request_id] += zip(
                output.token_ids, output.logprobs, output.versions, strict=True
            )
        if engine.version == first and all(len(tokens) > 20 for tokens in told.values()):
            await engine.sync(change=False)
    for output in await answering:
        whole = list(zip(output.token_ids, output.logprobs, output.versions, strict=True))
        assert len(whole) == 300 and {version for _, _, version in whole} == {first, first + 1}
        assert 20 < len(told[output.request_id]) < 300
        assert whole[: len(told[output.request_id])] == told[output.request_id]
    assert not await engine.progress() and not engine._reported_tokens


async def test_progress_leaves_out_requests_of_several_samples_and_scores(engine: Engine) -> None:
    await engine.score([[2, 3, 4], [5, 6]])
    scoring = asyncio.create_task(engine.score([[2, 3, 4] * 50] * 8))
    while not scoring.done():
        assert await engine.progress() == []
    await scoring


async def test_after_the_failure_of_the_core_every_call_raises(engine: Engine) -> None:
    """The last test of the file: it kills the engine."""
    answers = asyncio.create_task(engine.answer(GenerationRequest("doomed", [2, 3], LONG)))
    await engine.until_running(1)
    await engine.pause("keep")
    draining = asyncio.create_task(engine.score([[2, 3, 4]]))
    folder = engine._guard.folder
    assert has_sockets(folder)
    for process in guarded(engine._guard.mark):
        os.kill(process, signal.SIGKILL)
    for waiting in (
        answers,
        draining,
        engine.resume(),
        engine.answer(request("next")),
        engine.score([[2, 3]]),
    ):
        with pytest.raises(EngineFailedError):
            await asyncio.wait_for(waiting, timeout=10)
    await engine.shutdown()
    assert not is_there(folder), "sockets and other temporary files of its processes"


async def test_the_engines_processes_die_with_a_parent_that_is_killed(
    tmp_path: Path, fork_socket: Path
) -> None:
    save_model(tmp_path, tied=False)
    program = (
        "import asyncio, sys\n"
        "from skyasync.inference.interface import EngineConfig\n"
        "from skyasync.inference.backends.vllm.engine import VLLMEngine\n"
        "async def main():\n"
        f"    engine = VLLMEngine(EngineConfig({str(tmp_path)!r}, max_model_len=64, threads=1, kv_cache_gb=0.1))\n"
        "    await engine.start()\n"
        "    print('mark', engine._guard.mark, engine._guard.folder, flush=True)\n"
        "    await asyncio.sleep(1000)\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    script, temporary = tmp_path / "parent.py", tempfile.mkdtemp(prefix="t-")
    script.write_text(program)
    python, environment = (
        fork_server.program(fork_socket, vllm=True),
        {**os.environ, "TMPDIR": temporary},
    )
    parent = await asyncio.create_subprocess_exec(
        python, str(script), stdout=subprocess.PIPE, env=environment
    )
    assert parent.stdout is not None
    line = b""
    while not line.startswith(b"mark"):
        line = await asyncio.wait_for(parent.stdout.readline(), timeout=120)
    mark, folder = line.decode().split()[1:]
    assert folder.startswith(temporary) and has_sockets(folder)
    assert len(guarded(mark)) >= 2  # the core and its worker
    parent.kill()
    await parent.wait()
    await until(lambda: not guarded(mark) and not os.path.exists(folder))
    left = [name for name in os.listdir(temporary) if not name.startswith("torchinductor_")]
    shutil.rmtree(temporary)
    assert left == []
