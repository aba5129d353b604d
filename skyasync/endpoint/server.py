"""An endpoint over the inference client: whatever takes a base URL and a key becomes a rollout.

    agent program ── HTTP, its episode's key ──▶ Endpoint ─ form ─▶ OneCall ──▶ InferenceClient ──▶ engines
                                                                        └──▶ the episode's Recorder

Invariant: a key opens one episode and nothing else, for as long as the episode lasts; every answer that is sent is
recorded there, with the tokens that the engine read and wrote. When an episode ends its key is dead, its calls are
ended in the engine, and nothing is recorded any more. An engine's failure is the run's, whatever the program makes of
the error it is sent.

| who waits         | for what                | woken by                                                           |
|-------------------|-------------------------|--------------------------------------------------------------------|
| a call's handler  | the engine's answer     | the client (answer, error, its own time limit); hanging up and the |
|                   |                         | end of the episode cancel the handler, which aborts in the engine  |
| ``session``'s end | its handlers to be gone | each of them, once cancelled                                       |
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from hashlib import sha256
from typing import Protocol

from aiohttp import web
from aiohttp.typedefs import Handler

from skyasync.endpoint.agent_chat import AgentChat
from skyasync.endpoint.calls import Calls
from skyasync.endpoint.door import UNREAD, Door, middleware
from skyasync.endpoint.forms.chat import ChatForm
from skyasync.endpoint.forms.inner import Form, RequestError
from skyasync.endpoint.forms.messages import MessagesForm
from skyasync.endpoint.forms.responses import ResponsesForm
from skyasync.endpoint.forms.text import TextForm
from skyasync.endpoint.parsers import reasoning_parser, tool_parser
from skyasync.endpoint.parsers.reader import Reader
from skyasync.endpoint.sending import as_request_error, body_of, send
from skyasync.endpoint.session import Session
from skyasync.engines.client import InferenceClient
from skyasync.engines.protocol import SamplingParams
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.rollout.types import TrajectoryId
from skyasync.utils.task_group import afterwards

LOOPBACK = "127.0.0.1"
ANY_ADDRESS = ("0.0.0.0", "::", "")
MODEL = "policy"  # what the endpoint calls the policy; requests may call it anything
WAITING_CONNECTIONS = 4096  # a batch of episodes calls at once
GRACE_S = 5.0  # for connections that are open when the endpoint closes

_MESSAGES = MessagesForm()
#: Anthropic's clients put /v1 in front of their paths themselves.
FORMS: dict[str, Form] = {
    "/v1/chat/completions": ChatForm(),
    "/v1/completions": TextForm(),
    "/v1/responses": ResponsesForm(),
    "/v1/messages": _MESSAGES,
    "/v1/v1/messages": _MESSAGES,
}
_COUNTS = ("/v1/messages/count_tokens", "/v1/v1/messages/count_tokens")


class Lobby(Protocol):
    """What else the endpoint serves."""

    def routes(self, endpoint: Endpoint) -> Sequence[web.RouteDef]: ...
    async def listening(self, base_url: str) -> None: ...


class Endpoint:
    """The server. It listens from ``start`` to ``close``.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        max_model_len: most tokens of a prompt and its reply together.
        host: the address to listen on; by default no other machine can reach it.
        port: 0 is one of the system's choice.
        tools: ``generator.tool_parser``.
        reasoning: ``generator.reasoning_parser``.
        lobby: lets programs in that the run has not started.

    Raises:
        UserError: for a parser that there is not.
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
        lobby: Lobby | None = None,
    ) -> None:
        reader = Reader(tokenizer, tool_parser(tools, tokenizer), reasoning_parser(reasoning, tokenizer))
        self._calls = Calls(client, AgentChat(tokenizer), reader, max_model_len)
        self._host, self._asked_port, self._port, self._lobby = host, port, 0, lobby
        self._sessions: dict[bytes, Session] = {}  # by a digest of their keys
        self._runner: web.AppRunner | None = None
        self._door = Door()
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Listen, if it does not yet."""
        async with self._starting:
            if self._runner is not None:
                return
            door = Door()
            runner = self._serving(door)
            await runner.setup()
            self._runner, self._door = runner, door
            self._port = await self._listen(door, runner)
            if self._lobby is not None:
                await self._lobby.listening(self.base_url)

    def _serving(self, door: Door) -> web.AppRunner:
        app = web.Application(client_max_size=self._calls.most_bytes, middlewares=[_in_its_form, middleware(door)])
        app.router.add_get("/v1/models", self._models)
        for path in FORMS:
            app.router.add_post(path, self._answer)
        for path in _COUNTS:
            app.router.add_post(path, self._count)
        if self._lobby is not None:
            app.router.add_routes(self._lobby.routes(self))
        # Who hangs up waits for no answer: none is computed, and what was not told is not recorded.
        return web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=GRACE_S, **UNREAD)

    async def _listen(self, door: Door, runner: web.AppRunner) -> int:
        return await door.open(runner, self._host, self._asked_port, backlog=WAITING_CONNECTIONS)

    @property
    def port(self) -> int:
        """0 while nothing listens."""
        return self._port

    @property
    def base_url(self) -> str:
        """What programs give their clients. One that listens on all addresses is reached at this machine's own."""
        return f"http://{_own_address() if self._host in ANY_ADDRESS else self._host}:{self._port}/v1"

    async def close(self) -> None:
        """End all calls and stop listening. Safe to call twice."""
        runner, self._runner, self._port = self._runner, None, 0
        await self._door.close()
        for session in list(self._sessions.values()):
            await self._end(session)
        if runner is not None:
            await runner.cleanup()
        await self._calls.news.close()

    @asynccontextmanager
    async def session(
        self, identity: TrajectoryId, sampling: SamplingParams, affinity: str | None = None, reads_behaviour: str = ""
    ) -> AsyncIterator[Session]:
        """An episode; ``sampling`` holds where its requests say nothing. The others as ``Session`` has them."""
        session = Session(identity, sampling, affinity, reads_behaviour)
        self._sessions[_digest(session.api_key)] = session
        async with afterwards(self._end, session):
            yield session

    async def _end(self, session: Session) -> None:
        session.over = True
        self._sessions.pop(_digest(session.api_key), None)
        for task in session.handlers:
            task.cancel()
        if session.handlers:
            await asyncio.wait(set(session.handlers))

    @contextmanager
    def entered(self, request: web.Request) -> Iterator[Session]:
        """The episode whose key the request has; the block ends with the episode.

        The key is looked up by its digest and then compared in constant time: neither tells how near a guess is.
        """
        key = key_of(request)
        session = self._sessions.get(_digest(key))
        if session is None or session.over or not same(key, session.api_key):
            problem = "the API key is that of no running episode (an episode's key ends with it)"
            raise RequestError(problem, code="invalid_api_key", status=401)
        task = asyncio.current_task()
        assert task is not None
        self._door.know(request)
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
        form = FORMS[request.path]
        with self.entered(request) as session:
            async with session.reads(request.content_length):
                asked = form.read(await body_of(request), session)
                call = await self._calls.open(session, asked, form.prefix, size=len(await request.read()))
            return await send(request, call, form)

    async def _count(self, request: web.Request) -> web.Response:
        """How many tokens a prompt of Anthropic's form has."""
        with self.entered(request) as session:
            async with session.reads(request.content_length):
                asked = _MESSAGES.read_prompt(await body_of(request), session)
                prompt = await self._calls.prompt(session, asked, size=len(await request.read()))
            return web.json_response({"input_tokens": len(prompt)})


@web.middleware
async def _in_its_form(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error as the clients of its form expect it; those of the engine are not worth another try."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        found = RequestError(f"{error.reason} ({request.method} {request.path})", status=error.status)
    except Exception as error:
        found = as_request_error(error)
    form = _MESSAGES if "/messages" in request.path else FORMS["/v1/chat/completions"]
    answer = web.json_response(form.error(found), status=found.status, headers={"x-should-retry": "false"})
    if not request.content.is_eof():
        answer.force_close()
    return answer


def key_of(request: web.Request) -> str:
    """The key of a request, as OpenAI's clients send it or as Anthropic's do."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _own_address() -> str:
    """This machine's address towards others; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address for documentation, which no machine has
        return str(probe.getsockname()[0])


def _digest(key: str) -> bytes:
    return sha256(key.encode(errors="surrogateescape")).digest()


def same(key: str, another: str) -> bool:
    """Whether two keys are one, told in a time that does not say how far they agree."""
    return hmac.compare_digest(key.encode(errors="surrogateescape"), another.encode())
