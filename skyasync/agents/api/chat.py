"""OpenAI's chat completions: ``/v1/chat/completions``. A stream adds up to the whole answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skyasync.agents.api.types import (
    AnswerHead,
    Body,
    EpisodeContext,
    Message,
    ModelReply,
    ModelRequest,
    RequestError,
    SentReply,
    ServerSentEvent,
)
from skyasync.agents.api.validation import (
    ROLES,
    check_fields,
    flag,
    given,
    number,
    sampling,
    shows_tools,
    text_of,
    tool_call,
)
from skyasync.config.keys import Key
from skyasync.inference.interface import LIMITS, SamplingParams

_CHOICES = Key("", int, low=1, high=128)

#: Bookkeeping of OpenAI's own service.
IGNORED = frozenset(
    ["metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"]
)
#: Fields whose default value requests nothing, and that value; any other is rejected.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "function_call": (None,),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "top_logprobs": (None, 0),
    "verbosity": (None,),
    "web_search_options": (None,),
}
COMMON = frozenset(
    ["model", "n", "stream", "stream_options", "return_token_ids", "temperature", "top_p", "top_k", "min_p",
     "min_tokens", "presence_penalty", "frequency_penalty", "logit_bias", "repetition_penalty", "seed",
     "stop", "max_tokens"]
)  # fmt: skip
_FIELDS = COMMON | {
    "messages", "tools", "tool_choice", "parallel_tool_calls", "logprobs", "max_completion_tokens",
}  # fmt: skip


def common(body: Body, defaults: SamplingParams) -> dict[str, Any]:
    """The arguments of ``ModelRequest`` that chat and text completions share."""
    options = given(body, "stream_options", dict, "an object", {})
    return {
        "model": given(body, "model", str, "a name", "policy"),
        "sampling": sampling(body, defaults),
        "choices": int(number(body, "n", _CHOICES) or 1),
        "stream": flag(body, "stream", default=False),
        "include_usage": bool(options.get("include_usage")),
        "token_ids": flag(body, "return_token_ids", default=False),
    }


class ChatApi:
    """See ``Api``."""

    prefix = "chatcmpl"

    def read(self, body: Body, episode: EpisodeContext) -> ModelRequest:
        check_fields(body, _FIELDS, IGNORED, NEUTRAL)
        messages = given(body, "messages", list, "a list of messages")
        if not messages:
            raise RequestError("messages is empty", "messages")
        tools = given(body, "tools", list, "a list of tools", None) or None
        for index, tool in enumerate(tools or ()):
            function = tool.get("function") if isinstance(tool, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise RequestError(f"tools[{index}] must be of type function, with a name", f"tools[{index}]")
        shown = shows_tools(body.get("tool_choice"))
        if most := number(body, "max_completion_tokens", LIMITS["max_tokens"]):
            body = {**body, "max_tokens": most}
        return ModelRequest(
            **common(body, episode.sampling),
            logprobs=flag(body, "logprobs", default=False),
            messages=[_message(message, f"messages[{index}]") for index, message in enumerate(messages)],
            tools=tools if shown else None,
            parallel_tool_calls=flag(body, "parallel_tool_calls", default=True),
        )

    def answer(self, request: ModelRequest, head: AnswerHead, replies: Sequence[ModelReply]) -> Body:
        return completion(head, "chat.completion", [_choice(reply) for reply in replies])

    def stream(self, request: ModelRequest) -> ChatStream:
        return ChatStream(request)

    def error(self, error: RequestError) -> Body:
        return openai_error(error)


class CompletionStream:
    """What the streams of chat and text completions share; see ``ApiStream``."""

    kind: str

    def __init__(self, request: ModelRequest) -> None:
        self._usage, self.sent = request.include_usage, dict[int, SentReply]()
        self._head: Body = {}

    def begin(self, head: AnswerHead) -> Iterator[ServerSentEvent]:
        self._head = completion_head(head, self.kind)
        yield from ()

    def chunk(self, *choices: Body, **more: object) -> ServerSentEvent:
        return ServerSentEvent("", {**self._head, "choices": choices, **more})

    def end(self, head: AnswerHead, replies: Sequence[ModelReply]) -> Iterator[ServerSentEvent]:
        if self._usage:
            yield self.chunk(usage=usage(head))
        yield ServerSentEvent("", "[DONE]")

    def fail(self, error: RequestError) -> Iterator[ServerSentEvent]:
        yield ServerSentEvent("", openai_error(error))


class ChatStream(CompletionStream):
    kind = "chat.completion.chunk"

    def update(self, reply: ModelReply) -> Iterator[ServerSentEvent]:
        if reply.index not in self.sent:
            self.sent[reply.index] = SentReply()
            yield self._delta(reply, {"role": "assistant", "content": ""})
        new = self.sent[reply.index].delta(reply)
        if new.reasoning:
            yield self._delta(reply, {"reasoning_content": new.reasoning})
        more: Body = {} if new.token_ids is None else {"token_ids": new.token_ids}
        if new.logprobs:
            more["logprobs"] = _logprobs(new.logprobs)
        if new.text or new.logprobs or new.token_ids:
            yield self._delta(reply, {"content": new.text} if new.text else {}, **more)
        if reply.tool_calls:
            calls = [{"index": i, **_with_json(call)} for i, call in enumerate(reply.tool_calls)]
            yield self._delta(reply, {"tool_calls": calls})
        if reply.finish_reason:
            yield self._delta(reply, {}, finish_reason=reply.finish_reason)

    def _delta(self, reply: ModelReply, delta: Body, **more: object) -> ServerSentEvent:
        return self.chunk({"index": reply.index, "delta": delta, "finish_reason": None, "logprobs": None, **more})


def openai_error(error: RequestError) -> Body:
    kinds = {401: "authentication_error", 403: "permission_error", 500: "server_error"}
    kind = kinds.get(error.status, "invalid_request_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def usage(head: AnswerHead) -> dict[str, int]:
    read, wrote = head.prompt_tokens, head.completion_tokens
    return {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}


def completion_head(head: AnswerHead, kind: str) -> Body:
    return {"id": head.id, "object": kind, "created": head.created, "model": head.model}


def completion(head: AnswerHead, kind: str, choices: list[Body]) -> Body:
    """A whole answer."""
    body = {**completion_head(head, kind), "choices": choices, "usage": usage(head)}
    return body if head.prompt_token_ids is None else {**body, "prompt_token_ids": head.prompt_token_ids}


def _choice(reply: ModelReply) -> Body:
    message: Body = {"role": "assistant", "content": reply.text, "refusal": None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message |= {"content": reply.text or None, "tool_calls": [_with_json(call) for call in reply.tool_calls]}
    body = {"index": reply.index, "message": message, "finish_reason": reply.finish_reason}
    body["logprobs"] = None if reply.logprobs is None else _logprobs(reply.logprobs)
    return body if reply.token_ids is None else {**body, "token_ids": reply.token_ids}


def _logprobs(found: Sequence[tuple[str, float]]) -> Body:
    content = [
        {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []} for token, value in found
    ]
    return {"content": content, "refusal": None}


def _with_json(call: Mapping[str, Any]) -> Body:
    """The arguments travel as JSON text."""
    function = call["function"]
    return {**call, "function": {"name": function["name"], "arguments": json.dumps(function["arguments"])}}


def _message(message: object, where: str) -> Message:
    """As chat templates read it."""
    if not isinstance(message, dict) or message.get("role") not in list(ROLES):
        raise RequestError(f"{where} must be an object with a role of {', '.join(ROLES)}", where)
    found: Message = {"role": ROLES[message["role"]], "content": text_of(message.get("content"), f"{where}.content")}
    if message["role"] == "tool":
        found["tool_call_id"] = str(message.get("tool_call_id", ""))
    if isinstance(message.get("name"), str):
        found["name"] = message["name"]
    thought = message.get("reasoning_content") or message.get("reasoning")
    if message["role"] == "assistant" and isinstance(thought, str):
        found["reasoning_content"] = thought
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise RequestError(f"{where}.tool_calls must be a list", where)
        found["tool_calls"] = [_tool_call(call, f"{where}.tool_calls") for call in calls]
    return found


def _tool_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise RequestError(f"{where} must be objects with a function that has a name and arguments", where)
    return tool_call(function.get("name"), function.get("arguments"), call.get("id"), where)
