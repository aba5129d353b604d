"""What all APIs have in common: requests to the model, its replies, and their streams."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from skyasync.inference.interface import SamplingParams
from skyasync.rollout.chat import Tools

if TYPE_CHECKING:
    from skyasync.agents.session import Session

Message = dict[str, Any]
"""As chat templates read it: content is text, or parts with images; the arguments of tool calls are values."""
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


class Api:
    """One request of an API, and its answer in the schema of that API: whole, or as server-sent events.

    A stream is ``begin``, then ``update`` for every reply whenever it has grown and once with its ``finish_reason``,
    then ``end``; or ``fail``, at any point after ``begin``. Nothing that was sent is taken back.

    Attributes:
        prefix: begins the ids of answers.
        counts_tokens: the answer is the length of the prompt; the model is not called.
    """

    prefix: ClassVar[str]
    counts_tokens: ClassVar[bool] = False

    def __init__(self, body: Body, session: Session) -> None:
        self.request = self.read(body, session)
        self.head = AnswerHead("", "", 0, 0)  # until the stream begins
        self.sent: dict[int, tuple[int, int, int]] = {}  # of each reply: characters of reasoning and text, tokens

    def read(self, body: Body, session: Session) -> ModelRequest:
        """Raises ``RequestError``, naming the field that is wrong or not supported."""
        raise NotImplementedError

    def answer(self, head: AnswerHead, replies: Sequence[ModelReply]) -> Body:
        raise NotImplementedError

    def begin(self, head: AnswerHead) -> str:
        self.head = head
        return ""

    def update(self, reply: ModelReply) -> str:
        raise NotImplementedError

    def end(self, head: AnswerHead, replies: Sequence[ModelReply]) -> str:
        raise NotImplementedError

    def fail(self, error: RequestError) -> str:
        return event(self.error(error))

    @staticmethod
    def error(error: RequestError) -> Body:
        """The body of an error, as OpenAI sends it."""
        types = {401: "authentication_error", 403: "permission_error", 500: "server_error"}
        kind = types.get(error.status, "invalid_request_error")
        return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}

    def unsent(self, reply: ModelReply) -> ModelReply:
        """The reply without what has been sent of it; the rest counts as sent from now on."""
        reasoning, text, tokens = self.sent.get(reply.index, (0, 0, 0))
        self.sent[reply.index] = (
            max(reasoning, len(reply.reasoning)),
            max(text, len(reply.text)),
            max(tokens, len(reply.logprobs or reply.token_ids or ())),
        )
        return replace(
            reply,
            reasoning=reply.reasoning[reasoning:],
            text=reply.text[text:],
            logprobs=None if reply.logprobs is None else reply.logprobs[tokens:],
            token_ids=None if reply.token_ids is None else reply.token_ids[tokens:],
        )


def event(data: Body | str, name: str = "") -> str:
    """A server-sent event; text is sent as it is."""
    text = data if isinstance(data, str) else json.dumps(data)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


def from_json(text: str | bytes) -> Any:  # noqa: ANN401  (JSON)
    """Raises ``ValueError`` or ``RecursionError`` for what is no JSON, or nested too deeply."""
    collecting = gc.isenabled()
    gc.disable()  # it would walk through a body of many lists again and again
    try:
        return json.loads(text)
    finally:
        if collecting:
            gc.enable()
