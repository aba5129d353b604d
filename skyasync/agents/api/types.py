"""What all APIs have in common: requests to the model, its replies, and their streams."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from skyasync.inference.interface import SamplingParams
from skyasync.rollout.chat import Tools

Message = dict[str, Any]  # as chat templates read it: content is text, the arguments of tool calls are values
Body = dict[str, Any]  # JSON


class RequestError(Exception):
    """A request that is answered with an error, in the schema of its API."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@dataclass(frozen=True)
class ModelRequest:
    """A conversation to be continued, or a ``prompt`` of text or token ids instead.

    Args:
        tools: None if the model is not to be shown any.
        stored: the conversation that a later request continues if it names the answer to this one, without that answer;
            None if no request may.
    """

    model: str
    sampling: SamplingParams
    choices: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    messages: list[Message] = field(default_factory=list)
    tools: Tools = None
    parallel_tool_calls: bool = True
    prompt: str | list[int] | None = None
    stored: list[Message] | None = None


@dataclass(frozen=True)
class ModelReply:
    """One sampled reply, or what is certain of it while it is generated.

    Args:
        finish_reason: "stop", "length", "tool_calls" or "abort"; "" while it is generated.
        stopped_by: the stop string that ended the text.
        logprobs: text and log-probability of each token; None if they were not requested.
        reasoning_tokens: how many of its tokens are reasoning.
    """

    index: int
    text: str
    finish_reason: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    reasoning: str = ""
    stopped_by: str | None = None
    logprobs: list[tuple[str, float]] | None = None
    token_ids: list[int] | None = None
    reasoning_tokens: int = 0

    @property
    def message(self) -> Message:
        """For chat templates, and as a later request is read."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


@dataclass(frozen=True)
class AnswerHead:
    """What an answer has besides its replies. ``created`` is in seconds since 1970."""

    id: str
    model: str
    created: int
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_token_ids: list[int] | None = None


class ServerSentEvent(NamedTuple):
    """A server-sent event; ``data`` is JSON, or text as it is."""

    name: str
    data: Mapping[str, object] | str

    @property
    def text(self) -> str:
        data = self.data if isinstance(self.data, str) else json.dumps(self.data)
        return f"event: {self.name}\ndata: {data}\n\n" if self.name else f"data: {data}\n\n"


class Delta(NamedTuple):
    """What is new of a reply."""

    reasoning: str
    text: str
    logprobs: list[tuple[str, float]] | None
    token_ids: list[int] | None


class SentReply:
    """How much of one reply has been sent. Nothing that was sent is taken back."""

    def __init__(self) -> None:
        self._reasoning = self._text = self._tokens = 0

    def delta(self, reply: ModelReply) -> Delta:
        """What has not been sent yet; it counts as sent from now on."""
        logprobs, tokens = reply.logprobs, reply.token_ids
        found = Delta(
            reply.reasoning[self._reasoning :],
            reply.text[self._text :],
            None if logprobs is None else logprobs[self._tokens :],
            None if tokens is None else tokens[self._tokens :],
        )
        self._reasoning = max(self._reasoning, len(reply.reasoning))
        self._text = max(self._text, len(reply.text))
        self._tokens = max(self._tokens, len(logprobs or tokens or ()))
        return found


class ApiStream(Protocol):
    """One answer as events: ``begin``, then ``update`` for every reply whenever it has grown and once with its
    ``finish_reason``, then ``end``; or ``fail``, at any point."""

    def begin(self, head: AnswerHead) -> Iterator[ServerSentEvent]: ...
    def update(self, reply: ModelReply) -> Iterator[ServerSentEvent]: ...
    def end(self, head: AnswerHead, replies: Sequence[ModelReply]) -> Iterator[ServerSentEvent]: ...
    def fail(self, error: RequestError) -> Iterator[ServerSentEvent]: ...


class EpisodeContext(Protocol):
    """What the episode of a request knows: its sampling, and the conversations that its answers ended."""

    sampling: SamplingParams
    conversations: dict[str, list[Message]]


class Api(Protocol):
    """One API; ``prefix`` begins the ids of its answers."""

    prefix: str

    def read(self, body: Body, episode: EpisodeContext) -> ModelRequest:
        """Raises ``RequestError``, naming the field that is wrong or not supported."""

    def answer(self, request: ModelRequest, head: AnswerHead, replies: Sequence[ModelReply]) -> Body: ...
    def stream(self, request: ModelRequest) -> ApiStream: ...
    def error(self, error: RequestError) -> Body: ...


def from_json(text: str | bytes) -> Any:  # noqa: ANN401  (JSON)
    """Raises ``ValueError`` or ``RecursionError`` for what is no JSON, or nested too deeply."""
    collecting = gc.isenabled()
    gc.disable()  # it would walk through a body of many lists again and again
    try:
        return json.loads(text)
    finally:
        if collecting:
            gc.enable()
