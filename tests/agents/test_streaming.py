"""Streamed answers: the events of each API while the engine generates, and the record of an interrupted stream."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import aiohttp
import anthropic
import numpy as np
import openai
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic

from examples.agents.tasks import CALCULATOR
from skyasync.agents import calls
from skyasync.agents.recorder import sequences
from skyasync.inference.interface import GenerationOutput, SamplingParams
from skyasync.rollout.types import PromptId, TrajectoryId
from tests.agents.endpoints import (
    EPISODE,
    HELLO,
    Scripted,
    chat,
    entered,
    real_endpoint,
    scripted,
    until,
    url,
)
from tests.agents.test_apis import CALL, OURS, THEIRS, ask, theirs

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

LONG = SamplingParams(max_tokens=150, seed=3, ignore_eos=True)
THOUGHT = "<think>\nTwelve times.\n</think>\n\n"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "POLL_S", 0.001)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(model: str, tokenizer: Any) -> AsyncIterator[SimpleNamespace]:
    async with real_endpoint(model, tokenizer) as found:
        yield found


class Stepped(Scripted):
    """Generates one more token every time that it is asked for progress; ``stays_at``: at most this many."""

    def __init__(self, tokenizer: Any, *texts: Any, stays_at: int = 10**6) -> None:
        super().__init__(tokenizer, *texts)
        self.stays_at, self.known, self.done = stays_at, 0, asyncio.Event()
        self.tokens: list[int] = []
        self.name = ""

    async def generate(self, requests: Any) -> AsyncIterator[list[GenerationOutput]]:
        (request,) = requests
        self.requests.append(request)
        text = self.texts.pop(0)
        self.tokens, self.known, self.name = (
            self.tokenizer(text)["input_ids"],
            0,
            request.request_id,
        )
        self.tokens += [self.tokenizer.eos_token_id]
        self.done.clear()
        await self.done.wait()
        if self.texts[:1] == ["fails"]:
            raise RuntimeError("out of memory")
        yield [self._piece(0, len(self.tokens), "stop")]

    async def progress(self) -> list[GenerationOutput]:
        if self.known >= min(len(self.tokens), self.stays_at):
            if self.known >= len(self.tokens) or self.texts[:1] == ["fails"]:
                self.done.set()
            return []
        self.known += 1
        return [self._piece(self.known - 1, self.known, None)]

    def _piece(self, start: int, end: int, reason: Any) -> GenerationOutput:
        count = end - start
        return GenerationOutput(
            self.name, self.tokens[start:end], [-0.5] * count, [2] * count, reason
        )


async def test_a_stream_says_in_pieces_what_the_engine_makes_and_the_record_is_whole(
    real: Any,
) -> None:
    async with entered(real.endpoint, LONG) as (client, session):
        stream = await chat(
            client, HELLO, n=2, stream=True, logprobs=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    for index, call in enumerate(session.recorder.calls):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        said = [c.delta.content for c in mine if c.delta.content]
        assert len(said) > 3, "not in one chunk"
        logprobs = [t.logprob for c in mine if c.logprobs for t in c.logprobs.content]
        assert logprobs == call.action.logprobs.tolist()
        assert "".join(said) == real.endpoint._calls.chat.tokenizer.decode(
            call.action.tokens, skip_special_tokens=True
        )
        truth = real.engine.answered[f"{EPISODE}-c{index}"]
        assert np.array_equal(call.action.tokens, truth.token_ids)
        assert mine[-1].finish_reason == call.stop_reason
    assert chunks[-1].usage.completion_tokens == sum(
        len(c.action.tokens) for c in session.recorder.calls
    )


async def test_who_breaks_off_a_stream_ends_the_call_and_what_was_read_is_recorded(
    real: Any,
) -> None:
    real.engine.answered.clear()
    async with entered(real.endpoint, LONG) as (client, session):
        read = ""
        stream = await chat(client, HELLO, stream=True)
        async for chunk in stream:
            read += chunk.choices[0].delta.content or ""
            if len(read) > 3:
                break
        await stream.close()
        await until(lambda: session.recorder.calls)
        await until(lambda: f"{EPISODE}-c0" in real.engine.answered)
        (call,) = session.recorder.calls
        ended = real.engine.answered[f"{EPISODE}-c0"]
        assert ended.finish_reason == "abort" and len(ended.token_ids) < 150
        known = len(call.action.tokens)
        assert np.array_equal(call.action.tokens, ended.token_ids[:known])
        assert np.allclose(call.action.logprobs, ended.logprobs[:known])
        said = real.endpoint._calls.chat.tokenizer.decode(
            call.action.tokens, skip_special_tokens=True
        )
        assert said.startswith(read)


async def test_a_program_that_has_read_enough_may_return_its_score_first(tokenizer: Any) -> None:
    """Its client need not have closed the connection: the tokens it received are fixed when the episode is rewarded."""
    engine = Stepped(tokenizer, "12 and 34 and 56", "fine", stays_at=4)
    known = tokenizer.decode(tokenizer("12 and 34 and 56")["input_ids"][:4])
    async with scripted(tokenizer, engine=engine) as (client, session, _):
        read = ""
        stream = await chat(client, HELLO, stream=True)
        async for chunk in stream:
            read += chunk.choices[0].delta.content or ""
            if read == known:
                break
        session.settle()
        (call,) = session.recorder.calls
        assert len(call.action.tokens) == 4 and call.stop_reason == "abort"
        session.settle()
        await stream.close()
        await until(lambda: engine.aborted)
        assert len(session.recorder.calls) == 1
        engine.stays_at = 99
        history = [
            *HELLO,
            {"role": "assistant", "content": read},
            {"role": "user", "content": "go on"},
        ]
        assert [chunk async for chunk in await chat(client, history, stream=True)]
    assert len(sequences(session.recorder.calls)) == 1, (
        "it continued from the tokens that it had received"
    )


async def test_the_client_of_each_api_assembles_its_events(tokenizer: Any) -> None:
    said = f"{THOUGHT}Let me see. {CALL}"
    async with scripted(tokenizer, engine=Stepped(tokenizer, *[said] * 3), reasoning="think") as (
        ours,
        session,
        _,
    ):
        async with ours.chat.completions.stream(
            model="any", messages=HELLO, tools=[CALCULATOR]
        ) as events:
            async for _ in events:
                pass
            first = (await events.get_final_completion()).choices[0].message
        async with theirs(str(ours.base_url), session) as client:
            options = {"model": "any", "max_tokens": 99, "messages": HELLO, "tools": [THEIRS]}
            async with client.messages.stream(**options) as events:
                kinds = [event.type async for event in events]
                second = await events.get_final_message()
        assert kinds.count("text") > 2 and kinds.count("thinking") > 2
        async with ours.responses.stream(model="any", input=[*HELLO], tools=[OURS]) as events:
            told = [event async for event in events]
            third = await events.get_final_response()
        assert sum(e.type == "response.output_text.delta" for e in told) > 2
        assert [e.sequence_number for e in told if hasattr(e, "sequence_number")] == sorted(
            {e.sequence_number for e in told if hasattr(e, "sequence_number")}
        )
    assert (first.reasoning_content, first.content) == ("Twelve times.", "Let me see.")
    thinking, text, call = second.content
    assert (thinking.thinking, text.text, call.input) == (
        "Twelve times.",
        "Let me see.",
        {"expression": "12*34"},
    )
    assert second.stop_reason == "tool_use"
    reasoning, message, function = third.output
    assert (reasoning.content[0].text, message.content[0].text) == ("Twelve times.", "Let me see.")
    assert (function.name, function.arguments) == ("calculator", '{"expression": "12*34"}')
    assert 4 < third.usage.output_tokens_details.reasoning_tokens < third.usage.output_tokens - 4
    tokens = [call.action.tokens.tolist() for call in session.recorder.calls]
    assert tokens == [tokens[0]] * 3 and tokenizer.decode(tokens[0]) == f"{said}<|im_end|>"


async def test_an_engine_that_fails_in_the_middle_is_told_in_the_stream(tokenizer: Any) -> None:
    async def chatted(ours: Any, session: Any) -> None:
        async for _ in await chat(ours, HELLO, stream=True):
            pass

    async def messaged(ours: Any, session: Any) -> None:
        async with AsyncAnthropic(base_url=str(ours.base_url), api_key=session.api_key) as client:
            async for _ in await ask(client, HELLO, stream=True):
                pass

    async def responded(ours: Any, session: Any) -> None:
        stream = await ours.responses.create(model="any", input="x", stream=True)
        last = [event async for event in stream][-1]
        assert last.type == "response.failed"
        raise openai.APIError(last.response.error.message, request=None, body=None)  # type: ignore[arg-type]

    for run, error in (
        (chatted, openai.APIError),
        (messaged, anthropic.APIStatusError),
        (responded, openai.APIError),
    ):
        engine = Stepped(tokenizer, "12 and 34", "fails", stays_at=3)
        async with scripted(tokenizer, engine=engine) as (ours, session, _):
            with pytest.raises(error, match="out of memory"):
                await run(ours, session)
            with pytest.raises(RuntimeError, match="out of memory"):
                session.failure.result()
            (call,) = session.recorder.calls  # it received these tokens
            assert call.stop_reason == "abort"


async def test_engines_that_tell_nothing_are_streamed_in_one_piece(tokenizer: Any) -> None:
    async with scripted(tokenizer, "done") as (client, session, _):
        chunks = [chunk async for chunk in await chat(client, HELLO, stream=True)]
    assert [c.choices[0].delta.content for c in chunks if c.choices[0].delta.content] == ["done"]
    assert len(session.recorder.calls) == 1


async def test_a_stream_that_cannot_begin_has_an_errors_status(tokenizer: Any) -> None:
    async with scripted(tokenizer, RuntimeError("out of memory")) as (client, _, _):
        with pytest.raises(openai.InternalServerError):
            await chat(client, HELLO, stream=True)
        with pytest.raises(openai.BadRequestError):
            await chat(client, HELLO, stream=True, temperature=101)


async def test_no_stream_asks_an_engine_more_often_for_being_one_of_many(
    real: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    plain = real.engine.engine.progress

    async def progress() -> Any:
        nonlocal asked
        asked += 1
        return await plain()

    monkeypatch.setattr(real.engine, "progress", progress, raising=False)
    monkeypatch.setattr(calls, "POLL_S", 0.02)
    async with entered(real.endpoint, replace(LONG, max_tokens=60)) as (client, session):

        async def read() -> int:
            return len([chunk async for chunk in await chat(client, HELLO, stream=True)])

        began = asyncio.get_running_loop().time()
        counts = await asyncio.gather(*(read() for _ in range(4)))
        rounds = (asyncio.get_running_loop().time() - began) / 0.02
    assert len(session.recorder.calls) == 4 and min(counts) > 2
    assert asked <= rounds + 1


async def test_whatever_is_broken_off_over_whatever_cuts_each_record_is_what_the_engine_made(
    real: Any,
) -> None:
    """Programs that stop reading, or disconnect at any moment, while the engine's request is interrupted."""
    rng = random.Random(7)
    engines, records = real.endpoint._calls.client, list[Any]()

    async def cuts() -> None:
        while True:
            await asyncio.sleep(0.05)
            await engines.cut()
            await engines.resume()

    async def episode(row: int) -> None:
        identity, sampling = (
            TrajectoryId(PromptId(1, row), 0),
            replace(LONG, max_tokens=rng.randint(3, 90), seed=row),
        )
        async with real.endpoint.session(identity, sampling) as session:
            headers = {"Authorization": f"Bearer {session.api_key}"}
            async with aiohttp.ClientSession(headers=headers) as http:
                await asyncio.gather(*(call(http) for _ in range(3)), return_exceptions=True)
            await until(lambda: not session.handlers)
            assert not session.streams and not session.failure.done()
            records.extend(session.recorder.calls)

    async def call(http: aiohttp.ClientSession) -> None:
        path = rng.choice(["chat/completions", "messages", "responses"])
        body = {"stream": True, "messages": HELLO, "max_tokens": 90} if path != "responses" else {
            "stream": True, "input": "12 * 34 =",
        }  # fmt: skip
        patience, lines = rng.choice([0.02, 0.1, 20.0]), rng.choice([3, 12, 10**6])
        async with (
            asyncio.timeout(patience),
            http.post(f"{url(real.endpoint)}/{path}", json=body) as answer,
        ):
            async for _ in answer.content:
                lines -= 1
                if not lines:
                    return

    cutting = asyncio.create_task(cuts())
    await asyncio.gather(*(episode(row) for row in range(8)))
    cutting.cancel()
    await asyncio.gather(cutting, return_exceptions=True)
    await engines.resume()
    assert {call.stop_reason for call in records} >= {"abort", "length"}
    for call_made in records:
        (scored,) = await real.engine.score([call_made.tokens.tolist()])
        made = call_made.action.logprobs.tolist()
        assert scored[len(call_made.prompt) - 1 :] == pytest.approx(made, abs=1e-4)
    assert not engines._inflight and not any(engines._inflight.leaving.values())
