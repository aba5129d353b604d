"""What all forms of a request ask for, and what all forms of an answer have.

Invariant: nothing here knows of any form.
"""

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
    """A request that is answered with an error, in the form in which it came."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@dataclass(frozen=True)
class Asked:
    """What a request asks for besides its prompt."""

    model: str
    sampling: SamplingParams
    choices: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False


@dataclass(frozen=True)
class Request:
    """A conversation to be continued, or a ``prompt`` of text or token ids in its place.

    Args:
        tools: None where the model shall not be shown any.
        begun: what a later request goes on from that names this one's answer, the reply not counted; None if none may.
    """

    asked: Asked
    messages: list[Message] = field(default_factory=list)
    tools: Tools = None
    parallel_tool_calls: bool = True
    prompt: str | list[int] | None = None
    begun: list[Message] | None = None


@dataclass(frozen=True)
class Choice:
    """One sampled reply, or what is certain of it while it is made.

    Args:
        finish_reason: "stop", "length", "tool_calls" or "abort"; "" while it is made.
        stopped_by: the stop string that ended the text.
        logprobs: text and log-probability of each token, None if they were not asked for.
        thought: how many of its tokens are reasoning.
    """

    index: int
    text: str
    finish_reason: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    reasoning: str = ""
    stopped_by: str | None = None
    logprobs: list[tuple[str, float]] | None = None
    token_ids: list[int] | None = None
    thought: int = 0

    @property
    def message(self) -> Message:
        """In the form of chat templates, as a later request is read."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


@dataclass(frozen=True)
class Answer:
    """What every form of an answer has. ``created`` is in seconds since 1970."""

    id: str
    model: str
    created: int
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_token_ids: list[int] | None = None


class Event(NamedTuple):
    """A server-sent event; ``data`` is JSON, or text as it is."""

    name: str
    data: Mapping[str, object] | str

    @property
    def text(self) -> str:
        data = self.data if isinstance(self.data, str) else json.dumps(self.data)
        return f"event: {self.name}\ndata: {data}\n\n" if self.name else f"data: {data}\n\n"


class Delta(NamedTuple):
    """What is new of a choice."""

    reasoning: str
    text: str
    logprobs: list[tuple[str, float]] | None
    token_ids: list[int] | None


class Told:
    """How much of one choice has been sent. Nothing that was sent is ever taken back."""

    def __init__(self) -> None:
        self._reasoning = self._text = self._tokens = 0

    def news(self, choice: Choice) -> Delta:
        """What has not been sent yet."""
        logprobs, tokens = choice.logprobs, choice.token_ids
        found = Delta(
            choice.reasoning[self._reasoning :],
            choice.text[self._text :],
            None if logprobs is None else logprobs[self._tokens :],
            None if tokens is None else tokens[self._tokens :],
        )
        self._reasoning = max(self._reasoning, len(choice.reasoning))
        self._text = max(self._text, len(choice.text))
        self._tokens = max(self._tokens, len(logprobs or tokens or ()))
        return found


class Stream(Protocol):
    """One answer as events. ``begin``, then for every choice ``go_on`` as often as there is news and once with its
    ``finish_reason``, then ``end``; or ``fail``, at any point."""

    def begin(self, answer: Answer) -> Iterator[Event]: ...
    def go_on(self, choice: Choice) -> Iterator[Event]: ...
    def end(self, answer: Answer, choices: Sequence[Choice]) -> Iterator[Event]: ...
    def fail(self, error: RequestError) -> Iterator[Event]: ...


class Known(Protocol):
    """What the episode of a request knows: its sampling, and the conversations that its answers ended."""

    sampling: SamplingParams
    conversations: dict[str, list[Message]]


class Form(Protocol):
    """One API."""

    prefix: str  # of the ids of its answers

    def read(self, body: Body, known: Known) -> Request:
        """Raises ``RequestError``, naming the field that is wrong or cannot be carried out."""

    def whole(self, request: Request, answer: Answer, choices: Sequence[Choice]) -> Body: ...
    def stream(self, request: Request) -> Stream: ...
    def error(self, error: RequestError) -> Body: ...


def from_json(said: str | bytes) -> Any:  # noqa: ANN401  (JSON)
    """Raises ``ValueError`` or ``RecursionError`` for what is no JSON, or nested too deeply."""
    collecting = gc.isenabled()
    gc.disable()  # of what is all lists it would look through everything again and again
    try:
        return json.loads(said)
    finally:
        if collecting:
            gc.enable()


def outgoing(arguments: object) -> str:
    """The arguments of a tool call travel as JSON text."""
    return json.dumps(arguments)
