"""One call of the model: from what is asked, in whatever form, to what is recorded.

Invariant: an answer that was given is recorded, with the tokens that the engine read and wrote; what a program was told
of an answer that was broken off is recorded as far as it was told; nothing is recorded twice, or behind the episode.

| who waits               | for what             | woken by                                                           |
|-------------------------|----------------------|--------------------------------------------------------------------|
| ``answered``, ``looks`` | the engine's answers | the client (answer, error, its time limit); cancelled, they abort  |
| ``looks``               | news of them         | ``News``; the answers                                              |
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property

from skyasync.arrays import Ints, ints
from skyasync.config.sampling import UNMIRRORED, unmirrored
from skyasync.endpoint.agent_chat import AgentChat, comparable, conversation, thoughts
from skyasync.endpoint.forms.inner import Answer, Choice, Request, RequestError
from skyasync.endpoint.news import EVERY_S, News
from skyasync.endpoint.parsers.reader import Reader
from skyasync.endpoint.recorder import Call
from skyasync.endpoint.session import INLINE, Session
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import GenerationOutput, GenerationRequest, RequestFailedError, SamplingParams
from skyasync.rollout.types import action_of

MOST_BYTES = 32 * 1024**2  # of a request, whatever the model can read
FREE_BYTES, BYTES_PER_TOKEN = 2**20, 16  # of a request to a model: text takes about 4 bytes a token
LONG_REPLY = 1024  # tokens that are read in milliseconds; a thread reads longer replies
MOST_LISTED = 2**18  # tokens of one answer that are told with their log-probabilities or ids: about 200 bytes each
LOOKING = 0.1  # most of the time that may go into reading what a reply says while it is made


@dataclass
class Calls:
    """What calls of all episodes share."""

    client: InferenceClient
    chat: AgentChat
    reader: Reader
    max_model_len: int
    news: News = field(init=False)

    def __post_init__(self) -> None:
        self.news = News(self.client)
        self._thread = ThreadPoolExecutor(1, "endpoint tokenizer")  # of one: long conversations take memory

    @property
    def most_bytes(self) -> int:
        """Of a request: far more than the model can read."""
        return min(MOST_BYTES, FREE_BYTES + BYTES_PER_TOKEN * self.max_model_len)

    async def prompt(self, session: Session, request: Request, size: int) -> Ints:
        """The tokens that the model is to continue.

        Args:
            size: bytes of the request.

        Raises:
            RequestError: if there are none, or tokens that the model does not have.
        """
        if max(size, _characters(request)) <= INLINE:
            return self._prompt(session, request)
        async with session.tokenising:  # one at a time, so that all episodes have their turns
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._prompt, session, request)

    def _prompt(self, session: Session, request: Request) -> Ints:
        if request.prompt is not None:
            given = request.prompt
            try:
                tokens = self.chat.tokenizer(given)["input_ids"] if isinstance(given, str) else given
            except (TypeError, ValueError) as error:  # of half a surrogate pair
                raise RequestError(f"prompt cannot be tokenised: {error}", "prompt") from error
            self._check_tokens("prompt", tokens)
            return ints(tokens)
        from jinja2 import TemplateError

        if request.tools and not self.chat.knows_tools:
            raise RequestError("the model's chat template knows no tools", "tools", "unsupported_parameter")
        try:
            return self.chat.prompt(request.messages, request.tools, session.recorder)
        except (TemplateError, TypeError, KeyError, ValueError, RecursionError) as error:  # that templates do not know
            problem = f"the model's chat template refuses the messages: {error!s:.500}"
            raise RequestError(problem, "messages") from error

    async def open(self, session: Session, request: Request, prefix: str, size: int) -> OneCall:
        """A call that is ready to be made.

        Args:
            size: bytes of the request.

        Raises:
            RequestError: naming what in it cannot be carried out.
        """
        self._check_tokens("logit_bias", request.asked.sampling.logit_bias)
        _check_mirrored(session, request.asked.sampling)
        self._check_length(request)
        prompt = await self.prompt(session, request, size)
        room = self.max_model_len - len(prompt)
        if room < 1:
            raise self._no_room(f"{len(prompt)} tokens")
        asked = request.asked
        requests = session.requests(prompt, asked, room)
        listed = sum(request.sampling.max_tokens for request in requests)
        if (asked.logprobs or asked.token_ids) and listed > MOST_LISTED:
            problem = f"an answer of up to {listed} tokens (n times max_tokens) is too long for logprobs or token ids"
            raise RequestError(f"{problem}: these may have {MOST_LISTED}", "n")
        shown = prompt.tolist() if asked.token_ids else None
        identity = f"{prefix}-{requests[0].request_id}"
        answer = Answer(identity, asked.model, int(time.time()), len(prompt), 0, shown)
        return OneCall(self, session, request, prompt, requests, answer)

    def _check_length(self, request: Request) -> None:
        """What has more characters, messages or tokens than the model could read is not tokenised first."""
        items = len(request.prompt if isinstance(request.prompt, list) else request.messages)
        if items > self.max_model_len:
            raise self._no_room(f"{items} {'messages' if request.prompt is None else 'tokens'}")
        count = _characters(request)
        if count > self.max_model_len and count > self.max_model_len * self._longest_token:
            raise self._no_room(f"{count} characters")

    def _no_room(self, found: str) -> RequestError:
        problem = f"the prompt has {found}, which leaves no room for a reply within the model's {self.max_model_len}"
        return RequestError(f"{problem} tokens (generator.max_model_len)", code="context_length_exceeded")

    @cached_property
    def _longest_token(self) -> float:
        """Characters of it, at most: no text of more tokenises to as few. Unknown of a tokenizer that does not say."""
        vocabulary: dict[str, int] = getattr(self.chat.tokenizer, "get_vocab", dict)()
        return max(map(len, vocabulary), default=math.inf)

    def _check_tokens(self, name: str, tokens: Iterable[int]) -> None:
        """An engine that is asked for a token it does not know may fail, and with it the run."""
        most = len(self.chat.tokenizer)
        if not all(0 <= token < most for token in tokens):
            raise RequestError(f"{name} has token ids outside of 0 to {most - 1}", name)


def _characters(request: Request) -> int:
    if request.prompt is not None:
        return len(request.prompt) if isinstance(request.prompt, str) else 0
    return sum(len(message["content"]) for message in request.messages)


def _check_mirrored(session: Session, asked: SamplingParams) -> None:
    """As a run's settings are checked (``skyasync.config.sampling``); a request may change them here."""
    changed = [name for name in UNMIRRORED if getattr(asked, name) != getattr(session.sampling, name)]
    if session.reads_behaviour and asked.temperature and changed:
        problem = f"{unmirrored(changed[0], session.reads_behaviour)}: remove it"
        raise RequestError(problem, changed[0], "unsupported_parameter")


@dataclass(eq=False)
class OneCall:
    """Attributes: answer: its number of completion tokens is known when the call has ended."""

    calls: Calls
    session: Session
    request: Request
    prompt: Ints
    requests: list[GenerationRequest]
    answer: Answer
    _told: dict[int, tuple[GenerationOutput, Choice]] = field(default_factory=dict)
    _recorded: bool = False

    def __post_init__(self) -> None:
        self._opened = self.calls.reader.opens(self.prompt)
        self._logprobs: list[list[tuple[str, float]]] = [[] for _ in self.requests]

    async def answered(self) -> list[Choice]:
        """Every choice, complete and recorded.

        Raises:
            RequestError: if the call was ended from elsewhere, or the engine says that this request cannot be answered.
            Exception: the engine's failure, which is the run's too.
        """
        tasks = self._asked()
        try:
            await asyncio.wait(tasks)
        finally:
            await _ended(tasks)
        return await self._complete(tasks)

    async def looks(self) -> AsyncGenerator[list[Choice], None]:
        """What is certain of every choice, again and again; the last time they are complete. Raises as ``answered``."""
        tasks = self._asked()
        self.session.streams.add(self)
        try:
            while pending := [task for task in tasks if not task.done()]:
                news = self.calls.news.round([request.request_id for request in self.requests])
                await asyncio.wait({*pending, news}, return_when=asyncio.FIRST_COMPLETED)
                if not news.done() or all(task.done() for task in tasks):
                    continue
                began = time.perf_counter()
                found = await self._look(tasks, news.result())
                spent = time.perf_counter() - began
                if found:
                    yield found
                if spent > EVERY_S * LOOKING:  # a long reply: the event loop has others to serve
                    await asyncio.wait(pending, timeout=spent / LOOKING, return_when=asyncio.ALL_COMPLETED)
            yield await self._complete(tasks)
        finally:
            self.settle()
            self.session.streams.discard(self)
            await _ended(tasks)  # last: who is cancelled may be so again while he waits

    def settle(self) -> None:
        """As ``session.OpenCall`` says."""
        seen = [pair for pair in self._told.values() if pair[1].text or pair[1].reasoning]
        if seen:
            self._record([replace(output, finish_reason="abort") for output, _ in seen], [c for _, c in seen])

    def _asked(self) -> list[asyncio.Task[GenerationOutput]]:
        return [asyncio.create_task(self.calls.client.generate(request)) for request in self.requests]

    async def _look(
        self, tasks: list[asyncio.Task[GenerationOutput]], heard: dict[str, GenerationOutput]
    ) -> list[Choice]:
        for index, (task, request) in enumerate(zip(tasks, self.requests, strict=True)):
            output = heard.get(request.request_id)
            if output is not None and len(output.token_ids) and not task.done():
                self._told[index] = output, await self._choice(index, output, done=False)
        return [choice for _, choice in self._told.values()]

    async def _complete(self, tasks: list[asyncio.Task[GenerationOutput]]) -> list[Choice]:
        results = [asyncio.CancelledError() if t.cancelled() else t.exception() or t.result() for t in tasks]
        for result in results:
            if isinstance(result, RequestFailedError):
                raise RequestError(str(result)) from result
            if isinstance(result, Exception):
                self.session.fail(result)
                raise result
        outputs = [result for result in results if isinstance(result, GenerationOutput)]
        if len(outputs) < len(tasks) or any(o.finish_reason == "abort" or not len(o.token_ids) for o in outputs):
            raise RequestError("the engine has ended this call", code="aborted", status=503)
        self.answer = replace(self.answer, completion_tokens=sum(len(output.token_ids) for output in outputs))
        choices = [await self._choice(index, output, done=True) for index, output in enumerate(outputs)]
        self._record(outputs, choices)
        return choices

    def _record(self, outputs: list[GenerationOutput], choices: list[Choice]) -> None:
        if self._recorded or self.session.over:
            return
        self._recorded = True
        request = self.request
        messages = request.messages
        asked, thought = conversation(messages, request.tools), thoughts(messages)  # once for all choices
        for output, choice in zip(outputs, choices, strict=True):
            action = action_of(output, [])
            call = Call(self.prompt, action, output.finish_reason or "stop", self.answer.id)
            led_to = [*asked, comparable(choice.message)] if request.prompt is None else ()
            self.session.recorder.record(call, led_to, thought | thoughts([choice.message], len(asked)))
        if request.begun is not None:
            stored = [*request.begun, choices[0].message]
            said = sum(map(len, asked)) + sum(len(message.get("reasoning_content", "")) for message in stored)
            self.session.store(self.answer.id, stored, said + len(choices[0].text))

    async def _choice(self, index: int, output: GenerationOutput, *, done: bool) -> Choice:
        """What a reply says; others have a turn before the next one is read."""
        if len(output.token_ids) > LONG_REPLY:
            return await asyncio.to_thread(self._read, index, output, done=done)
        await asyncio.sleep(0)
        return self._read(index, output, done=done)

    def _read(self, index: int, output: GenerationOutput, *, done: bool) -> Choice:
        request, parser = self.request, self.calls.reader.tools
        said = self.calls.reader.read(
            output.token_ids,
            request.asked.sampling.stop,
            request.tools,
            framed=request.prompt is None,
            opened=self._opened,
            done=done,
            several=request.parallel_tool_calls,
        )
        name = self.requests[index].request_id
        calls = [
            {"id": parser.identity(name, i), "type": "function", "function": function}
            for i, function in enumerate(said.functions)
        ]
        finish = "tool_calls" if calls else output.finish_reason or "stop"
        return Choice(
            index,
            said.text,
            finish if done else "",
            calls,
            said.reasoning,
            said.stopped_by,
            self._with_logprobs(index, output) if request.asked.logprobs else None,
            output.token_ids.tolist() if request.asked.token_ids else None,
            said.thought,
        )

    def _with_logprobs(self, index: int, output: GenerationOutput) -> list[tuple[str, float]]:
        known, tokens, values = self._logprobs[index], output.token_ids.tolist(), output.logprobs.tolist()
        tokenizer = self.calls.chat.tokenizer
        for place in range(len(known), len(tokens)):
            known.append((tokenizer.decode([tokens[place]]), values[place]))
        return known[: len(tokens)]


async def _ended(tasks: list[asyncio.Task[GenerationOutput]]) -> None:
    for task in tasks:
        task.cancel()  # which the client makes known to the engine
    await asyncio.gather(*tasks, return_exceptions=True)
