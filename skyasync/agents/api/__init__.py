"""The APIs of the endpoint, one file each, and their common requests, replies, streams and fields.

An API reads its requests into the one ``ModelRequest``, and writes the ``ModelReply``s to it in its
own schema. Nothing here touches an engine, a tokenizer or the network.

Invariant: every field of a request is either carried out or rejected with an error that names it;
only fields that cannot change an answer are ignored.
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from skyasync.config.keys import Key
from skyasync.config.schema.sampling import LARGEST_BIAS
from skyasync.envs.images import NO_IMAGES, image_part, read_parts
from skyasync.errors import UserError, nearest
from skyasync.inference.interface import LIMITS, SamplingParams
from skyasync.rollout.chat import Tools

if TYPE_CHECKING:
    from skyasync.agents.calls import Session

T = TypeVar("T")

#: The numbers by which a request may sample, by the names of ``SamplingParams``.
NUMBERS = tuple(name for name in LIMITS if not name.endswith("_token_ids"))
#: Field of a request -> name of ``SamplingParams``: the same, or newer names of the length.
_NUMBER_FIELDS = [(name, name) for name in NUMBERS]
_NUMBER_FIELDS += [("max_completion_tokens", "max_tokens"), ("max_output_tokens", "max_tokens")]
MOST_STOPS = 64  # stop strings: every one is searched for in every reply
LONGEST_STOP = 256  # characters
MOST_BIASES = 4096  # tokens with a bias
#: The roles of requests, and the roles that chat templates know.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}

_BIAS = Key("", float, low=-LARGEST_BIAS, high=LARGEST_BIAS)

Message = dict[str, Any]
"""A message for chat templates: its content is text, or parts with images; the arguments of tool
calls are values, not JSON text."""
Body = dict[str, Any]  # JSON


class RequestError(Exception):
    """A request that is answered with an error, in the schema of its API."""

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


@dataclass(frozen=True)
class ModelRequest:
    """A conversation to be continued, or a ``prompt`` of text or token ids instead.

    Args:
        tools: None if the model is not to be shown any.
        stored: the conversation that a later request continues if it names the answer to this one,
            without that answer; None if no request may.
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
        reasoning_tokens: number of its tokens that are reasoning.
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
        """The reply as a message for templates, equal to one that a later request sends back."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


@dataclass(frozen=True)
class AnswerHead:
    """The fields of an answer other than its replies; ``created`` is in seconds since 1970."""

    id: str
    model: str
    created: int
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_token_ids: list[int] | None = None


class Api:
    """One request of an API, and its answer in the API's schema: complete, or as a stream of events.

    A stream is ``begin``, then ``update`` for every reply whenever it has grown and once with its
    ``finish_reason``, then ``end``; or ``fail``, at any point after ``begin``. Nothing that was
    sent is taken back.

    Attributes:
        prefix: begins the ids of answers.
        counts_tokens: the answer is the length of the prompt; the model is not called.
    """

    prefix: ClassVar[str]
    counts_tokens: ClassVar[bool] = False

    def __init__(self, body: Body, session: Session) -> None:
        self.request = self.read(body, session)
        self.head = AnswerHead("", "", 0, 0)  # until the stream begins
        # By reply: characters of the reasoning, characters of the text, tokens.
        self.sent: dict[int, tuple[int, int, int]] = {}

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
        return {
            "error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}
        }

    def unsent(self, reply: ModelReply) -> ModelReply:
        """The reply without the part that has been sent; the rest counts as sent from now on."""
        reasoning, text, tokens = self.sent.get(reply.index, (0, 0, 0))
        self.sent[reply.index] = (
            max(reasoning, len(reply.reasoning)),
            max(text, len(reply.text)),
            max(tokens, len(reply.logprobs or reply.token_ids or ())),
        )
        logprobs = reply.logprobs
        if logprobs is not None:
            logprobs = logprobs[tokens:]
        token_ids = reply.token_ids
        if token_ids is not None:
            token_ids = token_ids[tokens:]
        return replace(
            reply,
            reasoning=reply.reasoning[reasoning:],
            text=reply.text[text:],
            logprobs=logprobs,
            token_ids=token_ids,
        )


def event(data: Body | str, name: str = "") -> str:
    """A server-sent event; text is sent unchanged."""
    text = data if isinstance(data, str) else json.dumps(data)
    if name:
        return f"event: {name}\ndata: {text}\n\n"
    return f"data: {text}\n\n"


def from_json(text: str | bytes) -> Any:  # noqa: ANN401  (JSON)
    """The value of JSON text.

    Raises:
        ValueError: if it is no JSON.
        RecursionError: if it is nested too deeply.
    """
    collecting = gc.isenabled()
    gc.disable()  # it would walk through a body of many lists again and again
    try:
        return json.loads(text)
    finally:
        if collecting:
            gc.enable()


# ---------------------------------------------------------------- fields


def check_fields(
    body: Body,
    supported: Collection[str],
    ignored: Collection[str],
    neutral: Mapping[str, tuple[Any, ...]],
) -> None:
    """Raises ``RequestError`` for a field that is not supported.

    Args:
        neutral: values with which other fields request nothing.
    """
    for name, value in body.items():
        if name in supported or name in ignored:
            continue
        if name not in neutral:
            close = nearest(name[:100], {*supported, *neutral}, count=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise RequestError(f"unknown field {name:.100}{hint}", name[:100], "unknown_parameter")
        if value not in neutral[name]:
            raise RequestError(
                f"{name}={value!r:.200} is not supported here: remove it",
                name,
                "unsupported_parameter",
            )


def given(
    body: Mapping[str, Any], name: str, kind: type[T], form: str, default: T | None = None
) -> T:
    """The value of a field, which must be of this type; ``default`` if it is null or missing."""
    value = body.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, kind):
        raise RequestError(f"{name} must be {form}", name)
    return value


def common_fields(body: Body, session: Session) -> dict[str, Any]:
    """The arguments of ``ModelRequest`` that all APIs have."""
    return {
        "model": given(body, "model", str, "a name", "policy"),
        "sampling": sampling(body, session.sampling),
        "stream": flag(body, "stream", default=False),
    }


def flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    return given(body, name, bool, "true or false", default)


def number(body: Mapping[str, Any], name: str, limits: Key) -> float | None:
    """The number of a field within its bounds; None if it is null or missing."""
    value = body.get(name)
    if value is None:
        return None
    # Not isinstance: true and false are integers in Python.
    right_kind = type(value) is int or (type(value) is float and limits.type is float)
    if not right_kind or not limits.allows(value):
        kind = "number" if limits.type is float else "whole number"
        raise RequestError(f"{name} must be a {kind} {limits.bounds()}; it is {value!r:.100}", name)
    return value


def sampling(body: Body, defaults: SamplingParams) -> SamplingParams:
    """The sampling of a request, whose fields have the names of any API.

    Args:
        defaults: hold for fields that the request leaves out.
    """
    requested: dict[str, Any] = {}
    for field_name, name in _NUMBER_FIELDS:
        value = number(body, field_name, LIMITS[name])
        if value is not None:
            requested[name] = value
    bias = given(body, "logit_bias", dict, "an object", {})
    if bias:
        if len(bias) > MOST_BIASES:
            raise RequestError(
                f"logit_bias has {len(bias)} tokens; it may have {MOST_BIASES}", "logit_bias"
            )
        if not all(token.isascii() and token.isdigit() and len(token) < 10 for token in bias):
            raise RequestError("logit_bias must have token ids as its names", "logit_bias")
        requested["logit_bias"] = {int(token): number(bias, token, _BIAS) or 0.0 for token in bias}
    for name in ("stop", "stop_sequences"):
        if body.get(name) is not None:
            requested["stop"] = _stop_strings(body[name], name)
    try:
        return replace(defaults, **requested)
    except ValueError as error:  # of half a surrogate pair
        raise RequestError(str(error)) from error


def _stop_strings(value: object, name: str) -> tuple[str, ...]:
    stop = [value] if isinstance(value, str) else value
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise RequestError(f"{name} must be a text or a list of texts, none of them empty", name)
    if len(stop) > MOST_STOPS or max(map(len, stop), default=0) > LONGEST_STOP:
        limits = f"{MOST_STOPS} texts of {LONGEST_STOP} characters"
        raise RequestError(f"{name} may have {limits}; it has {len(stop)}, or a longer one", name)
    return tuple(stop)


def content_of(content: object, where: str) -> str | list[dict[str, Any]]:
    """The text of a message; a list of parts if images are among them, which have been read.

    Raises:
        RequestError: for a part that is neither text nor an image as a data: URL.
    """
    if not isinstance(content, list) or not any(image_part(part) for part in content):
        return text_of(content, where)
    try:
        blocks = read_parts(content, files=False)  # a client must not read this machine's files
    except UserError as error:
        raise RequestError(f"{where}: {error}", where, "unsupported_content") from error
    return [
        block if image_part(block) else {"type": "text", "text": text_of([block], where)}
        for block in blocks
    ]


def text_of(content: object, where: str) -> str:
    """The text of a message, or of its parts together.

    Raises:
        RequestError: for a part that is not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    blocks: list[Any] = content if isinstance(content, list) else [content]
    text = ""
    for block in blocks:
        check_no_image(block, where)
        if not isinstance(block, dict) or not isinstance(block.get("text"), str):
            raise RequestError(f"{where} must be text, or a list of parts of type text", where)
        text += block["text"]
    return text


def check_no_image(part: object, where: str) -> None:
    """Raises ``RequestError`` for a part that is an image."""
    kind = image_part(part)
    if kind:
        raise RequestError(
            f"{where} has a part of type {kind}: {NO_IMAGES}", where, "unsupported_content"
        )


def tool_call(name: object, arguments: object, identity: object, where: str) -> dict[str, Any]:
    """A tool call in a message of a request, in the form that templates read."""
    if not isinstance(name, str):
        raise RequestError(f"{where} must have a name and arguments", where)
    if isinstance(arguments, str):
        # Text that is no JSON is shown to the model as it is.
        with contextlib.suppress(ValueError, RecursionError):
            arguments = from_json(arguments)
    return {
        "id": str(identity or ""),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def function_tools(body: Body, shown: bool, kind: str, schema: str) -> Tools:
    """The tools of a request in the form that templates read; None if the model is shown none.

    Args:
        shown: the result of ``shows_tools``.
        kind: the type that a tool must have.
        schema: the field of a tool with the schema of its parameters.
    """
    requested = given(body, "tools", list, "a list of tools", [])
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(requested if shown else ()):
        where = f"tools[{index}]"
        tool_type = tool
        if isinstance(tool, dict):
            # Anthropic's clients leave out the type of their own tools.
            tool_type = tool.get("type", "custom" if kind == "custom" else None)
        if not isinstance(tool, dict) or tool_type != kind:
            raise RequestError(
                f"{where} has the type {tool_type}: only tools of type {kind} are known here", where
            )
        name = tool.get("name")
        description = tool.get("description")
        parameters = tool.get(schema)
        if not isinstance(name, str) or not name:
            raise RequestError(f"{where} must have a name", where)
        function: dict[str, Any] = {"name": name}
        if isinstance(description, str):
            function["description"] = description
        if not isinstance(parameters, dict):  # a tool without arguments
            parameters = {"type": "object", "properties": {}}
        function["parameters"] = parameters
        tools.append({"type": "function", "function": function})
    return tools or None


def shows_tools(choice: object, name: str = "tool_choice") -> bool:
    """Whether the model is shown the tools. Raises ``RequestError`` if a call is required."""
    if choice not in (None, "auto", "none"):
        raise RequestError(
            f"{name} must be auto or none: a call of a tool cannot be enforced here", "tool_choice"
        )
    return choice != "none"
