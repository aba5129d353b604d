"""The endpoint of agent programs: one that takes a base URL and a key becomes a rollout.

    agent program ── HTTP, its key ──▶ Endpoint ─ API ─▶ ModelCall ──▶ InferenceClient ──▶ engines
                                                                       └──▶ the episode's Recorder

Invariant: a key opens one episode and nothing else, for as long as the episode lasts; every answer
that is sent is recorded there, with the tokens that the engine read and wrote. When an episode ends
its key is invalid, its calls are aborted in the engine, and nothing is recorded any more. An
engine's failure is the run's, whatever the program makes of the error it is sent. An error that is
known before the first token has an error's status; a later one is an event of the stream. If a
client hangs up, its call ends, and what had been sent is recorded.

| who waits         | for what                | woken by                                                            |
|-------------------|-------------------------|---------------------------------------------------------------------|
| a call's handler  | the engine's answer     | the client (answer, error, time limit); hanging up and the end of   |
|                   |                         | the episode cancel the handler, which aborts in the engine          |
| ``session``'s end | its handlers to be gone | each of them, once cancelled                                        |
"""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from hashlib import sha256
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Handler

from skyasync.agents.api import Api, ModelReply, RequestError
from skyasync.agents.api.chat import ChatApi, CompletionsApi
from skyasync.agents.api.messages import CountTokensApi, MessagesApi
from skyasync.agents.api.responses import ResponsesApi
from skyasync.agents.calls import LONG_REPLY, Calls, ModelCall, Session
from skyasync.agents.connection_limits import RUNNER_OPTIONS, ConnectionLimits, read_json
from skyasync.agents.parsers import ReplyParser, reasoning_parser, tool_parser
from skyasync.agents.recorder import AgentChat
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import SamplingParams
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.rollout.types import TrajectoryId
from skyasync.utils.task_group import afterwards

if TYPE_CHECKING:
    from skyasync.agents.external_sessions import SessionBroker

LOOPBACK = "127.0.0.1"
ANY_ADDRESS = ("0.0.0.0", "::", "")
MODEL = "policy"  # the endpoint's name for the policy; requests may call it anything
WAITING_CONNECTIONS = 4096  # the episodes of a batch may all connect at once

#: By path. Anthropic's clients put /v1 in front of their paths themselves.
APIS: dict[str, type[Api]] = {
    "/v1/chat/completions": ChatApi,
    "/v1/completions": CompletionsApi,
    "/v1/responses": ResponsesApi,
    "/v1/messages": MessagesApi,
    "/v1/v1/messages": MessagesApi,
    "/v1/messages/count_tokens": CountTokensApi,
    "/v1/v1/messages/count_tokens": CountTokensApi,
}
_ENCODER = json.JSONEncoder()  # ``iterencode`` is Python: other threads run meanwhile


class Endpoint:
    """The server. It listens from ``start`` to ``close``.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        max_model_len: most tokens of a prompt and its reply together.
        host: the address to listen on; by default no other machine can reach it.
        port: 0 is one of the system's choice.
        tools: ``generator.tool_parser``.
        reasoning: ``generator.reasoning_parser``.
        broker: gives sessions to programs that the run has not started.

    Raises:
        UserError: for a parser that does not exist.
    """

    def __init__(
        self,
        client: InferenceClient,
        tokenizer: Tokenizer,
        max_model_len: int,
        host: str = LOOPBACK,
        *,
        port: int = 0,
        tools: str = "hermes",
        reasoning: str = "",
        broker: SessionBroker | None = None,
    ) -> None:
        parser = ReplyParser(
            tokenizer, tool_parser(tools, tokenizer), reasoning_parser(reasoning, tokenizer)
        )
        self._calls = Calls(client, AgentChat(tokenizer), parser, max_model_len)
        self._host = host
        self._requested_port = port
        self._broker = broker
        self.port = 0  # while nothing listens
        self._sessions: dict[bytes, Session] = {}  # by a digest of their keys
        self._runner: web.AppRunner | None = None
        self._limits = ConnectionLimits()
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Listen, if it does not yet."""
        async with self._starting:
            if self._runner is not None:
                return
            app = web.Application(
                client_max_size=self._calls.most_bytes,
                middlewares=[_api_errors, self._limits.middleware],
            )
            app.router.add_get("/v1/models", self._models)
            for path in APIS:
                app.router.add_post(path, self._answer)
            if self._broker is not None:
                app.router.add_routes(self._broker.routes(self))
            # If a client hangs up, no answer is computed, and the part not sent is not recorded.
            runner = web.AppRunner(app, **RUNNER_OPTIONS)
            await runner.setup()
            self._runner = runner
            self.port = await self._limits.open(
                runner, self._host, self._requested_port, backlog=WAITING_CONNECTIONS
            )
            if self._broker is not None:
                self._broker.publish_address(self.base_url)

    @property
    def base_url(self) -> str:
        """The base URL for programs' clients, with this machine's address if it listens on all."""
        host = self._host
        if host in ANY_ADDRESS:
            # The address from which this machine would reach another one. Nothing is sent, and no
            # machine has this address, which is for documentation (RFC 5737).
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect(("192.0.2.1", 9))
                host = str(probe.getsockname()[0])
        return f"http://{in_url(host)}:{self.port}/v1"

    async def close(self) -> None:
        """End all calls and stop listening. Safe to call twice."""
        runner = self._runner
        self._runner = None
        self.port = 0
        # First no new connections, then the ends of the calls: the runner waits for handlers.
        await self._limits.close()
        for session in list(self._sessions.values()):
            await self._end(session)
        if runner is not None:
            await runner.cleanup()
        await self._calls.poller.close()

    @asynccontextmanager
    async def session(
        self,
        identity: TrajectoryId,
        sampling: SamplingParams,
        affinity: str | None = None,
        reads_behaviour: str = "",
    ) -> AsyncIterator[Session]:
        """An episode at the endpoint, from the beginning to the end of the block.

        Args:
            sampling: holds for the fields that a request leaves out.
            affinity: see ``Session``.
            reads_behaviour: see ``Session``.
        """
        session = Session(identity, sampling, affinity, reads_behaviour)
        self._sessions[_digest(session.api_key)] = session
        async with afterwards(self._end, session):
            yield session

    async def _end(self, session: Session) -> None:
        """Make the key invalid and end the calls; returns when their handlers have ended."""
        session.over = True  # before the handlers are cancelled: they must record no more
        self._sessions.pop(_digest(session.api_key), None)
        for task in session.handlers:
            task.cancel()
        if session.handlers:
            await asyncio.wait(set(session.handlers))

    @contextmanager
    def entered(self, request: web.Request) -> Iterator[Session]:
        """The episode whose key the request has; the end of the episode cancels the block.

        The key is looked up by its digest and then compared in constant time: the time of neither
        says how near a guess is.
        """
        key = key_of(request)
        session = self._sessions.get(_digest(key))
        if session is None or session.over or not same_key(key, session.api_key):
            problem = "the API key is that of no running episode (an episode's key ends with it)"
            raise RequestError(problem, code="invalid_api_key", status=401)
        task = asyncio.current_task()
        assert task is not None
        self._limits.has_key(request)
        session.handlers.add(task)
        try:
            yield session
        finally:
            session.handlers.discard(task)

    async def _models(self, request: web.Request) -> web.Response:
        with self.entered(request):
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "skyasync"}
            return web.json_response({"object": "list", "data": [model]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        api_class = APIS[request.path]
        with self.entered(request) as session:
            async with session.reads(request.content_length):
                api = api_class(await read_json(request), session)
                size = len(await request.read())  # aiohttp has stored the body
                if api.counts_tokens:
                    prompt = await self._calls.prompt(session, api.request, size)
                    return web.json_response({"input_tokens": len(prompt)})
                call = await self._calls.open(session, api.request, api.prefix, size)
            if api.request.stream:
                return await _send_stream(request, call, api)
            replies = await call.answered()
            if call.head.completion_tokens <= LONG_REPLY:
                return web.json_response(api.answer(call.head, replies))
            # In a thread: a long answer would block the event loop.
            text = await asyncio.to_thread(_encoded, api, call, replies)
            return web.Response(text=text, content_type="application/json")


def _encoded(api: Api, call: ModelCall, replies: Sequence[ModelReply]) -> str:
    """The answer as JSON, encoded in Python: json.dumps would hold the interpreter's lock."""
    return "".join(_ENCODER.iterencode(api.answer(call.head, replies)))


# ---------------------------------------------------------------- requests


def in_url(host: str) -> str:
    """An address as URLs have it: those of IPv6 stand in brackets."""
    if ":" in host:
        return f"[{host}]"
    return host


def key_of(request: web.Request) -> str:
    """The key of a request, as OpenAI's clients send it or as Anthropic's do."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key
    return request.headers.get("x-api-key", "")


def same_key(key: str, valid_key: str) -> bool:
    """Whether two keys are equal, in a time that does not depend on how far they agree."""
    # Headers may have bytes that are no UTF-8, which aiohttp decodes as surrogates.
    return hmac.compare_digest(key.encode(errors="surrogateescape"), valid_key.encode())


def _digest(key: str) -> bytes:
    return sha256(key.encode(errors="surrogateescape")).digest()


# ---------------------------------------------------------------- answers


class ClientGoneError(Exception):
    """The client has hung up."""


async def _send_stream(request: web.Request, call: ModelCall, api: Api) -> web.StreamResponse:
    """The response begins with the first event; an error before it is an ordinary one."""
    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    ended = set[int]()  # indexes of the replies that are complete

    async def send(events: str) -> None:
        try:
            if not response.prepared:
                await response.prepare(request)
            if events:
                await response.write(events.encode())
        except ConnectionError as error:
            raise ClientGoneError from error

    try:
        async with aclosing(call.updates()) as updates:
            async for replies in updates:
                if not response.prepared:
                    await send(api.begin(call.head))
                for reply in replies:
                    await asyncio.sleep(0)  # other tasks run between two long replies
                    if reply.index not in ended:
                        await send(api.update(reply))
                        if reply.finish_reason:
                            ended.add(reply.index)
        await send(api.end(call.head, replies))
    except ClientGoneError:
        return response
    except Exception as error:
        if not response.prepared:  # the error has a status of its own
            raise
        with suppress(ClientGoneError):
            await send(api.fail(_as_request_error(error)))
    with suppress(ConnectionError):
        await response.write_eof()
    return response


def _as_request_error(error: Exception) -> RequestError:
    """The error that a program is sent."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, RecursionError):
        return RequestError("the request is nested too deeply")
    return RequestError(f"{type(error).__name__}: {error}", status=500)


@web.middleware
async def _api_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Send every error in the schema of its API.

    Clients are told not to try again: the engine's failure is the run's.
    """
    try:
        return await handler(request)
    except web.HTTPException as error:  # no such address, wrong method, too long
        problem = RequestError(
            f"{error.reason} ({request.method} {request.path})", status=error.status
        )
    except Exception as error:
        problem = _as_request_error(error)
    api = MessagesApi if "/messages" in request.path else Api
    answer = web.json_response(
        api.error(problem), status=problem.status, headers={"x-should-retry": "false"}
    )
    if not request.content.is_eof():  # the rest of the body is not read
        answer.force_close()
    return answer
