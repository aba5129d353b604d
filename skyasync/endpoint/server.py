"""An OpenAI-compatible endpoint over the inference client: whatever takes a base URL and a key becomes a rollout.

    agent program ── HTTP, its episode's key ──▶ Endpoint ──▶ InferenceClient ──▶ engines
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
import json
import socket
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from hashlib import sha256
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from skyasync.arrays import Ints, ints
from skyasync.cleanup import afterwards
from skyasync.endpoint import reply as reply
from skyasync.endpoint.agent_chat import AgentChat, conversation
from skyasync.endpoint.recorder import Call
from skyasync.endpoint.request import Asked, ChatRequest, RequestError, chat_request, completion_request
from skyasync.endpoint.session import Session
from skyasync.engines.client import InferenceClient
from skyasync.engines.protocol import GenerationOutput, SamplingParams
from skyasync.envs.tools import read_tool_calls
from skyasync.rollout.chat import Tools
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.rollout.types import Segment, TrajectoryId

LOOPBACK = "127.0.0.1"
ANY_ADDRESS = ("0.0.0.0", "::", "")
MODEL = "policy"  # what the endpoint calls the policy; requests may call it anything
MOST_BYTES = 32 * 1024**2  # of a request: a conversation of millions of tokens
WAITING_CONNECTIONS = 4096  # a batch of episodes calls at once
GRACE_S = 5.0  # for connections that are open when the endpoint closes


class Endpoint:
    """The server. It listens from ``start`` to ``close``, on a port of the system's choice.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        max_model_len: most tokens of a prompt and its reply together.
        host: the address to listen on; by default no other machine can reach it.
    """

    def __init__(self, client: InferenceClient, tokenizer: Tokenizer, max_model_len: int, host: str = LOOPBACK) -> None:
        self._client, self._tokenizer, self._chat = client, tokenizer, AgentChat(tokenizer)
        self._max_model_len, self._host, self._port = max_model_len, host, 0
        self._sessions: dict[bytes, Session] = {}  # by a digest of their keys
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Listen, if it does not yet."""
        async with self._starting:
            if self._runner is not None:
                return
            app = web.Application(client_max_size=MOST_BYTES, middlewares=[_in_openai_form])
            app.router.add_get("/v1/models", self._models)
            app.router.add_post("/v1/chat/completions", self._chat_completions)
            app.router.add_post("/v1/completions", self._completions)
            # Who hangs up waits for no answer: none is computed, and none is recorded.
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=GRACE_S)
            await runner.setup()
            self._runner = runner
            await self._listen(runner)
            self._port = runner.addresses[0][1]

    async def _listen(self, runner: web.AppRunner) -> None:
        await web.TCPSite(runner, self._host, 0, backlog=WAITING_CONNECTIONS).start()

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
        for session in list(self._sessions.values()):
            await self._end(session)
        if runner is not None:
            await runner.cleanup()

    @asynccontextmanager
    async def session(
        self, identity: TrajectoryId, sampling: SamplingParams, affinity: str | None = None
    ) -> AsyncIterator[Session]:
        """An episode; ``sampling`` holds where its requests say nothing."""
        session = Session(identity, sampling, affinity)
        self._sessions[_digest(session.api_key)] = session
        async with afterwards(self._end, session):
            yield session

    async def _end(self, session: Session) -> None:
        self._sessions.pop(_digest(session.api_key), None)
        for task in session.handlers:
            task.cancel()
        if session.handlers:
            await asyncio.wait(set(session.handlers))

    @contextmanager
    def _entered(self, request: web.Request) -> Iterator[Session]:
        """The episode whose key the request has; the block ends with the episode.

        The key is looked up by its digest and then compared in constant time: neither tells how near a guess is.
        """
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(_digest(key))
        if session is None or scheme.lower() != "bearer" or not _same(key, session.api_key):
            problem = "the API key is that of no running episode (an episode's key ends with it)"
            raise RequestError(problem, code="invalid_api_key", status=401)
        task = asyncio.current_task()
        assert task is not None
        session.handlers.add(task)
        try:
            yield session
        finally:
            session.handlers.discard(task)

    async def _models(self, request: web.Request) -> web.Response:
        with self._entered(request):
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "skyasync"}
            return web.json_response({"object": "list", "data": [model]})

    async def _chat_completions(self, request: web.Request) -> web.Response:
        with self._entered(request) as session:
            chat = chat_request(await _body(request), session.sampling)
            if chat.tools and not self._chat.knows_tools:
                raise RequestError("the model's chat template knows no tools", "tools", "unsupported_parameter")
            prompt = self._prompt(chat.messages, chat.tools, session)
            outputs = await self._sample(session, prompt, chat.asked)
            choices = [self._choice(i, output, chat.asked, chat) for i, output in enumerate(outputs)]
            answer = _answer("chatcmpl", prompt, outputs, chat.asked)
            for output, choice in zip(outputs, choices, strict=True):
                led_to = conversation([*chat.messages, choice.message], chat.tools)
                session.recorder.record(_call(prompt, output, answer.id), led_to)
            if chat.asked.stream:
                return _events(reply.chat_chunks(answer, choices, usage=chat.asked.include_usage))
            return web.json_response(reply.chat_completion(answer, choices))

    async def _completions(self, request: web.Request) -> web.Response:
        with self._entered(request) as session:
            asked, given = completion_request(await _body(request), session.sampling)
            tokens = self._tokenizer(given)["input_ids"] if isinstance(given, str) else given
            self._check_tokens("prompt", tokens)
            prompt = ints(tokens)
            outputs = await self._sample(session, prompt, asked)
            choices = [self._choice(i, output, asked) for i, output in enumerate(outputs)]
            answer = _answer("cmpl", prompt, outputs, asked)
            for output in outputs:
                session.recorder.record(_call(prompt, output, answer.id))
            if asked.stream:
                return _events(reply.text_chunks(answer, choices, usage=asked.include_usage))
            return web.json_response(reply.text_completion(answer, choices))

    def _prompt(self, messages: list[dict[str, Any]], tools: Tools, session: Session) -> Ints:
        from jinja2 import TemplateError

        try:
            return self._chat.prompt(messages, tools, session.recorder)
        except (TemplateError, TypeError, KeyError) as error:  # what templates do to messages they do not know
            raise RequestError(f"the model's chat template refuses the messages: {error}", "messages") from error

    async def _sample(self, session: Session, prompt: Ints, asked: Asked) -> list[GenerationOutput]:
        """The engine's answer to each choice that is asked for."""
        self._check_tokens("logit_bias", asked.sampling.logit_bias)
        room = self._max_model_len - len(prompt)
        if room < 1:
            problem = f"the prompt has {len(prompt)} tokens, which leaves no room for a reply within the model's "
            limit = f"{self._max_model_len} (generator.max_model_len)"
            raise RequestError(problem + limit, code="context_length_exceeded")
        requests = session.requests(prompt, asked, room)
        tasks = [asyncio.ensure_future(self._client.generate(request)) for request in requests]
        try:
            await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()  # which the client makes known to the engine
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                session.fail(result)
                raise result
        outputs = [result for result in results if isinstance(result, GenerationOutput)]
        if len(outputs) < len(requests) or any(o.finish_reason == "abort" or not len(o.token_ids) for o in outputs):
            raise RequestError("the engine has ended this call", code="aborted", status=503)
        return outputs

    def _check_tokens(self, name: str, tokens: Iterable[int]) -> None:
        """An engine that is asked for a token it does not know may fail, and with it the run."""
        if not all(0 <= token < len(self._tokenizer) for token in tokens):
            raise RequestError(f"{name} has token ids outside of 0 to {len(self._tokenizer) - 1}", name)

    def _choice(
        self, index: int, output: GenerationOutput, asked: Asked, chat: ChatRequest | None = None
    ) -> reply.Choice:
        text = reply.until_stop(self._chat.text(output.token_ids), asked.sampling.stop)
        tokens, logprobs = output.token_ids.tolist(), output.logprobs.tolist()
        calls: list[dict[str, Any]] = []
        if chat is not None and chat.tools:
            text, calls = read_tool_calls(text, several=chat.parallel_tool_calls)
            calls = [{"id": f"call_{output.request_id}-{i}", **call} for i, call in enumerate(calls)]
        return reply.Choice(
            index,
            text,
            "tool_calls" if calls else output.finish_reason or "stop",
            calls,
            [(self._tokenizer.decode([t]), p) for t, p in zip(tokens, logprobs, strict=True)]
            if asked.logprobs
            else None,
            tokens if asked.token_ids else None,
        )


def _call(prompt: Ints, output: GenerationOutput, identity: str) -> Call:
    action = Segment("action", output.token_ids, output.logprobs, output.versions)
    return Call(prompt, action, output.finish_reason or "stop", identity)


def _answer(kind: str, prompt: Ints, outputs: list[GenerationOutput], asked: Asked) -> reply.Answer:
    return reply.Answer(
        f"{kind}-{outputs[0].request_id}",
        asked.model,
        int(time.time()),
        len(prompt),
        sum(len(output.token_ids) for output in outputs),
        prompt.tolist() if asked.token_ids else None,
    )


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.text())
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request's body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the request's body must be a JSON object")
    return body


def _events(chunks: Iterator[dict[str, Any]]) -> web.Response:
    """Server-sent events. They arrive together, once everything is sampled."""
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    return web.Response(text=f"{text}data: [DONE]\n\n", content_type="text/event-stream")


@web.middleware
async def _in_openai_form(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error as OpenAI's clients expect it; those of the engine are not worth another try."""
    try:
        return await handler(request)
    except RequestError as error:
        kind = "authentication_error" if error.status == 401 else "invalid_request_error"
        body, status = reply.error_body(str(error), kind, error.param, error.code), error.status
    except web.HTTPException as error:  # no such address, wrong method, too long
        problem = f"{error.reason} ({request.method} {request.path})"
        body, status = reply.error_body(problem, "invalid_request_error"), error.status
    except Exception as error:
        body, status = reply.error_body(f"{type(error).__name__}: {error}", "server_error"), 500
    return web.json_response(body, status=status, headers={"x-should-retry": "false"})


def _own_address() -> str:
    """This machine's address towards others; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address for documentation, which no machine has
        return str(probe.getsockname()[0])


def _digest(key: str) -> bytes:
    return sha256(key.encode(errors="surrogateescape")).digest()


def _same(key: str, another: str) -> bool:
    return hmac.compare_digest(key.encode(errors="surrogateescape"), another.encode())
