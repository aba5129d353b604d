"""An endpoint for tests: with the real embedded engine, or with a scripted one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from openai import AsyncOpenAI

from skyasync.agents.calls import Session
from skyasync.agents.server import Endpoint
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import ENGINES, EngineConfig, GenerationOutput, SamplingParams
from skyasync.rollout.types import PromptId, TrajectoryId

EPISODE = TrajectoryId(PromptId(0, 3), 1)
DEFAULTS = SamplingParams(max_tokens=6)
MAX_MODEL_LEN = 200
HELLO = [{"role": "user", "content": "12 * 34 ="}]


class Spy:
    """A real engine that records its requests and answers."""

    def __init__(self, model: str, backend: str) -> None:
        config = EngineConfig(model, threads=1, max_model_len=MAX_MODEL_LEN, kv_cache_gb=0.1)
        self.engine = ENGINES[backend](config)
        self.asked: dict[str, list[int]] = {}
        self.answered: dict[str, GenerationOutput] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(self, requests: Any) -> AsyncIterator[list[GenerationOutput]]:
        self.asked |= {r.request_id: list(r.prompt_token_ids) for r in requests}
        async for outputs in self.engine.generate(requests):
            self.answered |= {o.request_id: o for o in outputs}
            yield outputs


class Scripted:
    """Answers with the given texts, one per request; None never answers."""

    def __init__(self, tokenizer: Any, *texts: str | None) -> None:
        self.tokenizer, self.texts, self.requests = tokenizer, list(texts), []
        self.aborted: list[str] = []

    async def generate(self, requests: Any) -> AsyncIterator[list[GenerationOutput]]:
        for request in requests:
            self.requests.append(request)
            text = self.texts.pop(0)
            if text is None:
                await asyncio.sleep(600)
            if isinstance(text, Exception):
                raise text
            tokens = self.tokenizer(f"{text}{self.tokenizer.eos_token}")["input_ids"]
            yield [
                GenerationOutput(
                    request.request_id, tokens, [-0.5] * len(tokens), [2] * len(tokens), "stop"
                )
            ]

    async def abort(self, ids: Any) -> None:
        self.aborted += ids


@asynccontextmanager
async def real_endpoint(
    model: str, tokenizer: Any, backend: str = "transformers", **options: Any
) -> AsyncIterator[SimpleNamespace]:
    """An endpoint with a real engine, by default the embedded one."""
    engine = Spy(model, backend)
    await engine.start()
    endpoint = Endpoint(InferenceClient([engine]), tokenizer, MAX_MODEL_LEN, **options)
    await endpoint.start()
    yield SimpleNamespace(endpoint=endpoint, engine=engine, model=model)
    await endpoint.close()
    await engine.shutdown()


@asynccontextmanager
async def entered(
    endpoint: Endpoint, sampling: SamplingParams = DEFAULTS, reads_behaviour: str = ""
) -> AsyncIterator[tuple[AsyncOpenAI, Session]]:
    """A client with an episode's key."""
    async with (
        endpoint.session(EPISODE, sampling, reads_behaviour=reads_behaviour) as session,
        AsyncOpenAI(base_url=url(endpoint), api_key=session.api_key) as client,
    ):
        yield client, session


@asynccontextmanager
async def scripted(
    tokenizer: Any, *texts: Any, engine: Any = None, **options: Any
) -> AsyncIterator[tuple[AsyncOpenAI, Session, Any]]:
    """With a client that has an episode's key. ``options``: of the endpoint."""
    engine = engine or Scripted(tokenizer, *texts)
    endpoint = Endpoint(InferenceClient([engine]), tokenizer, MAX_MODEL_LEN, **options)
    await endpoint.start()
    try:
        async with entered(endpoint) as (client, session):
            yield client, session, engine
    finally:
        await endpoint.close()


def url(endpoint: Endpoint) -> str:
    return f"http://127.0.0.1:{endpoint.port}/v1"


def chat(client: AsyncOpenAI, messages: list[Any], **options: Any) -> Any:
    return client.chat.completions.create(model="any", messages=messages, **options)


async def until(condition: Callable[[], Any]) -> None:
    """Let the event loop run until the condition holds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  (sockets notify no event)
            await asyncio.sleep(0)


async def end(session: Session) -> None:
    for task in session.handlers:
        task.cancel()
    await asyncio.wait(set(session.handlers))
