"""Requests that the client interrupts and continues: no token is lost or doubled, and each has its version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyasync.inference.backends.transformers.engine import TransformersEngine
from skyasync.inference.client import InferenceClient
from skyasync.inference.inflight import continuation
from skyasync.inference.interface import (
    EngineConfig,
    GenerationOutput,
    GenerationRequest,
    SamplingParams,
)
from skyasync.weight_sync.transfers.file import remove_weights, write_weights
from skyasync.weight_sync.update import WeightUpdate
from tests.inference.output_lists import Listed, listed

pytestmark = pytest.mark.slow

LENGTH = 120
COUNT = 64


@pytest.fixture
async def client(untied_model: str) -> AsyncIterator[InferenceClient]:
    client = InferenceClient(
        [TransformersEngine(EngineConfig(untied_model, threads=1, max_model_len=200))], 60
    )
    await client.start()
    yield client
    await client.shutdown()


def requests(count: int = COUNT) -> list[GenerationRequest]:
    sampling = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    return [GenerationRequest(f"r{i}", [1 + i, 2, 3], sampling) for i in range(count)]


async def until_all_run(client: InferenceClient, tokens: int) -> None:
    """Wait until the engine has generated ``tokens`` tokens."""
    while (await client.stats())[0].generated_tokens < tokens:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def answers_with_cuts(client: InferenceClient, model: str, cuts: int) -> list[Listed]:
    path = write_weights(AutoModelForCausalLM.from_pretrained(model).state_dict())
    tasks = [asyncio.create_task(client.generate(request)) for request in requests()]
    for version in range(1, cuts + 1):
        await until_all_run(client, version * 15 * COUNT)
        await client.cut()
        await client.update_weights(WeightUpdate(version, "shared_memory", {"path": path}))
        await client.resume()
    answers = await asyncio.gather(*tasks)
    remove_weights(path)
    return [listed(answer) for answer in answers]


async def test_64_requests_cut_three_times_are_answered_whole(
    client: InferenceClient, untied_model: str
) -> None:
    answers = await answers_with_cuts(client, untied_model, cuts=3)
    assert [answer.request_id for answer in answers] == [
        request.request_id for request in requests()
    ]
    for answer in answers:
        assert len(answer.token_ids) == len(answer.logprobs) == len(answer.versions) == LENGTH
        assert answer.finish_reason == "length"
        assert answer.versions == sorted(answer.versions)
        assert set(answer.versions) == {0, 1, 2, 3}
    (stats,) = await client.stats()
    assert stats.generated_tokens == LENGTH * COUNT, "no token is sampled twice"
    assert stats.running == stats.waiting == 0


async def test_an_abort_on_purpose_ends_a_request_for_good(client: InferenceClient) -> None:
    task = asyncio.create_task(client.generate(requests(1)[0]))
    await until_all_run(client, 5)
    await client.abort(["r0"])
    answer = await task
    assert answer.finish_reason == "abort"
    assert 5 <= len(answer.token_ids) < LENGTH


async def test_an_abort_on_purpose_finds_a_request_that_was_cut(client: InferenceClient) -> None:
    task = asyncio.create_task(client.generate(requests(1)[0]))
    await until_all_run(client, 5)
    await client.cut()
    await client.resume()
    await until_all_run(client, 20)
    await client.abort(["r0"])
    answer = await task
    assert answer.finish_reason == "abort"
    assert 20 <= len(answer.token_ids) < LENGTH


async def test_requests_made_while_cut_start_after_resume(client: InferenceClient) -> None:
    await client.cut()
    task = asyncio.create_task(client.generate(requests(1)[0]))
    await asyncio.sleep(0.02)
    assert not task.done()
    await client.resume()
    assert len((await task).token_ids) == LENGTH


async def test_a_stop_string_that_spans_cuts_ends_the_response_where_it_would_without_them(
    client: InferenceClient, untied_model: str
) -> None:
    """Greedy sampling repeats the tokens; each response has 24 of its own characters as its stop string."""
    tokenizer = AutoTokenizer.from_pretrained(untied_model)
    client._tokenizer = lambda: tokenizer
    greedy = SamplingParams(max_tokens=LENGTH, min_tokens=40, ignore_eos=True, temperature=0.0)
    prompts = {f"s{i}": [1 + i, 2, 3 + i] for i in range(16)}
    free = await asyncio.gather(
        *(client.generate(GenerationRequest(n, p, greedy)) for n, p in prompts.items())
    )
    stops = [tokenizer.decode(answer.token_ids[50 : 50 + 24]) for answer in free]
    asked = [
        GenerationRequest(name, prompt, replace(greedy, stop=(stop,)))
        for (name, prompt), stop in zip(prompts.items(), stops, strict=True)
    ]
    whole = await asyncio.gather(*map(client.generate, asked))
    assert any(40 < len(answer.token_ids) < LENGTH for answer in whole)
    before, tasks = (
        (await client.stats())[0].generated_tokens,
        [asyncio.create_task(client.generate(r)) for r in asked],
    )
    for cut in range(1, 12):
        await until_all_run(client, before + cut * 6 * len(asked))
        await client.cut()
        await client.resume()
    for answer, expected in zip(await asyncio.gather(*tasks), whole, strict=True):
        assert (answer.token_ids.tolist(), answer.finish_reason) == (
            expected.token_ids.tolist(),
            expected.finish_reason,
        )
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert len(answer.versions) == len(answer.token_ids)


@pytest.fixture
def continued(client: InferenceClient, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The requests that the engine gets the rest of."""
    names: set[str] = set()
    engine = client.engines[0]
    generate = engine.generate

    def recording(requests: Sequence[GenerationRequest]) -> AsyncIterator[list[GenerationOutput]]:
        names.update(
            request.request_id.partition("+")[0] for request in requests if request.continues
        )
        return generate(requests)

    monkeypatch.setattr(engine, "generate", recording)
    return names


async def test_with_a_seed_cuts_change_no_token(
    client: InferenceClient, continued: set[str]
) -> None:
    asked = [
        GenerationRequest(
            f"s{i}", [1 + i, 2, 3], SamplingParams(max_tokens=LENGTH, ignore_eos=True, seed=i)
        )
        for i in range(16)
    ]
    whole = await asyncio.gather(*map(client.generate, asked))
    before, tasks = (
        (await client.stats())[0].generated_tokens,
        [asyncio.create_task(client.generate(r)) for r in asked],
    )
    for cut in range(1, 5):
        await until_all_run(client, before + cut * 20 * len(asked))
        await client.cut()
        await client.resume()
    answers = await asyncio.gather(*tasks)
    assert continued == {request.request_id for request in asked}
    assert [answer.token_ids.tolist() for answer in answers] == [
        expected.token_ids.tolist() for expected in whole
    ]


@pytest.mark.parametrize(
    "penalty",
    [
        pytest.param("frequency_penalty", marks=pytest.mark.matrix),
        pytest.param("presence_penalty", marks=pytest.mark.matrix),
        "repetition_penalty",
    ],
)
async def test_with_a_penalty_cuts_change_no_token(
    penalty: str, client: InferenceClient, continued: set[str]
) -> None:
    sampling = SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=0.0, **{penalty: 1.5})
    asked = [GenerationRequest(f"p{i}", [1 + i, 2, 3], sampling) for i in range(8)]
    whole = await asyncio.gather(*map(client.generate, asked))
    before, tasks = (
        (await client.stats())[0].generated_tokens,
        [asyncio.create_task(client.generate(r)) for r in asked],
    )
    await until_all_run(client, before + 40 * len(asked))
    await client.cut()
    await client.resume()
    answers = await asyncio.gather(*tasks)
    assert continued == {request.request_id for request in asked}
    assert [answer.token_ids.tolist() for answer in answers] == [
        expected.token_ids.tolist() for expected in whole
    ]


def test_a_continuation_asks_for_what_is_missing_and_where_streams_begin_anew_with_a_seed_of_its_own() -> (
    None
):
    sampling = SamplingParams(max_tokens=10, min_tokens=4, seed=7)
    request = GenerationRequest("r", [1, 2], sampling, session_id="s")
    more = continuation(request, GenerationOutput("r", [5, 6, 7], [0.0] * 3, [0] * 3, "abort"))
    assert (more.request_id, more.prompt_token_ids.tolist(), more.session_id) == (
        "r+3",
        [1, 2, 5, 6, 7],
        "s",
    )
    assert (more.sampling.max_tokens, more.sampling.min_tokens) == (7, 1)
    assert (more.sampling.seed, more.response_tokens, request.fresh_sampling.seed) == (7, 3, 7)
    seeds = {
        continuation(request, GenerationOutput("r", [5] * n)).fresh_sampling.seed for n in range(10)
    }
    assert len(seeds) == 10 and 7 not in seeds


async def test_progress_is_reported_once_and_the_answer_is_complete(
    client: InferenceClient,
) -> None:
    (engine,) = client.engines
    told: dict[str, list[tuple[int, float, int]]] = {
        request.request_id: [] for request in requests(8)
    }
    tasks = [asyncio.create_task(client.generate(request)) for request in requests(8)]
    while not all(task.done() for task in tasks):
        for output in map(listed, await engine.progress()):
            assert output.finish_reason is None
            told[output.request_id] += zip(
                output.token_ids, output.logprobs, output.versions, strict=True
            )
    for answer in map(listed, await asyncio.gather(*tasks)):
        whole = list(zip(answer.token_ids, answer.logprobs, answer.versions, strict=True))
        assert len(whole) == LENGTH
        assert 0 < len(told[answer.request_id]) < LENGTH, (
            "the answer of a finished request has all its tokens"
        )
        assert whole[: len(told[answer.request_id])] == told[answer.request_id]


async def test_a_paused_engine_answers_too(client: InferenceClient) -> None:
    task = asyncio.create_task(client.generate(requests(1)[0]))
    await until_all_run(client, 5)
    await client.pause("keep")
    assert len((await client.progress())["r0"].token_ids) >= 5
    await client.resume()
    assert len((await task).token_ids) == LENGTH
