"""Unknown clients at the endpoint: browser pages, slow and many connections, keys of other episodes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from skyasync.agents import connection_limits
from skyasync.agents.calls import Session
from skyasync.agents.connection_limits import ConnectionLimits
from skyasync.agents.server import Endpoint
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import SamplingParams
from skyasync.rollout.types import PromptId, TrajectoryId
from tests.agents.endpoints import (
    HELLO,
    MAX_MODEL_LEN,
    Scripted,
    chat,
    entered,
    scripted,
    until,
    url,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED = {"model": "m", "messages": HELLO}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest_asyncio.fixture(loop_scope="module")
async def endpoint(tokenizer: Any) -> AsyncIterator[Endpoint]:
    found = Endpoint(InferenceClient([Scripted(tokenizer, *["7"] * 9)]), tokenizer, MAX_MODEL_LEN)
    await found.start()
    yield found
    await found.close()


class AnyKey(Endpoint):
    """Takes any key, so that only the check of the request's origin can reject it."""

    @contextmanager
    def entered(self, request: web.Request) -> Iterator[Session]:
        yield Session(TrajectoryId(PromptId(0, 0), 0), SamplingParams(), "endpoint")


async def ended(reader: asyncio.StreamReader, within_s: float = 5.0) -> bytes:
    """The server's bytes until it closes the connection."""
    try:
        async with asyncio.timeout(within_s):
            return await reader.read()
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:80"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:80", "Origin": "http://evil.example:80"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
    ],
)
async def test_a_browsers_page_is_refused_even_where_any_key_is_taken(
    tokenizer: Any, headers: dict[str, str], status: int
) -> None:
    engine = Scripted(tokenizer, "7")
    endpoint = AnyKey(InferenceClient([engine]), tokenizer, MAX_MODEL_LEN)
    await endpoint.start()
    where = f"{url(endpoint)}/chat/completions"
    async with (
        aiohttp.ClientSession() as http,
        http.post(where, json=ASKED, headers=headers) as answer,
    ):
        said = await answer.json()
        assert answer.status == status, said
        assert len(engine.requests) == (status == 200)
        if status == 403:
            assert "header is" in said["error"]["message"]
    await endpoint.close()


@pytest.mark.parametrize("said", [b"", HEAD, HEAD + b"X: 1\r\n"])
async def test_who_does_not_come_to_the_point_is_hung_up_on(
    endpoint: Endpoint, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "HEAD_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    writer.write(said)
    assert await ended(reader) == b""
    writer.close()


async def test_the_second_request_of_a_connection_has_a_limit_too(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "IDLE_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n" + HEAD)
    assert (await ended(reader)).startswith(b"HTTP/1.1 401")
    writer.close()


async def test_a_body_that_does_not_come_is_not_waited_for(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "BODY_S", 0.1)
    async with entered(endpoint) as (_, session):
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        key = f"Authorization: Bearer {session.api_key}\r\n".encode()
        writer.write(HEAD + key + b"Content-Length: 100\r\n\r\n{")
        line = await reader.readline()
        assert line.startswith(b"HTTP/1.1 408")
        await until(lambda: not session.handlers)
        writer.close()


async def test_the_body_of_a_request_without_a_key_is_not_read(endpoint: Endpoint) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    writer.write(HEAD + b"Content-Length: 30000000\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 401")
    writer.close()


async def test_a_call_may_take_longer_than_a_request_may_take_to_come(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "HEAD_S", 0.05)

    class Slow(Scripted):
        async def generate(self, requests: Any) -> Any:
            await asyncio.sleep(0.2)
            async for outputs in super().generate(requests):
                yield outputs

    async with scripted(tokenizer, engine=Slow(tokenizer, "7")) as (client, _, _):
        assert (await chat(client.with_options(max_retries=0), HELLO)).choices[
            0
        ].message.content == "7"


async def test_clients_without_a_key_cannot_use_up_the_runs_descriptors(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "_limits", endpoint._limits)
    endpoint._limits._capacity = 3
    held = [await asyncio.open_connection("127.0.0.1", endpoint.port) for _ in range(3)]
    await until(lambda: len(endpoint._limits._open) == 3)
    _, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    assert await ended(held[0][0]) == b""
    assert len(endpoint._limits._open) == 3
    writer.close()
    for _, each in held:
        each.close()
    await until(lambda: not endpoint._limits._open)
    async with aiohttp.ClientSession() as http, http.get(f"{url(endpoint)}/models") as answer:
        assert answer.status == 401
    assert ConnectionLimits().loopback is False


async def test_clients_without_a_key_do_not_shut_out_episodes(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that has shown a key keeps its connection, and a new one with a key gets in."""
    monkeypatch.setattr(endpoint._limits, "_capacity", 3)
    async with entered(endpoint) as (_, session):
        asked = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nx-api-key: {session.api_key}\r\n\r\n".encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        held = list[Any]()
        for without_key in (9, 9, 0):
            writer.write(asked)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            await reader.readuntil(b"}]}")
            held += [
                await asyncio.open_connection("127.0.0.1", endpoint.port)
                for _ in range(without_key)
            ]
        late, further = await asyncio.open_connection("127.0.0.1", endpoint.port)
        further.write(asked)
        assert (await late.readline()).startswith(b"HTTP/1.1 200")
        assert len(endpoint._limits._open) <= 3


async def test_a_flood_of_connections_is_let_in_bit_by_bit(endpoint: Endpoint) -> None:
    """All of them wait in the kernel, and the event loop keeps running."""
    flood = [socket.create_connection(("127.0.0.1", endpoint.port), timeout=5) for _ in range(300)]
    known, most = len(endpoint._limits._open), 0
    while known < len(flood):
        await asyncio.sleep(0)
        known, most = len(endpoint._limits._open), max(most, len(endpoint._limits._open) - known)
    assert most <= 2 * connection_limits.ACCEPTED_AT_ONCE
    for each in flood:
        each.close()
    await until(lambda: not endpoint._limits._open)


async def test_what_is_no_http_fills_no_log(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    for said in (HEAD + b"X: " + b"x" * 9000 + b"\r\n\r\n", HEAD + b"Content-Length: -1\r\n\r\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        writer.write(said)
        assert b" 400 " in await reader.readline()
        writer.close()
    assert caplog.records == []


async def test_an_episodes_answers_cannot_be_gone_on_from_with_anothers_key(tokenizer: Any) -> None:
    engine = Scripted(tokenizer, "7", "8")
    async with scripted(tokenizer, engine=engine) as (client, _, _):
        first = await client.responses.create(model="m", input="12 * 34 =")
        where = f"{client.base_url}responses"
        headers = {"Authorization": f"Bearer {client.api_key[:-1]}x"}
        body = {"model": "m", "input": "and?", "previous_response_id": first.id}
        async with (
            aiohttp.ClientSession() as http,
            http.post(where, json=body, headers=headers) as answer,
        ):
            assert answer.status == 401
    assert len(engine.requests) == 1


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("turns", range(4))
async def test_who_comes_while_it_closes_is_hung_up_on(tokenizer: Any, turns: int) -> None:
    """In every state of a connection: waiting, accepted, served."""
    endpoint = Endpoint(InferenceClient([Scripted(tokenizer)]), tokenizer, MAX_MODEL_LEN)
    await endpoint.start()
    address = ("127.0.0.1", int(endpoint.base_url.split(":")[2].removesuffix("/v1")))
    callers = [socket.create_connection(address, timeout=5) for _ in range(5)]
    for caller in callers:
        caller.sendall(HEAD)
    for _ in range(turns):
        await asyncio.sleep(0)
    await endpoint.close()
    for caller in callers:
        with caller, suppress(ConnectionResetError):
            assert await asyncio.to_thread(caller.recv, 1) == b""
