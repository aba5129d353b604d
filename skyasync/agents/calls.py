"""One episode at the endpoint, and its calls of the model: from a request of any API to a record.

Invariant: an answer that was given is recorded, with the tokens that the engine read and wrote. If
a stream is broken off, the part that was sent is recorded. Nothing is recorded twice, or after the
episode. However many streams there are, the engines are polled once in ``POLL_S``, and never
without a stream.

| who waits                 | for what                | woken by                                                       |
|---------------------------|-------------------------|----------------------------------------------------------------|
| ``answered``, ``updates`` | the engine's answers    | the client (answer, error, time limit); cancelled, they abort  |
| ``updates``               | progress of the answers | the poll that it is in; the answers                            |
| a poll (task)             | ``POLL_S``, engines     | the clock, the engines' answers; requests raise their failures |
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from skyasync.agents.api import AnswerHead, Message, ModelReply, ModelRequest, RequestError
from skyasync.agents.parsers import ReplyParser
from skyasync.agents.recorder import (
    AgentChat,
    RecordedCall,
    Recorder,
    comparable,
    conversation,
    thoughts,
)
from skyasync.arrays import Ints, ints
from skyasync.config.schema.sampling import UNMIRRORED, unmirrored
from skyasync.errors import UserError
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import (
    GenerationOutput,
    GenerationRequest,
    RequestFailedError,
    SamplingParams,
)
from skyasync.models.images import Image, images_of, pixels, reads_images
from skyasync.rollout.generator_api import request_seed
from skyasync.rollout.types import TrajectoryId, action_of

MOST_BYTES = 32 * 1024**2  # of a request, whatever the model can read
FREE_BYTES = 2**20  # of a request to a model of any length: tools and JSON's own characters
BYTES_PER_TOKEN = 16  # of the model's length; text takes about 4
LONG_REPLY = 1024  # tokens that are read in milliseconds; a thread reads longer replies
#: Tokens of one answer that are sent with their log-probabilities or ids: about 200 bytes each.
MOST_LISTED = 2**18
READING_SHARE = 0.1  # most of the time that may go into reading incomplete replies
MOST_PIXELS = 1 << 27  # of a request's images together: 400 MB when they are decoded
MOST_STORED = 256  # answers that later requests may name; each holds its whole conversation
STORED_CHARACTERS = 32 * 1024**2  # of all these conversations together
#: Bytes or characters that are read in milliseconds; of longer requests an episode has one read at
#: a time.
INLINE = 16 * 1024
_TEMPLATE_ERRORS = (TemplateError, TypeError, KeyError, ValueError, RecursionError)
POLL_S = 0.05  # between two parts of a stream: a reader sees no delay
CLOSE_S = 5.0  # for the poll in progress when the endpoint closes


class Session:
    """One episode at the endpoint: its key, its calls, and the failure of an engine if it met one.

    Args:
        affinity: sessions that share it go to the same engine; by default the episode is alone.
        reads_behaviour: the setting for which the objective reads the log-probabilities of what is
            sampled here; "" for none. Requests then cannot ask for a distribution that the trainer
            could not compute.

    Attributes:
        conversations: by the id of an answer, the conversation that a later request continues if it
            names the answer.
        over: nothing is answered or recorded any more.
        streams: of each answer that is streamed at present, what records the part that has been
            sent.
    """

    def __init__(
        self,
        identity: TrajectoryId,
        sampling: SamplingParams,
        affinity: str | None = None,
        reads_behaviour: str = "",
    ) -> None:
        # The run's seed is the same for other samples of the prompt: ``requests`` adds the call's
        # name. A request may set a seed of its own.
        self._seed = sampling.seed
        self.sampling = replace(sampling, seed=None)
        self.identity = identity
        self.affinity = affinity or str(identity)
        self.reads_behaviour = reads_behaviour
        self.api_key = secrets.token_urlsafe(32)
        self.recorder = Recorder()
        self.conversations: dict[str, list[Message]] = {}
        self._stored: dict[str, int] = {}  # characters of the conversations, oldest first
        self._reading = asyncio.Lock()
        self.tokenising = asyncio.Lock()
        # Of an engine; a future, so that the generator can wait for it.
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.handlers: set[asyncio.Task[Any]] = set()
        self.streams: set[Callable[[], None]] = set()
        self.over = False
        self._requests = 0

    def requests(
        self, prompt: Ints, request: ModelRequest, capacity: int
    ) -> list[GenerationRequest]:
        """One engine request per choice, each with an id (and seed) of its own.

        Args:
            prompt: tokens, ``[prompt length]``.
            capacity: tokens that a reply may have.
        """
        sampling = request.sampling
        max_tokens = min(sampling.max_tokens, capacity)
        min_tokens = min(sampling.min_tokens, max_tokens)
        sampling = replace(sampling, max_tokens=max_tokens, min_tokens=min_tokens)
        images = images_of(request.messages)
        requests = []
        for choice in range(request.choices):
            name = f"{self.identity}-c{self._requests}"
            self._requests += 1
            if sampling.seed is None:
                seed = request_seed(self._seed, name)
            else:
                seed = (sampling.seed + choice) % 2**62  # else all choices would be the same
            params = sampling if seed is None else replace(sampling, seed=seed)
            requests.append(
                GenerationRequest(
                    name,
                    prompt,
                    params,
                    session_id=self.affinity,
                    images=images,
                )
            )
        return requests

    def reads(self, size: int | None) -> AbstractAsyncContextManager[object]:
        """A context for reading a request of ``size`` bytes (None: unknown).

        Long requests of an episode are read one at a time.
        """
        if size is not None and size <= INLINE:
            return nullcontext()
        return self._reading

    def store(self, answer: str, conversation: list[Message], characters: int) -> None:
        """Let a later request name the answer; the oldest answers are dropped."""
        self.conversations[answer] = conversation
        self._stored[answer] = characters
        while len(self._stored) > MOST_STORED or sum(self._stored.values()) > STORED_CHARACTERS:
            oldest = next(iter(self._stored))
            del self.conversations[oldest], self._stored[oldest]

    def settle(self) -> None:
        """Record the parts that were sent of open streams: the program may have read enough."""
        for settle in list(self.streams):  # a copy: streams end while others are recorded
            settle()


class StreamPoller:
    """Asks the engines for the progress of streamed requests.

    A client that does not know the progress returns nothing, and answers are streamed when they are
    complete. A poll that has begun is finished: an engine reports a token once.
    """

    def __init__(self, client: InferenceClient) -> None:
        self._client = client
        self._polled: set[str] = set()
        self._task: asyncio.Task[dict[str, GenerationOutput]] | None = None

    def poll(self, request_ids: Collection[str]) -> asyncio.Task[dict[str, GenerationOutput]]:
        """The running poll, or a new one.

        It includes these requests if it has not called the engines yet.
        """
        self._polled |= set(request_ids)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll())
        return self._task

    async def _poll(self) -> dict[str, GenerationOutput]:
        await asyncio.sleep(POLL_S)
        # Requests that come from here on belong to the next poll.
        polled = self._polled
        self._polled = set()
        try:
            return await self._client.progress(polled)
        except Exception:  # the requests themselves raise it
            return {}

    async def close(self) -> None:
        """End the poller, when there are no streams; a poll that an engine holds up is cancelled."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=CLOSE_S)
            self._task.cancel()


class Calls:
    """The client, chat template, parsers and thread that the calls of all episodes share."""

    def __init__(
        self, client: InferenceClient, chat: AgentChat, parser: ReplyParser, max_model_len: int
    ) -> None:
        self.client = client
        self.chat = chat
        self.parser = parser
        self.max_model_len = max_model_len
        self.poller = StreamPoller(client)
        # Only one: long conversations take memory.
        self._thread = ThreadPoolExecutor(1, "endpoint tokenizer")
        #: Most bytes of a request: far more than the model can read.
        self.most_bytes = min(MOST_BYTES, FREE_BYTES + BYTES_PER_TOKEN * max_model_len)
        if reads_images(chat.tokenizer.name_or_path):  # which have few tokens for their bytes
            self.most_bytes = MOST_BYTES

    async def prompt(self, session: Session, request: ModelRequest, size: int) -> Ints:
        """The tokens that the model is to continue, ``[prompt length]``.

        Args:
            size: bytes of the request.

        Raises:
            RequestError: if there are none, or tokens that the model does not have.
        """
        images = images_of(request.messages)
        if images:
            _check_images(images)
        elif max(size, _characters(request)) <= INLINE:
            return self._prompt(session, request)
        async with session.tokenising:  # one at a time, so that all episodes have their turns
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, self._prompt, session, request
            )

    def _prompt(self, session: Session, request: ModelRequest) -> Ints:
        if request.prompt is not None:
            tokens = request.prompt
            if isinstance(tokens, str):
                try:
                    tokens = self.chat.tokenizer(tokens)["input_ids"]
                except (TypeError, ValueError) as error:  # of half a surrogate pair
                    raise RequestError(f"prompt cannot be tokenised: {error}", "prompt") from error
            self._check_tokens("prompt", tokens)
            return ints(tokens)
        if request.tools and not self.chat.knows_tools:
            raise RequestError(
                "the model's chat template does not show tools", "tools", "unsupported_parameter"
            )
        try:
            return self.chat.prompt(request.messages, request.tools, session.recorder)
        except UserError as error:  # of images
            raise RequestError(str(error), "messages", "unsupported_content") from error
        except _TEMPLATE_ERRORS as error:
            problem = f"the model's chat template refuses the messages: {error!s:.500}"
            raise RequestError(problem, "messages") from error

    async def open(
        self, session: Session, request: ModelRequest, prefix: str, size: int
    ) -> ModelCall:
        """A call that is ready to be made.

        Args:
            size: bytes of the request.

        Raises:
            RequestError: naming what in it is not supported.
        """
        self._check_tokens("logit_bias", request.sampling.logit_bias)
        changes = vars(request.sampling)
        defaults = vars(session.sampling)
        changed = [name for name in UNMIRRORED if changes[name] != defaults[name]]
        if session.reads_behaviour and request.sampling.temperature and changed:
            # As a run's settings are checked (skyasync.config.schema.sampling); a request may
            # change them here.
            problem = f"{unmirrored(changed[0], session.reads_behaviour)}: remove it"
            raise RequestError(problem, changed[0], "unsupported_parameter")
        self._check_length(request)
        prompt = await self.prompt(session, request, size)
        if len(prompt) >= self.max_model_len:
            raise self._too_long(f"{len(prompt)} tokens")
        requests = session.requests(prompt, request, self.max_model_len - len(prompt))
        listed = sum(choice.sampling.max_tokens for choice in requests)
        if (request.logprobs or request.token_ids) and listed > MOST_LISTED:
            problem = f"an answer of up to {listed} tokens (n times max_tokens) is too long for logprobs or token ids"
            raise RequestError(f"{problem}: these may have {MOST_LISTED}", "n")
        head = AnswerHead(
            id=f"{prefix}-{requests[0].request_id}",
            model=request.model,
            created=int(time.time()),
            prompt_tokens=len(prompt),
            prompt_token_ids=prompt.tolist() if request.token_ids else None,
        )
        return ModelCall(
            self,
            session,
            request,
            prompt,
            requests,
            head,
        )

    def _check_length(self, request: ModelRequest) -> None:
        """Raises ``RequestError`` for more items or characters than the model could read.

        Tokenising such a request would take long, for nothing.
        """
        limit = self.max_model_len
        if isinstance(request.prompt, list) and len(request.prompt) > limit:
            raise self._too_long(f"{len(request.prompt)} tokens")
        if len(request.messages) > limit:
            raise self._too_long(f"{len(request.messages)} messages")
        count = _characters(request)
        # The longest token is computed for long requests alone: it takes the whole vocabulary.
        if count > limit and count > limit * self._longest_token:
            raise self._too_long(f"{count} characters")

    def _too_long(self, size: str) -> RequestError:
        problem = f"the prompt has {size}, which leaves no room for a reply"
        problem = f"{problem} within the model's {self.max_model_len} tokens"
        return RequestError(f"{problem} (generator.max_model_len)", code="context_length_exceeded")

    @cached_property
    def _longest_token(self) -> float:
        """Characters of the longest token, which bounds the tokens of a text from below."""
        return max(map(len, self.chat.tokenizer.get_vocab()), default=math.inf)

    def _check_tokens(self, name: str, tokens: Iterable[int]) -> None:
        """An engine that is asked for an unknown token may fail, and with it the run."""
        count = len(self.chat.tokenizer)
        if not all(0 <= token < count for token in tokens):
            raise RequestError(f"{name} has token ids outside of 0 to {count - 1}", name)


def _check_images(images: Sequence[Image]) -> None:
    """Raises ``RequestError`` if the images of a request have too many pixels together."""
    count = sum(map(pixels, images))
    if count > MOST_PIXELS:
        problem = (
            f"the {len(images)} images have {count} pixels together; {MOST_PIXELS} are the most"
        )
        raise RequestError(problem, "messages", "unsupported_content")


def _characters(request: ModelRequest) -> int:
    """Characters of a request's text; 0 for token ids."""
    if isinstance(request.prompt, str):
        return len(request.prompt)
    if request.prompt is not None:
        return 0
    count = 0
    for message in request.messages:
        content = message["content"]
        if isinstance(content, str):
            count += len(content)
        else:
            count += sum(len(part.get("text", "")) for part in content)
    return count


class ModelCall:
    """A request that is being answered, with one engine request per choice.

    Attributes:
        head: its number of completion tokens is known when the call has ended.
    """

    def __init__(
        self,
        calls: Calls,
        session: Session,
        request: ModelRequest,
        prompt: Ints,
        requests: list[GenerationRequest],
        head: AnswerHead,
    ) -> None:
        self._calls = calls
        self._session = session
        self.request = request
        self.head = head
        self._prompt = prompt
        self._requests = requests
        self._opened = calls.parser.opens(prompt)
        # By choice: what has been sent of a stream.
        self._sent: dict[int, tuple[GenerationOutput, ModelReply]] = {}
        # By choice: text and log-probability of the tokens that have been read.
        self._logprobs: list[list[tuple[str, float]]] = [[] for _ in requests]
        self._recorded = False

    async def answered(self) -> list[ModelReply]:
        """Every reply, complete and recorded.

        Raises:
            RequestError: if the call was aborted, or the engine says that this request cannot be
                answered.
            Exception: the engine's failure, which is the run's too.
        """
        tasks = self._begin()
        try:
            await asyncio.wait(tasks)
        finally:
            await _end(tasks)
        return await self._complete(tasks)

    async def updates(self) -> AsyncGenerator[list[ModelReply], None]:
        """The certain part of every reply, again and again, and then the complete replies.

        Raises as ``answered``.
        """
        tasks = self._begin()
        names = [request.request_id for request in self._requests]
        self._session.streams.add(self.settle)
        try:
            while pending := [task for task in tasks if not task.done()]:
                poll = self._calls.poller.poll(names)
                await asyncio.wait({*pending, poll}, return_when=asyncio.FIRST_COMPLETED)
                if not poll.done() or all(task.done() for task in tasks):
                    continue
                began = time.perf_counter()
                progress = poll.result()
                for index, (task, name) in enumerate(zip(tasks, names, strict=True)):
                    output = progress.get(name)
                    # A reply that is complete by now is sent as such.
                    if output is not None and len(output.token_ids) and not task.done():
                        self._sent[index] = output, await self._reply(index, output, done=False)
                spent_s = time.perf_counter() - began
                if self._sent:
                    yield [reply for _, reply in self._sent.values()]
                # A long reply is read less often: the event loop has others to serve.
                if spent_s > POLL_S * READING_SHARE:
                    pause_s = spent_s / READING_SHARE
                    await asyncio.wait(pending, timeout=pause_s, return_when=asyncio.ALL_COMPLETED)
            yield await self._complete(tasks)
        finally:
            self.settle()
            self._session.streams.discard(self.settle)
            # At the end: a second cancellation may come while this waits.
            await _end(tasks)

    def _begin(self) -> list[asyncio.Task[GenerationOutput]]:
        """Make the engine requests, one per choice."""
        generate = self._calls.client.generate
        return [asyncio.create_task(generate(request)) for request in self._requests]

    def settle(self) -> None:
        """Record the part of the answer that was sent, unless nothing was or it is recorded."""
        outputs = []
        replies = []
        for output, reply in self._sent.values():
            if reply.text or reply.reasoning:
                outputs.append(replace(output, finish_reason="abort"))
                replies.append(reply)
        if replies:
            self._record(outputs, replies)

    async def _complete(self, tasks: list[asyncio.Task[GenerationOutput]]) -> list[ModelReply]:
        outputs: list[GenerationOutput] = []
        for task in tasks:
            error = None if task.cancelled() else task.exception()
            if isinstance(error, RequestFailedError):
                raise RequestError(str(error)) from error
            if isinstance(error, Exception):
                if not self._session.failure.done():
                    self._session.failure.set_exception(error)
                    # Read here: asyncio warns of an exception that is never read, and the generator
                    # may be gone.
                    self._session.failure.exception()
                raise error
            if not task.cancelled() and error is None:
                outputs.append(task.result())
        aborted = any(o.finish_reason == "abort" or not len(o.token_ids) for o in outputs)
        if aborted or len(outputs) < len(tasks):
            raise RequestError("the engine has ended this call", code="aborted", status=503)
        count = sum(len(output.token_ids) for output in outputs)
        self.head = replace(self.head, completion_tokens=count)
        replies = []
        for index, output in enumerate(outputs):
            replies.append(await self._reply(index, output, done=True))
        self._record(outputs, replies)
        return replies

    def _record(self, outputs: list[GenerationOutput], replies: list[ModelReply]) -> None:
        """Add the replies to the episode's recorder, one call per choice."""
        if self._recorded or self._session.over:
            return
        self._recorded = True
        request = self.request
        messages = self.request.messages
        items = conversation(messages, request.tools)  # of all replies
        digests = thoughts(messages)
        images = images_of(messages)
        for output, reply in zip(outputs, replies, strict=True):
            call = RecordedCall(
                self._prompt,
                action_of(output, []),
                stop_reason=output.finish_reason or "stop",
                id=self.head.id,
                images=images,
            )
            led_to: Sequence[str] = ()  # a prompt without messages cannot be extended
            if request.prompt is None:
                led_to = [*items, comparable(reply.message)]
            reply_digest = thoughts([reply.message], len(items))
            self._session.recorder.record(call, led_to, digests | reply_digest)
        if request.stored is not None:
            stored = [*request.stored, replies[0].message]
            size = sum(map(len, items)) + len(replies[0].text)
            size += sum(len(message.get("reasoning_content", "")) for message in stored)
            size += sum(len(image.data) for image in images)
            self._session.store(self.head.id, stored, size)

    async def _reply(self, index: int, output: GenerationOutput, *, done: bool) -> ModelReply:
        """A reply, or its certain part. Other tasks run before the next one is read."""
        if len(output.token_ids) > LONG_REPLY:
            return await asyncio.to_thread(self._read, index, output, done=done)
        await asyncio.sleep(0)
        return self._read(index, output, done=done)

    def _read(self, index: int, output: GenerationOutput, *, done: bool) -> ModelReply:
        request = self.request
        parser = self._calls.parser
        parsed = parser.read(
            output.token_ids,
            request.sampling.stop,
            request.tools,
            framed=request.prompt is None,
            opened=self._opened,
            done=done,
            several=request.parallel_tool_calls,
        )
        name = self._requests[index].request_id
        calls = []
        for number, function in enumerate(parsed.functions):
            identity = parser.tools.identity(name, number)
            calls.append({"id": identity, "type": "function", "function": function})
        finish_reason = ""
        if done:
            finish_reason = "tool_calls" if calls else output.finish_reason or "stop"
        return ModelReply(
            index,
            parsed.text,
            finish_reason,
            tool_calls=calls,
            reasoning=parsed.reasoning,
            stopped_by=parsed.stopped_by,
            logprobs=self._read_logprobs(index, output) if request.logprobs else None,
            token_ids=output.token_ids.tolist() if request.token_ids else None,
            reasoning_tokens=parsed.reasoning_tokens,
        )

    def _read_logprobs(self, index: int, output: GenerationOutput) -> list[tuple[str, float]]:
        """Text and log-probability of the tokens; only new tokens are decoded."""
        pairs = self._logprobs[index]
        tokens = output.token_ids.tolist()
        values = output.logprobs.tolist()
        for position in range(len(pairs), len(tokens)):
            text = self._calls.chat.tokenizer.decode([tokens[position]])
            pairs.append((text, values[position]))
        return pairs[: len(tokens)]


async def _end(tasks: list[asyncio.Task[GenerationOutput]]) -> None:
    for task in tasks:
        task.cancel()  # which the client makes known to the engine
    await asyncio.gather(*tasks, return_exceptions=True)
