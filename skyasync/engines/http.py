"""How an inference server is asked by HTTP, whoever has made it, and what has come of each request to it.

Invariant: a server that cannot be reached, or that ends in the middle of an answer, is ``EngineDiedError``; one that
refuses is an error in its own words. Nothing is sent twice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import numpy as np

from skyasync.arrays import Ints, floats, ints
from skyasync.engines.protocol import EngineDiedError, GenerationOutput, GenerationRequest

CONNECT_S = 10.0
KEPT_S = 2.0  # an idle connection; the server closes it after five, and must not do so under a request
LONGEST_LINE = 2**25  # bytes; a token of a chunk takes about 80


class Server:
    """Args: kind: whose server it is, in messages. url: ``http://host:port``. key: what the server asks for, if it
    does; it stands in no message. dead: words of a refusal by which the server says that its core is no more."""

    def __init__(self, kind: str, url: str, key: str = "", dead: Sequence[str] = ()) -> None:
        self.url, self._key, self._dead = url.rstrip("/"), key, dead
        self.name = f"the {kind} server {self.url}"
        self._session: aiohttp.ClientSession | None = None

    async def post(self, route: str, body: Mapping[str, Any] | None = None, **query: str) -> Any:  # noqa: ANN401  (JSON)
        return await self._ask("POST", route, body, query)

    async def get(self, route: str, **query: str) -> Any:  # noqa: ANN401  (JSON)
        return await self._ask("GET", route, None, query)

    async def text(self, route: str) -> str:
        """An answer that is no JSON; empty where there is no such route."""
        try:
            async with self._connections.get(self.url + route) as response:
                return await response.text() if response.status < 400 else ""
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            raise self.died(error) from error

    async def chunks(self, route: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The pieces of a streamed answer. Leaving the iteration early has the server end the request."""
        try:
            async with self._connections.post(self.url + route, json=body) as response:
                await self._refuse_errors(response, route)
                async for line in response.content:
                    if not line.startswith(b"data: "):
                        continue
                    data = line.removeprefix(b"data: ").strip()
                    if data == b"[DONE]":
                        return
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise self._said(route, chunk)
                    yield chunk
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            raise self.died(error) from error
        raise self.died("the connection closed in the middle of a streamed response")

    async def close(self) -> None:
        """Safe to call twice."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def died(self, why: object) -> EngineDiedError:
        found = f"{type(why).__name__}: {why}" if isinstance(why, BaseException) else why
        return EngineDiedError(f"{self.name} does not answer: {found}")

    @property
    def _connections(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S)
            limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=limits, read_bufsize=LONGEST_LINE, headers=headers
            )
        return self._session

    async def _ask(self, method: str, route: str, body: Mapping[str, Any] | None, query: dict[str, str]) -> Any:  # noqa: ANN401
        try:
            async with self._connections.request(method, self.url + route, json=body, params=query) as response:
                await self._refuse_errors(response, route)
                return await response.json(content_type=None)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            raise self.died(error) from error

    async def _refuse_errors(self, response: aiohttp.ClientResponse, route: str) -> None:
        if response.status < 400:
            return
        text = await response.text()
        try:
            found = json.loads(text)
        except ValueError:
            found = text
        raise self._said(route, found, response.status)

    def _said(self, route: str, answer: object, status: int = 0) -> Exception:
        """What a refusal is here."""
        inner = answer.get("error", answer) if isinstance(answer, dict) else answer
        text = str(inner.get("message", inner) if isinstance(inner, dict) else inner).strip()
        what = f"{self.name}{route} answers{f' {status}' if status else ''}: {text[:400]}"
        if any(words in text for words in self._dead):
            return EngineDiedError(what)
        return RuntimeError(what)


@dataclass(eq=False)
class Begun:
    """A request at the server: what has come of it.

    Args:
        version: of the server's weights when it was sent.

    Attributes:
        certain: how many tokens are surely of that version, once others may have come.
        left: why it was given up before it had a token: to be sent ``again``, or ``ended``.
        playing: what listens to its answer.
        name: that it has at the server, where that is not its own; empty before it is sent.
    """

    request: GenerationRequest
    version: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    told: int = 0
    certain: int | None = None
    left: Literal["", "again", "ended"] = ""
    playing: asyncio.Task[GenerationOutput] | None = None
    name: str = ""

    def leave(self, why: Literal["again", "ended"]) -> None:
        """Hang up, by which the server ends it."""
        self.left = why
        if self.playing is not None:
            self.playing.cancel()

    def hear(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """What is new of its answer."""
        if len(logprobs) != len(tokens):
            raise RuntimeError(
                f"{len(tokens)} tokens of {self.request.request_id} have {len(logprobs)} log-probabilities"
            )
        self.tokens += tokens
        self.logprobs += logprobs

    def news(self) -> GenerationOutput | None:
        """What has come since the last call and is surely of the version that it was sent under."""
        first, last = self.told, len(self.tokens) if self.certain is None else self.certain
        if last <= first:
            return None
        self.told = last
        return GenerationOutput(
            self.request.request_id,
            ints(self.tokens[first:last]),
            floats(self.logprobs[first:last]),
            np.full(last - first, self.version, dtype=np.int32),
        )


def versions_of(spans: Sequence[Mapping[str, Any]] | None, count: int) -> Ints | None:
    """The version of each of ``count`` tokens; None where the server has weights that no run gave it a version of."""
    found = [int(s["version"]) if str(s["version"]).isdecimal() else None for s in spans or ()]
    lengths = [span["end"] - span["start"] for span in spans or ()]
    if sum(lengths) < count or None in found:
        return None
    return np.repeat(ints([version or 0 for version in found]), ints(lengths))[:count]
