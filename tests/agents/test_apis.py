"""The endpoint by Anthropic's API and by OpenAI's Responses API, with the official clients.

What the APIs have in common (keys, limits, branches, failures) is tested in ``test_server``.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic

from examples.agents.tasks import CALCULATOR
from skyasync.agents.calls import Session
from skyasync.agents.recorder import sequences
from tests.agents.endpoints import HELLO, MAX_MODEL_LEN, chat, entered, real_endpoint, scripted, url

pytestmark = pytest.mark.asyncio(loop_scope="module")

FUNCTION = CALCULATOR["function"]
THEIRS = {
    "name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]
}  # fmt: skip
OURS = {"type": "function", **FUNCTION}
# No template writes this: made again from its parts it would have other tokens.
CALL = '<tool_call>{ "name":"calculator",  "arguments": {"expression": "12*34"} }</tool_call>'
PICTURE = {"type": "base64", "media_type": "image/png", "data": "aGk="}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(model: str, tokenizer: Any) -> AsyncIterator[SimpleNamespace]:
    async with real_endpoint(model, tokenizer) as found:
        yield found


@asynccontextmanager
async def theirs(endpoint_url: str, session: Session) -> AsyncIterator[AsyncAnthropic]:
    """Anthropic's client, with the environment variables that every program gets."""
    async with AsyncAnthropic(base_url=endpoint_url, api_key=session.api_key) as client:
        yield client


def ask(client: AsyncAnthropic, messages: Any, **options: Any) -> Any:
    return client.messages.create(
        **{"model": "any", "max_tokens": 6, "messages": messages, **options}
    )


async def test_all_apis_send_the_engine_the_same_request_and_record_the_same(real: Any) -> None:
    async with (
        entered(real.endpoint) as (ours, session),
        theirs(url(real.endpoint), session) as client,
    ):
        extra = {"extra_body": {"temperature": 0.0}}
        told = [{"role": "system", "content": "Be short."}, *HELLO]
        first = await chat(ours, told, max_tokens=6, temperature=0)
        second = await ask(client, HELLO, system="Be short.", **extra)
        third = await ours.responses.create(
            model="any",
            input=HELLO[0]["content"],
            instructions="Be short.",
            max_output_tokens=6,
            temperature=0,
        )
    texts = [first.choices[0].message.content, second.content[0].text, third.output_text]
    assert texts == [texts[0]] * 3 and texts[0]
    calls = session.recorder.calls
    assert [call.prompt.tolist() for call in calls] == [calls[0].prompt.tolist()] * 3
    assert [call.action.tokens.tolist() for call in calls] == [calls[0].action.tokens.tolist()] * 3
    assert [call.id for call in calls] == [first.id, second.id, third.id]
    read, wrote = len(calls[0].prompt), len(calls[0].action.tokens)
    assert (second.usage.input_tokens, second.usage.output_tokens) == (read, wrote)
    assert (third.usage.input_tokens, third.usage.output_tokens, third.usage.total_tokens) == (
        read, wrote, read + wrote,
    )  # fmt: skip
    ends = {"length": ("max_tokens", "incomplete"), "stop": ("end_turn", "completed")}
    assert (second.stop_reason, third.status) == ends[first.choices[0].finish_reason]


async def test_anthropics_tool_calls_come_back_without_a_token_made_again(tokenizer: Any) -> None:
    async with (
        scripted(tokenizer, f"Let me see.\n{CALL}", "408", "bye") as (ours, session, engine),
        theirs(str(ours.base_url), session) as client,
    ):
        first = await ask(client, HELLO, tools=[THEIRS])
        said, call = first.content
        assert (first.stop_reason, said.text) == ("tool_use", "Let me see.")
        assert (call.name, call.input) == ("calculator", {"expression": "12*34"})
        result = {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": [{"type": "text", "text": "408"}],
        }
        history = [
            *HELLO,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        second = await ask(client, history, tools=[THEIRS])
        more = [
            {"role": "assistant", "content": second.content},
            {"role": "user", "content": "Thanks."},
        ]
        await ask(client, [*history, *more], tools=[THEIRS])
    written = [*engine.requests[0].prompt_token_ids, *session.recorder.calls[0].action.tokens]
    assert engine.requests[1].prompt_token_ids[: len(written)].tolist() == written
    rest = tokenizer.decode(engine.requests[1].prompt_token_ids[len(written) :])
    assert rest == "\n<|im_start|>tool\n408<|im_end|>\n<|im_start|>assistant\n"
    assert len(sequences(session.recorder.calls)) == 1


async def test_anthropics_tokens_are_counted_and_stop_sequences_named(tokenizer: Any) -> None:
    async with (
        scripted(tokenizer, "4 0 8 END 9") as (ours, session, engine),
        theirs(str(ours.base_url), session) as client,
    ):
        counted = await client.messages.count_tokens(model="any", messages=HELLO, tools=[THEIRS])
        answer = await ask(client, HELLO, tools=[THEIRS], stop_sequences=["x", "END"])
    assert (
        counted.input_tokens
        == answer.usage.input_tokens
        == len(engine.requests[0].prompt_token_ids)
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
    assert answer.content[0].text == "4 0 8 "


async def test_responses_with_tools_come_back_as_items_or_by_their_id(tokenizer: Any) -> None:
    async with scripted(tokenizer, f"Let me see.\n{CALL}", "408", "408") as (
        client,
        session,
        engine,
    ):
        options: Any = {"model": "any", "tools": [OURS], "instructions": "Use it."}
        first = await client.responses.create(input=[*HELLO], **options)
        said, call = first.output
        assert (said.content[0].text, call.type, call.name) == (
            "Let me see.",
            "function_call",
            "calculator",
        )
        assert json.loads(call.arguments) == {"expression": "12*34"}
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "408"}
        items = [item.model_dump(exclude_none=True) for item in first.output]
        second = await client.responses.create(input=[*HELLO, *items, result], **options)
        third = await client.responses.create(
            input=[result], previous_response_id=first.id, **options
        )
        assert second.output_text == third.output_text == "408"
        with pytest.raises(openai.NotFoundError, match="is not a stored answer of this episode"):
            await client.responses.create(
                input="?", previous_response_id="resp-e9-i9-r9-c0", **options
            )
    asked = [request.prompt_token_ids.tolist() for request in engine.requests]
    assert asked[1] == asked[2]
    written = [*asked[0], *session.recorder.calls[0].action.tokens]
    assert asked[1][: len(written)] == written


async def test_an_answer_that_is_not_to_be_stored_is_not_gone_on_from(tokenizer: Any) -> None:
    async with scripted(tokenizer, "a") as (client, _, _):
        first = await client.responses.create(model="any", input="x", store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="any", input="y", previous_response_id=first.id)


async def test_what_anthropics_form_asks_for_and_cannot_have_is_refused_by_name(
    tokenizer: Any,
) -> None:
    def user(*blocks: Any) -> Any:
        return {"messages": [{"role": "user", "content": list(blocks)}]}

    refused: list[tuple[dict[str, Any], str]] = [
        ({"extra_body": {"max_tokens": None}}, "max_tokens must be given"),
        ({"extra_body": {"max_token": 3}}, "did you mean max_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking=.* is not supported"),
        ({"tool_choice": {"type": "any"}, "tools": [THEIRS]}, "cannot be enforced"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "It is"}]}, "ends with the model's own message"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "role"),
        (user({"type": "image", "source": PICTURE}), r"content: an image of 2 bytes .* begins with b'hi', which"),
        (user({"type": "image", "source": {"type": "file", "file_id": "a"}}), "an image is bytes, a file, a data: URL"),
        (user({"type": "document", "source": PICTURE}), "type document"),
        (user({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": PICTURE}]}),
         r"content\[0\].content: an image of 2 bytes cannot be decoded"),
        ({"messages": [{"role": "user", "content": "7 " * MAX_MODEL_LEN}]}, "max_model_len"),
    ]  # fmt: skip
    async with (
        scripted(tokenizer) as (ours, session, _),
        theirs(str(ours.base_url), session) as client,
    ):
        for options, problem in refused:
            with pytest.raises(anthropic.BadRequestError, match=problem) as caught:
                await ask(client, **{"messages": HELLO, **options})
            assert caught.value.body["type"] == "error"
            assert caught.value.body["error"]["type"] == "invalid_request_error"
        async with AsyncAnthropic(base_url=str(ours.base_url), api_key="x" * 43) as foreign_origin:
            with pytest.raises(anthropic.AuthenticationError, match="no running episode"):
                await ask(foreign_origin, HELLO)
    assert session.recorder.calls == []


async def test_what_responses_ask_for_and_cannot_have_is_refused_by_name(tokenizer: Any) -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"input": []}, "input must be"),
        ({"background": True}, "background=True is not supported"),
        ({"conversation": "conv_1"}, "conversation="),
        ({"truncation": "auto"}, "truncation="),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tool_choice": "required"}, "cannot be enforced"),
        ({"text": {"format": {"type": "json_object"}}}, "text="),
        (
            {"input": [{"role": "user", "content": [picture]}]},
            "an image of 2 bytes cannot be decoded",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference"),
        ({"extra_body": {"max_tokens": 3}}, "did you mean max_output_tokens"),
    ]
    async with scripted(tokenizer) as (client, session, _):
        for options, problem in refused:
            with pytest.raises(openai.BadRequestError, match=problem):
                await client.responses.create(**{"model": "any", "input": "x", **options})
    assert session.recorder.calls == []


async def test_an_engine_failure_has_the_schema_of_each_api(tokenizer: Any) -> None:
    failure = RuntimeError("out of memory")
    async with scripted(tokenizer, failure, failure) as (ours, session, _):
        async with theirs(str(ours.base_url), session) as client:
            with pytest.raises(anthropic.InternalServerError, match="out of memory") as caught:
                await ask(client, HELLO)
            assert caught.value.body["error"]["type"] == "api_error"
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            await ours.responses.create(model="any", input="x")
    with pytest.raises(RuntimeError, match="out of memory"):
        session.failure.result()
