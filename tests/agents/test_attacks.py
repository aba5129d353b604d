"""Malicious and broken requests at the endpoint, with the real embedded engine.

Each gets an error of its own or a correct answer. The engine and other episodes continue, the event loop is not
blocked, and nothing is kept. Blocking is detected by what the code does, not by the clock.
"""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import threading
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp.compression_utils import ZLibDecompressor
from hypothesis import given, settings
from hypothesis import strategies as st

from skyasync.agents import api, calls, recorder, server
from skyasync.agents.calls import INLINE, MOST_STORED, STORED_CHARACTERS, ModelCall, Session
from skyasync.agents.recorder import AgentChat
from tests.agents.endpoints import HELLO, Scripted, entered, real_endpoint, scripted, url

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

CHAT: dict[str, Any] = {"model": "m", "messages": HELLO, "max_tokens": 1}
APIS: dict[str, dict[str, Any]] = {
    "chat/completions": CHAT,
    "completions": {"model": "m", "prompt": "12 * 34 =", "max_tokens": 1},
    "responses": {"model": "m", "input": "12 * 34 =", "max_output_tokens": 1},
    "messages": CHAT,
    "messages/count_tokens": CHAT,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(model: str, tokenizer: Any) -> AsyncIterator[SimpleNamespace]:
    async with (
        real_endpoint(model, tokenizer) as found,
        entered(found.endpoint) as (_, session),
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {session.api_key}"}) as http,
    ):
        found.session, found.http = session, http
        yield found


async def ask(real: SimpleNamespace, form: str, body: object, **headers: str) -> tuple[int, str]:
    data = body if isinstance(body, bytes) else json.dumps(body)
    async with real.http.post(f"{url(real.endpoint)}/{form}", data=data, headers=headers) as answer:
        return answer.status, await answer.text()


async def check_well(real: SimpleNamespace, asked: object, status: int, said: str) -> None:
    """The answer is no failure, nor is the run's state, and the next request is answered as usual."""
    assert status < 500 and "server_error" not in said and "api_error" not in said, (asked, said)
    assert status == 200 or json.loads(said)["error"]["message"], (asked, said)
    assert not real.session.failure.done(), asked
    assert (await ask(real, "chat/completions", CHAT))[0] == 200, asked


NUMBERS: list[Any] = [
    0, -1, 1, 0.5, 2, 2**31 - 1, 2**31, 2**63, 2**64, 10**30, -(10**30), 10**400, 1e-300, 1e-40, 0.0099, 1e39, 1e300,
    float("nan"), float("inf"),
]  # fmt: skip
EXTREMES = [
    *NUMBERS,
    True,
    None,
    "",
    "x",
    "\ud800",
    "\0",
    [],
    {},
    [[]],
    [None],
    {"a": {}},
    ["x"] * 100,
]
ANYTHING = st.sampled_from(EXTREMES) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
NUMERIC = ("temperature", "top_p", "top_k", "min_p", "min_tokens", "presence_penalty", "frequency_penalty",
           "repetition_penalty", "seed")  # fmt: skip
FIELDS = (
    "stop", "stop_sequences", "logit_bias", "n", "logprobs", "stream", "return_token_ids", "tools", "tool_choice",
    "stream_options", "model", "system", "instructions", "previous_response_id", "store", "parallel_tool_calls",
)  # fmt: skip
PROMPT_FIELDS = ("messages", "input", "prompt")
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "developer"])
ITEMS = st.lists(
    st.fixed_dictionaries({}, optional={"role": ROLES | ANYTHING, "content": st.text(max_size=9) | ANYTHING,
                                        "tool_calls": ANYTHING, "reasoning_content": ANYTHING, "type": st.sampled_from(
        ["message", "function_call", "function_call_output", "reasoning"]) | ANYTHING, "name": ANYTHING,
        "arguments": ANYTHING, "output": ANYTHING, "call_id": ANYTHING}) | ANYTHING, max_size=3)  # fmt: skip
BIAS = st.dictionaries(st.integers(-1, 400).map(str) | st.text(max_size=3), ANYTHING, max_size=3)
VALUES = {
    "logit_bias": BIAS | ANYTHING,
    "n": st.sampled_from([0, 1, 2, 3, 129, 2**63, 0.5, None, "x"]),
}


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    form = draw(st.sampled_from(list(APIS)))
    numbers = draw(st.dictionaries(st.sampled_from(NUMERIC), st.sampled_from(NUMBERS), max_size=2))
    names = draw(st.lists(st.sampled_from(FIELDS), max_size=2, unique=True))
    body = {**APIS[form], **numbers, **{name: draw(VALUES.get(name, ANYTHING)) for name in names}}
    if draw(st.integers(0, 3)) == 0:
        place = next(name for name in PROMPT_FIELDS if name in body)
        body[place] = draw(ITEMS | ANYTHING)
    return form, body


@settings(max_examples=150, deadline=None)
@given(asked=bodies())
async def test_no_request_harms_the_engine_or_the_run(
    real: SimpleNamespace, asked: tuple[str, dict[str, Any]]
) -> None:
    status, said = await ask(real, *asked)
    await check_well(real, asked, status, said)


TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}
DEEP: Any = {}
for _ in range(450):
    DEEP = {"a": [DEEP]}

ATTACKS: list[tuple[str, dict[str, Any], int]] = [
    ("chat/completions", {"top_k": 10**30}, 400),
    ("chat/completions", {"top_k": 2**63}, 400),
    ("chat/completions", {"top_k": 2**31 - 1}, 200),
    ("chat/completions", {"temperature": 1e-40}, 400),
    ("chat/completions", {"temperature": 1e-300}, 400),
    ("chat/completions", {"temperature": 0.01, "repetition_penalty": 100, "logit_bias": {"5": 100}}, 200),
    ("chat/completions", {"repetition_penalty": 1e-40}, 400),
    ("chat/completions", {"repetition_penalty": 1e39}, 400),
    ("chat/completions", {"top_p": 1e-300, "min_p": 1e-300}, 200),
    ("chat/completions", {"min_tokens": 10**30}, 400),
    ("chat/completions", {"seed": 2**62, "n": 4}, 200),
    ("chat/completions", {"seed": 2**63}, 400),
    ("chat/completions", {"logit_bias": {"1": float("nan")}}, 400),
    ("chat/completions", {"logit_bias": {"0" * 5000: 1}}, 400),
    ("chat/completions", {"logit_bias": {str(token): 1 for token in range(5000)}}, 400),
    ("chat/completions", {"logit_bias": {str(10**9 - 1): 1}}, 400),
    ("chat/completions", {"stop": "\ud800"}, 400),
    ("chat/completions", {"stop": "x" * 257}, 400),
    ("chat/completions", {"stop": ["x"] * 65}, 400),
    ("chat/completions", {"stop": ["\0", "é"], "stream": True}, 200),
    ("chat/completions", {"tools": [{**TOOL, "function": {"name": "f", "parameters": DEEP}}]}, 200),
    ("chat/completions", {"messages": [{"role": "user", "content": "7 " * 10_000}]}, 400),
    ("chat/completions", {"messages": [{"role": "user", "content": ""}] * 20_000}, 400),
    ("chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, 400),
    ("chat/completions", {"max_tokens": 10**30}, 400),
    ("chat/completions", {"response_format": DEEP}, 400),
    ("completions", {"prompt": [10**30]}, 400),
    ("completions", {"prompt": [1] * 100_000}, 400),
    ("completions", {"prompt": [True]}, 400),
    ("completions", {"top_k": 10**30, "stream": True}, 400),
    ("responses", {"max_output_tokens": 2**63}, 400),
    ("responses", {"temperature": 1e-40}, 400),
    ("responses", {"input": [{"type": "reasoning", "content": [{"text": "a"}]}] * 20_000}, 200),
    ("responses", {"previous_response_id": "x" * 10_000}, 404),
    ("messages", {"top_k": 10**30}, 400),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 20_000}]}, 400),
    ("messages/count_tokens", {"temperature": 1e-40}, 400),
]  # fmt: skip


@pytest.mark.parametrize(("form", "attack", "status"), ATTACKS, ids=lambda value: repr(value)[:60])
async def test_an_attack_is_answered_and_the_next_request_too(
    real: SimpleNamespace, form: str, attack: dict[str, Any], status: int
) -> None:
    found, said = await ask(real, form, {**APIS[form], **attack})
    assert found == status, said[:500]
    assert len(said) < 5000
    await check_well(real, form, found, said)


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Content-Encoding": "gzip"}, gzip.compress(json.dumps(CHAT).encode(), mtime=0), 415),
        ({"Content-Encoding": "br"}, b"x", 415),
        ({"Content-Type": "application/json; charset=punycode"}, json.dumps(CHAT).encode(), 200),
        ({"Content-Type": "application/json; charset=hex"}, b"\xff" * 9, 400),
        ({"Origin": "http://["}, b"{}", 403),
        ({}, b"x" * (2 * 2**20), 413),
        ({}, b'{"n": ' + b"9" * 5000 + b"}", 400),
    ],
)
async def test_what_a_body_says_of_itself_costs_nothing(
    real: SimpleNamespace, headers: Mapping[str, str], body: bytes, status: int
) -> None:
    found, said = await ask(real, "chat/completions", body, **headers)
    assert found == status, said[:500]
    await check_well(real, headers, found, said)


@pytest.mark.parametrize("key", ["", "x", "the episode's"])
async def test_a_compressed_body_is_never_inflated(
    real: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    inflated = list[int]()
    monkeypatch.setattr(
        ZLibDecompressor,
        "decompress_sync",
        lambda _, data, **more: inflated.append(len(data)) or b"",
    )
    bomb = gzip.compress(b" " * 2**25)
    headers = {"Content-Encoding": "gzip"} | (
        {"Authorization": f"Bearer {key}"} if key != "the episode's" else {}
    )
    async with asyncio.TaskGroup() as group:
        asked = [
            group.create_task(ask(real, "chat/completions", bomb, **headers)) for _ in range(20)
        ]
    assert {task.result()[0] for task in asked} == {415 if key == "the episode's" else 401}
    assert inflated == []


async def test_what_is_too_long_is_not_tokenised_and_what_is_long_is_tokenised_in_a_thread(
    real: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = list[int]()
    prompt = AgentChat.prompt

    def watched(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return prompt(*arguments)

    monkeypatch.setattr(AgentChat, "prompt", watched)
    for content in ("7 " * 10_000, "7" * 500_000):
        status, said = await ask(
            real, "chat/completions", {**CHAT, "messages": [{"role": "user", "content": content}]}
        )
        assert (status, json.loads(said)["error"]["code"]) == (400, "context_length_exceeded")
    assert threads == []
    assert (await ask(real, "chat/completions", CHAT))[0] == 200
    assert threads == [threading.get_ident()]
    long = {**CHAT, "tools": [{**TOOL, "function": {"name": "f", "description": "d" * INLINE}}]}
    assert (await ask(real, "chat/completions", long))[0] == 200
    assert (await ask(real, "messages/count_tokens", {**CHAT, "system": "d" * INLINE}))[0] == 200
    assert len(threads) == 3
    assert threading.get_ident() not in threads[1:]


async def test_the_collector_of_garbage_does_not_walk_through_a_body(
    real: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    collecting = list[bool]()
    loads = json.loads

    def watched(said: Any) -> Any:
        collecting.append(gc.isenabled())
        return loads(said)

    monkeypatch.setattr(api.json, "loads", watched)
    async with real.http.post(
        f"{url(real.endpoint)}/completions", data="[" + "[]," * 1000 + "[]]"
    ) as answer:
        assert answer.status == 400
    assert (collecting, gc.isenabled()) == ([False], True)


async def test_nor_through_the_arguments_of_a_call(
    real: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    collecting = list[bool]()
    loads = json.loads

    def watched(said: Any) -> Any:
        collecting.append(gc.isenabled())
        return loads(said)

    monkeypatch.setattr(api.json, "loads", watched)
    call = {"function": {"name": "f", "arguments": "[[],[]]"}}
    messages = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}, *HELLO]
    assert (await ask(real, "chat/completions", {**CHAT, "messages": messages}))[0] == 200
    assert collecting[:2] == [False, False]


async def test_a_long_request_is_not_read_while_another_of_its_episode_is(
    real: SimpleNamespace,
) -> None:
    long = {**CHAT, "metadata": {"x": "x" * INLINE}}
    async with real.session.reads(None), asyncio.timeout(20):
        waiting = asyncio.create_task(ask(real, "chat/completions", long))
        assert (await ask(real, "chat/completions", CHAT))[0] == 200
        assert not waiting.done()
    assert (await waiting)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("long", [0, 2**20])
async def test_reading_many_replies_does_not_hold_up_the_event_loop(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, stream: bool, long: int
) -> None:
    """Long replies are parsed in a thread; between two short ones other tasks run. Messages are checked once."""
    turns, seen, asked = 0, list[tuple[int, int]](), list[int]()
    read, said = ModelCall._read, calls.conversation

    def reads(*arguments: Any, **options: Any) -> Any:
        seen.append((threading.get_ident(), turns))
        return read(*arguments, **options)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(calls, "LONG_REPLY", long)
    monkeypatch.setattr(ModelCall, "_read", reads)
    monkeypatch.setattr(
        calls, "conversation", lambda *arguments: asked.append(1) or said(*arguments)
    )
    async with (
        scripted(tokenizer, *["7"] * 5) as (client, session, _),
        aiohttp.ClientSession() as http,
    ):
        going_on = asyncio.create_task(others())
        headers = {"Authorization": f"Bearer {session.api_key}"}
        body = {**CHAT, "n": 5, "stream": stream}
        async with http.post(
            f"{client.base_url}chat/completions", json=body, headers=headers
        ) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
        going_on.cancel()
        assert len(session.recorder.calls) == 5
    assert asked == [1]
    assert {thread == threading.get_ident() for thread, _ in seen} == {long > 0}
    assert len({turn for _, turn in seen}) == 5 or not long


async def test_a_long_answer_is_written_as_a_short_one(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[dict[str, Any]]()
    for long in (2**20, 0):
        monkeypatch.setattr(server, "LONG_REPLY", long)
        async with (
            scripted(tokenizer, "7\u00e9") as (client, session, _),
            aiohttp.ClientSession() as http,
        ):
            headers = {"Authorization": f"Bearer {session.api_key}"}
            body = {**CHAT, "logprobs": True}
            async with http.post(
                f"{client.base_url}chat/completions", json=body, headers=headers
            ) as answer:
                assert answer.content_type == "application/json"
                said.append({**await answer.json(), "created": 0})
    assert said[0] == said[1]


@pytest.mark.parametrize("more", [{"logprobs": True}, {"return_token_ids": True}])
async def test_what_is_told_of_each_token_has_a_bound(
    real: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    monkeypatch.setattr(calls, "MOST_LISTED", 12)
    for n, status in ((3, 200), (4, 400)):
        found, said = await ask(real, "chat/completions", {**CHAT, **more, "n": n, "max_tokens": 4})
        assert found == status, said
    assert (await ask(real, "chat/completions", {**CHAT, "n": 4, "max_tokens": 4}))[0] == 200


async def test_nothing_of_a_request_is_kept(real: SimpleNamespace) -> None:
    for number in range(5):
        status, _ = await ask(
            real, "chat/completions", {**CHAT, "stop": [f"{number}-{i}" for i in range(64)]}
        )
        assert status == 200
    await real.engine.progress()
    gc.collect()
    assert len(real.engine.engine._stop_strings) == 0


async def test_stored_answers_of_an_episode_have_a_bound(tokenizer: Any) -> None:
    async with scripted(tokenizer) as (_, session, _):
        for number in range(MOST_STORED + 3):
            session.store(f"resp-{number}", [], 1)
        assert len(session.conversations) == MOST_STORED
        assert "resp-2" not in session.conversations
        assert f"resp-{MOST_STORED + 2}" in session.conversations
        session.store("long", [], STORED_CHARACTERS)
        assert list(session.conversations) == ["long"]
        session.store("longer", [], STORED_CHARACTERS + 1)
        assert not session.conversations


async def test_the_work_of_going_on_from_a_conversation_is_linear_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed = list[int]()
    digest = recorder.sha256

    def watched(data: bytes) -> Any:
        hashed.append(len(data))
        return digest(data)

    monkeypatch.setattr(recorder, "sha256", watched)
    assert recorder.Recorder().extended_by(["a"] * 5000) is None
    assert sum(hashed) < 5000 * 64


async def test_one_episodes_long_requests_do_not_hold_up_those_of_others(
    real: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many requests an episode sends, at most one of them waits before another episode's."""
    order = list[Session]()
    mine = real.endpoint._calls
    monkeypatch.setattr(mine, "_prompt", lambda session, request: order.append(session) or [1])
    async with entered(real.endpoint) as (_, greedy), entered(real.endpoint) as (_, other):
        request = SimpleNamespace(prompt="x", messages=[])
        waiting = [mine.prompt(greedy, request, 2**20) for _ in range(9)]
        await asyncio.gather(*waiting, mine.prompt(other, request, 2**20))
    assert order.index(other) <= 1


async def test_an_engines_word_that_a_request_cannot_be_answered_does_not_end_the_run(
    tokenizer: Any,
) -> None:
    from skyasync.inference.interface import refusal

    class Picky(Scripted):
        async def generate(self, requests: Any) -> Any:
            yield [refusal(request, ValueError("too odd")) for request in requests]

    async with (
        scripted(tokenizer, engine=Picky(tokenizer)) as (client, session, _),
        aiohttp.ClientSession() as http,
    ):
        headers = {"Authorization": f"Bearer {session.api_key}"}
        for stream in (False, True):
            body = {**CHAT, "stream": stream}
            async with http.post(
                f"{client.base_url}chat/completions", json=body, headers=headers
            ) as answer:
                assert answer.status == 400
                assert "too odd" in (await answer.json())["error"]["message"]
        assert not session.failure.done()
        assert session.recorder.calls == []
