"""The endpoint with OpenAI's own client: answers, recorded calls, and rejected requests.

Tests of tokens and log-probabilities use the real embedded engine, the others a scripted one.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
from transformers import AutoModelForCausalLM

from examples.agents.tasks import CALCULATOR
from skyasync.agents.calls import MOST_BYTES
from skyasync.agents.recorder import sequences
from skyasync.agents.server import Endpoint
from skyasync.inference.client import InferenceClient
from skyasync.rollout.generator_api import request_seed
from skyasync.rollout.types import PromptId, Segment, TrajectoryId
from skyasync.weight_sync.transfers.file import remove_weights, write_weights
from skyasync.weight_sync.update import WeightUpdate
from tests.agents.endpoints import (
    DEFAULTS,
    EPISODE,
    HELLO,
    MAX_MODEL_LEN,
    Scripted,
    chat,
    end,
    entered,
    real_endpoint,
    scripted,
    until,
    url,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(model: str, tokenizer: Any) -> AsyncIterator[SimpleNamespace]:
    async with real_endpoint(model, tokenizer) as found:
        yield found


@pytest.mark.skipif(not socket.has_ipv6, reason="the system has no IPv6")
async def test_an_ipv6_address_is_in_brackets_in_the_base_url(tokenizer: Any) -> None:
    endpoint = Endpoint(
        InferenceClient([Scripted(tokenizer, "yes")]), tokenizer, MAX_MODEL_LEN, "::1"
    )
    await endpoint.start()
    async with endpoint.session(EPISODE, DEFAULTS) as session:
        client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=session.api_key)
        assert (await chat(client, HELLO)).choices[0].message.content == "yes"
        await client.close()
    await endpoint.close()


async def test_the_runs_seed_draws_every_answer_by_its_own_name_and_a_requests_seed_as_it_says(
    tokenizer: Any,
) -> None:
    engine = Scripted(tokenizer, *["a"] * 6)
    endpoint, seeded = (
        Endpoint(InferenceClient([engine]), tokenizer, MAX_MODEL_LEN),
        replace(DEFAULTS, seed=7),
    )
    await endpoint.start()
    for repetition in range(2):
        async with endpoint.session(TrajectoryId(PromptId(0, 3), repetition), seeded) as session:
            client = openai.AsyncOpenAI(base_url=url(endpoint), api_key=session.api_key)
            await chat(client, HELLO)
            await chat(client, HELLO)
            await chat(client, HELLO, seed=5)
            await client.close()
    await endpoint.close()
    seeds = [request.sampling.seed for request in engine.requests]
    assert seeds[2] == seeds[5] == 5
    assert len(set(seeds)) == 5, (
        "samples of a prompt, and the calls of each, are drawn independently"
    )
    assert seeds[0] == request_seed(7, "e0-i3-r0-c0"), "and the same in every run"


async def test_a_conversation_is_recorded_as_computed_also_across_a_weight_update(
    real: Any,
) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(real.model)
    weights = {name: weight.detach() for name, weight in loaded.named_parameters()}
    loaded = AutoModelForCausalLM.from_pretrained(real.model)
    weights = {name: weight.detach() for name, weight in loaded.named_parameters()}
    async with entered(real.endpoint) as (client, session):
        messages: list[Any] = list(HELLO)
        for turn in range(3):
            answer = await chat(client, messages)
            messages += [answer.choices[0].message, {"role": "user", "content": f"and {turn}?"}]
            path = write_weights(weights)
            await real.engine.update_weights(
                WeightUpdate(turn + 1, "shared_memory", {"path": path})
            )
            remove_weights(path)
    (sequence,) = sequences(session.recorder.calls)
    actions = [s for s in sequence if s.kind == "action"]
    assert [set(a.versions) for a in actions] == [{0}, {1}, {2}]
    for turn, (call, action) in enumerate(zip(session.recorder.calls, actions, strict=True)):
        truth = real.engine.answered[f"{EPISODE}-c{turn}"]
        assert real.engine.asked[f"{EPISODE}-c{turn}"] == call.prompt.tolist()
        assert action == Segment("action", truth.token_ids, truth.logprobs, truth.versions)
    tokens = [t for s in sequence for t in s.tokens.tolist()]
    (scored,) = await real.engine.score([tokens])
    sampled = [
        p for s in sequence for p in (s.logprobs if s.kind == "action" else [None] * len(s.tokens))
    ]
    gaps = [abs(p - q) for p, q in zip(sampled[1:], scored, strict=True) if p is not None]
    assert len(gaps) == sum(len(a.tokens) for a in actions)
    assert max(gaps) < 1e-5


async def test_the_prompt_of_a_conversation_is_what_the_template_makes_of_it(
    real: Any, tokenizer: Any
) -> None:
    async with entered(real.endpoint) as (client, session):
        await chat(client, HELLO)
    framed = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)
    assert session.recorder.calls[0].prompt.tolist() == framed


async def test_choices_logprobs_token_ids_and_usage_are_those_of_the_engine(
    real: Any, tokenizer: Any
) -> None:
    async with entered(real.endpoint) as (client, session):
        answer = await chat(
            client, HELLO, n=3, logprobs=True, seed=5, extra_body={"return_token_ids": True}
        )
        again = await chat(client, HELLO, n=3, seed=5)
    assert len(session.recorder.calls) == 6
    assert len(sequences(session.recorder.calls)) == 6
    assert [c.message.content for c in again.choices] == [c.message.content for c in answer.choices]
    assert len({c.message.content for c in answer.choices}) == 3
    for choice, call in zip(answer.choices, session.recorder.calls, strict=False):
        assert choice.token_ids == call.action.tokens.tolist()
        assert [t.logprob for t in choice.logprobs.content] == call.action.logprobs.tolist()
        assert (
            tokenizer.decode(call.action.tokens, skip_special_tokens=True) == choice.message.content
        )
        assert choice.finish_reason == call.stop_reason
    assert answer.usage.completion_tokens == sum(
        len(c.action.tokens) for c in session.recorder.calls[:3]
    )
    assert (
        answer.usage.prompt_tokens
        == len(answer.prompt_token_ids)
        == len(session.recorder.calls[0].prompt)
    )


async def test_sampling_settings_are_the_runs_unless_the_request_has_its_own(real: Any) -> None:
    async with entered(real.endpoint) as (client, session):
        usual = await chat(client, HELLO)
        short = await chat(client, HELLO, max_completion_tokens=2, temperature=0.0)
        greedy = await chat(client, HELLO, max_tokens=2, temperature=0.0)
    lengths = [len(c.action.tokens) for c in session.recorder.calls]
    assert lengths[0] <= 6
    assert lengths[1] == lengths[2] == 2
    assert usual.choices[0].finish_reason in ("stop", "length")
    assert short.choices[0].finish_reason == "length"
    assert short.choices[0].message.content == greedy.choices[0].message.content


async def test_a_bias_decides_what_is_sampled(real: Any, tokenizer: Any) -> None:
    five = str(tokenizer.convert_tokens_to_ids("5"))
    async with entered(real.endpoint) as (client, session):
        await chat(client, HELLO, logit_bias={five: 100}, max_tokens=4, presence_penalty=0.5)
    (call,) = session.recorder.calls
    assert call.action.tokens.tolist() == [int(five)] * 4


async def test_plain_completions_go_on_from_token_ids(real: Any) -> None:
    async with entered(real.endpoint) as (client, session):
        first = await client.completions.create(
            model="any", prompt="12 *", extra_body={"return_token_ids": True}
        )
        tokens = first.prompt_token_ids + first.choices[0].token_ids
        await client.completions.create(model="any", prompt=[*tokens, 7], max_tokens=3)
        with pytest.raises(openai.BadRequestError, match="token ids"):
            await client.completions.create(model="any", prompt=[10**6])
    (sequence,) = sequences(session.recorder.calls)
    assert [s.kind for s in sequence] == ["prompt", "action", "observation", "action"]


async def test_a_prompt_that_is_too_long_is_rejected_with_openais_code(real: Any) -> None:
    async with entered(real.endpoint) as (client, session):
        with pytest.raises(openai.BadRequestError, match=r"generator\.max_model_len") as caught:
            await chat(client, [{"role": "user", "content": "7 " * MAX_MODEL_LEN}])
    assert caught.value.code == "context_length_exceeded"
    assert session.recorder.calls == []


async def test_tool_calls_go_out_and_come_back_without_a_token_made_again(tokenizer: Any) -> None:
    # No template writes this: made again from its parts it would have other tokens.
    said = 'Let me see.\n<tool_call>{ "name":"calculator",  "arguments": {"expression": "12*34"} }</tool_call>'
    async with scripted(tokenizer, said, "408") as (client, session, engine):
        first = await chat(client, HELLO, tools=[CALCULATOR])
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert message.content == "Let me see."
        assert message.tool_calls[0].function.name == "calculator"
        assert json.loads(message.tool_calls[0].function.arguments) == {"expression": "12*34"}
        answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "408"}
        history = [*HELLO, message.model_dump(exclude_none=True), answer]
        second = await chat(client, history, tools=[CALCULATOR])
        assert second.choices[0].message.content == "408"
    first_asked, second_asked = engine.requests
    written = session.recorder.calls[0].action.tokens
    so_far = [*first_asked.prompt_token_ids, *written]
    assert second_asked.prompt_token_ids[: len(so_far)].tolist() == so_far
    rest = tokenizer.decode(second_asked.prompt_token_ids[len(so_far) :])
    assert rest == "\n<|im_start|>tool\n408<|im_end|>\n<|im_start|>assistant\n"
    assert len(sequences(session.recorder.calls)) == 1


async def test_sub_agents_and_edited_histories_are_branches(tokenizer: Any) -> None:
    async with scripted(tokenizer, "a", "b", "c", "d") as (client, session, _):
        first = await chat(client, HELLO)
        await chat(client, [{"role": "system", "content": "You check."}, *HELLO])
        await chat(client, [*HELLO, first.choices[0].message, {"role": "user", "content": "sure?"}])
        await chat(
            client,
            [*HELLO, {"role": "assistant", "content": "A"}, {"role": "user", "content": "sure?"}],
        )
    found = sequences(session.recorder.calls)
    assert [sum(s.kind == "action" for s in sequence) for sequence in found] == [1, 2, 1]


async def test_parallel_calls_of_tools_may_be_switched_off(tokenizer: Any) -> None:
    call = '<tool_call>{"name": "calculator", "arguments": {}}</tool_call>'
    async with scripted(tokenizer, call * 2, call * 2, call * 2) as (client, _, _):
        both = await chat(client, HELLO, tools=[CALCULATOR])
        one = await chat(client, HELLO, tools=[CALCULATOR], parallel_tool_calls=False)
        none = await chat(client, HELLO)
    assert [len(a.choices[0].message.tool_calls or []) for a in (both, one, none)] == [2, 1, 0]
    assert none.choices[0].message.content == call * 2


async def test_streamed_answers_say_the_same(tokenizer: Any) -> None:
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "1*2"}}</tool_call>'
    async with scripted(tokenizer, f"Wait. {call}", "done") as (client, session, _):
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [c async for c in await chat(client, HELLO, tools=[CALCULATOR], **options)]
        deltas = [c.choices[0].delta for c in chunks if c.choices]
        assert "".join(d.content or "" for d in deltas) == "Wait."
        (streamed,) = [d.tool_calls[0] for d in deltas if d.tool_calls]
        assert json.loads(streamed.function.arguments) == {"expression": "1*2"}
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"
        assert chunks[-1].usage.completion_tokens == len(session.recorder.calls[0].action.tokens)
        async with client.chat.completions.stream(model="any", messages=HELLO) as events:
            assert (await events.get_final_completion()).choices[0].message.content == "done"


async def test_a_stop_string_ends_the_text_but_not_what_is_trained(tokenizer: Any) -> None:
    async with scripted(tokenizer, "4 0 8 END 9") as (client, session, engine):
        answer = await chat(client, HELLO, stop=["END", "x"])
    assert answer.choices[0].message.content == "4 0 8 "
    assert engine.requests[0].sampling.stop == ("END", "x")
    assert "END" in tokenizer.decode(session.recorder.calls[0].action.tokens)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"temperature": 101}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n must be"),
        ({"n": 1000}, "at most 128"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 1.5}, "whole number"),
        ({"stop": [""]}, "stop"),
        (
            {"frequency_penalty": 3.0},
            "frequency_penalty must be a number at least -2 and at most 2",
        ),
        ({"logit_bias": {"x": 1}}, "logit_bias must have token ids"),
        ({"logit_bias": {"99999": 1}}, "logit_bias has token ids outside"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs=3 is not supported"),
        ({"tool_choice": "required"}, "cannot be enforced"),
        ({"extra_body": {"temprature": 1}}, "did you mean temperature"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": 7}]}, "parts of type text"),
        ({"tools": [7]}, r"tools\[0\] must be of type function"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\] must be of type function"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "an image here is a data:image/.*; found 'x'",
        ),
    ],
)
async def test_what_cannot_be_carried_out_is_refused_by_name(
    tokenizer: Any, options: Any, problem: str
) -> None:
    async with scripted(tokenizer) as (client, session, _):
        with pytest.raises(openai.BadRequestError, match=problem) as caught:
            await client.chat.completions.create(**{"model": "any", "messages": HELLO, **options})
        assert caught.value.type == "invalid_request_error"
        assert session.recorder.calls == []


async def test_what_the_objective_cannot_do_right_is_refused_where_episodes_are_trained(
    real: Any,
) -> None:
    setting = "trainer.algorithm.off_policy_correction=tis"
    async with entered(real.endpoint, reads_behaviour=setting) as (client, session):
        for asked in ({"presence_penalty": 0.5}, {"extra_body": {"repetition_penalty": 1.1}}):
            with pytest.raises(
                openai.BadRequestError, match=f"_penalty depends on the tokens before.*{setting}"
            ):
                await chat(client, HELLO, **asked)
        assert session.recorder.calls == []
        await chat(client, HELLO, presence_penalty=0.0, max_tokens=1)
        await chat(client, HELLO, presence_penalty=0.5, max_tokens=1, temperature=0.0)
    assert len(session.recorder.calls) == 2


async def test_only_the_key_of_a_running_episode_is_accepted(real: Any) -> None:
    async with aiohttp.ClientSession() as http:

        async def status(authorization: str) -> int:
            headers = {"Authorization": authorization}
            async with http.get(f"{url(real.endpoint)}/models", headers=headers) as answer:
                assert (answer.status == 200) or (await answer.json())["error"][
                    "code"
                ] == "invalid_api_key"
                return answer.status

        async with entered(real.endpoint) as (client, session):
            key = session.api_key
            assert [m.id for m in (await client.models.list()).data] == ["policy"]
            for wrong in (
                "",
                "x",
                key,
                f"Basic {key}",
                "Bearer",
                f"Bearer {key[:-1]}",
                f"Bearer {key}x",
                "Bearer ä",
            ):
                assert await status(wrong) == 401
            assert await status(f"Bearer {key}") == 200
        assert await status(f"Bearer {key}") == 401


async def test_one_episodes_key_records_to_no_other(real: Any) -> None:
    async with entered(real.endpoint) as (_, quiet), entered(real.endpoint) as (client, busy):
        await chat(client, HELLO)
        assert quiet.api_key != busy.api_key
    assert (len(quiet.recorder.calls), len(busy.recorder.calls)) == (0, 1)


async def test_requests_that_are_no_requests_are_answered_in_openais_form(tokenizer: Any) -> None:
    async with scripted(tokenizer) as (client, session, _), aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {session.api_key}"}
        base = str(client.base_url)
        for path, body, status in [
            ("chat/completions", "{", 400),
            ("chat/completions", "[" * 100_000, 400),
            ("chat/completions", "[]", 400),
            ("chat/completions", '{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
            ("completions", '{"prompt": "\\ud800"}', 400),
            ("messages", '{"max_tokens": 3, "messages": [{"role": "user", "content": [3]}]}', 400),
            ("messages", '{"max_tokens": 3, "messages": 3}', 400),
            ("responses", '{"input": [3]}', 400),
            ("responses", '{"input": [{"type": ["message"], "role": {}}]}', 400),
            ("responses", '{"input": [{"role": {}, "content": "x"}]}', 400),
            ("chat/completions", "x" * (MOST_BYTES + 1), 413),
            ("embeddings", "{}", 404),
            ("../../etc/passwd", "{}", 404),
        ]:
            async with http.post(base + path, data=body, headers=headers) as answer:
                assert answer.status == status
                assert (await answer.json())["error"]["message"]


async def test_calls_that_run_when_their_episode_ends_are_ended_in_the_engine(
    tokenizer: Any,
) -> None:
    async with scripted(tokenizer, None, None) as (client, session, engine):
        endless = asyncio.create_task(chat(client.with_options(max_retries=0), HELLO))
        await until(lambda: engine.requests)
        await end(session)
        with pytest.raises(openai.APIConnectionError):
            await endless
        assert engine.aborted == [f"{EPISODE}-c0"]
    assert session.recorder.calls == []


async def test_a_closed_connection_leaves_nothing(tokenizer: Any) -> None:
    async with scripted(tokenizer, None) as (client, session, engine):
        impatient = asyncio.create_task(chat(client, HELLO))
        await until(lambda: engine.requests)
        impatient.cancel()
        await until(lambda: engine.aborted)
        assert engine.aborted == [f"{EPISODE}-c0"]
        assert session.recorder.calls == []
        await until(lambda: not session.handlers)


async def test_an_engines_failure_is_told_to_the_program_and_to_the_run(tokenizer: Any) -> None:
    async with scripted(tokenizer, RuntimeError("out of memory")) as (client, session, engine):
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            await chat(client, HELLO)
        assert len(engine.requests) == 1, "a failed engine gets no further request"
        with pytest.raises(RuntimeError, match="out of memory"):
            session.failure.result()


async def test_closing_leaves_no_port(tokenizer: Any) -> None:
    endpoint = Endpoint(InferenceClient([Scripted(tokenizer)]), tokenizer, MAX_MODEL_LEN)
    await endpoint.start()
    await endpoint.start()
    port = endpoint.port
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    await endpoint.close()
    await endpoint.close()
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
