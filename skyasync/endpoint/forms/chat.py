"""OpenAI's chat completions: ``/v1/chat/completions``.

Invariant: that of ``fields``; and what a stream sends, put together, is what the whole answer says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from skyasync.config.keys import Key
from skyasync.endpoint.forms.fields import flag, given, number, refuse_others, sampling, text_of, tool_call
from skyasync.endpoint.forms.inner import (
    Answer,
    Asked,
    Body,
    Choice,
    Event,
    Known,
    Message,
    Request,
    RequestError,
    Told,
    outgoing,
)
from skyasync.inference.interface import LIMITS, SamplingParams

_CHOICES = Key("", int, low=1, high=128)

#: Bookkeeping of OpenAI's own service.
PASSED_OVER = frozenset(
    ["metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"]
)
#: Fields whose default value asks for nothing, and that value; any other is refused.
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
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def common(body: Body, defaults: SamplingParams) -> Asked:
    """What chat and text completions have in common."""
    options = given(body, "stream_options", dict, "an object", {})
    return Asked(
        model=given(body, "model", str, "a name", "policy"),
        sampling=sampling(body, defaults),
        choices=int(number(body, "n", _CHOICES) or 1),
        stream=flag(body, "stream", default=False),
        include_usage=bool(options.get("include_usage")),
        token_ids=flag(body, "return_token_ids", default=False),
    )


class ChatForm:
    """See ``Form``."""

    prefix = "chatcmpl"

    def read(self, body: Body, known: Known) -> Request:
        refuse_others(body, _FIELDS, PASSED_OVER, NEUTRAL)
        messages = given(body, "messages", list, "a list of messages")
        if not messages:
            raise RequestError("messages is empty", "messages")
        tools = given(body, "tools", list, "a list of tools", None) or None
        for index, tool in enumerate(tools or ()):
            function = tool.get("function") if isinstance(tool, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise RequestError(f"tools[{index}] must be of type function, with a name", f"tools[{index}]")
        choice = body.get("tool_choice")
        if choice not in (None, "auto", "none"):
            problem = "tool_choice must be auto or none: a call of a tool cannot be enforced here"
            raise RequestError(problem, "tool_choice")
        if most := number(body, "max_completion_tokens", LIMITS["max_tokens"]):
            body = {**body, "max_tokens": most}
        return Request(
            replace(common(body, known.sampling), logprobs=flag(body, "logprobs", default=False)),
            [_message(message, f"messages[{index}]") for index, message in enumerate(messages)],
            None if choice == "none" else tools,
            flag(body, "parallel_tool_calls", default=True),
        )

    def whole(self, request: Request, answer: Answer, choices: Sequence[Choice]) -> Body:
        body = {**head(answer, "chat.completion"), "choices": [_choice(choice) for choice in choices],
                "usage": usage(answer)}  # fmt: skip
        return with_prompt(body, answer)

    def stream(self, request: Request) -> ChatStream:
        return ChatStream(usage=request.asked.include_usage)

    def error(self, error: RequestError) -> Body:
        return openai_error(error)


class OpenAIStream:
    """What the streams of both completions have in common: see ``Stream``."""

    kind: str

    def __init__(self, *, usage: bool) -> None:
        self._usage, self.told = usage, dict[int, Told]()
        self.head: Body = {}

    def begin(self, answer: Answer) -> Iterator[Event]:
        self.head = head(answer, self.kind)
        yield from ()

    def end(self, answer: Answer, choices: Sequence[Choice]) -> Iterator[Event]:
        if self._usage:
            yield Event("", {**self.head, "choices": [], "usage": usage(answer)})
        yield Event("", "[DONE]")

    def fail(self, error: RequestError) -> Iterator[Event]:
        yield Event("", openai_error(error))


class ChatStream(OpenAIStream):
    """See ``Stream``."""

    kind = "chat.completion.chunk"

    def go_on(self, choice: Choice) -> Iterator[Event]:
        if choice.index not in self.told:
            self.told[choice.index] = Told()
            yield self._chunk(choice, {"role": "assistant", "content": ""})
        news = self.told[choice.index].news(choice)
        if news.reasoning:
            yield self._chunk(choice, {"reasoning_content": news.reasoning})
        rest: Body = {} if news.token_ids is None else {"token_ids": news.token_ids}
        if news.logprobs:
            rest["logprobs"] = _logprobs(news.logprobs)
        if news.text or news.logprobs or news.token_ids:
            yield self._chunk(choice, {"content": news.text} if news.text else {}, **rest)
        if choice.tool_calls:
            calls = [{"index": i, **_outgoing(call)} for i, call in enumerate(choice.tool_calls)]
            yield self._chunk(choice, {"tool_calls": calls})
        if choice.finish_reason:
            yield self._chunk(choice, {}, finish_reason=choice.finish_reason)

    def _chunk(self, choice: Choice, delta: Body, **more: object) -> Event:
        part = {"index": choice.index, "delta": delta, "finish_reason": None, "logprobs": None, **more}
        return Event("", {**self.head, "choices": [part]})


def openai_error(error: RequestError) -> Body:
    kind = {401: "authentication_error", 403: "permission_error"}.get(error.status, "invalid_request_error")
    kind = "server_error" if error.status == 500 else kind
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def usage(answer: Answer) -> dict[str, int]:
    total = answer.prompt_tokens + answer.completion_tokens
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": total,
    }


def with_prompt(body: Body, answer: Answer) -> Body:
    return body if answer.prompt_token_ids is None else {**body, "prompt_token_ids": answer.prompt_token_ids}


def head(answer: Answer, kind: str) -> Body:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.model}


def _choice(choice: Choice) -> Body:
    message: Body = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message |= {"content": choice.text or None, "tool_calls": [_outgoing(call) for call in choice.tool_calls]}
    body = {"index": choice.index, "message": message, "finish_reason": choice.finish_reason}
    body["logprobs"] = None if choice.logprobs is None else _logprobs(choice.logprobs)
    return body if choice.token_ids is None else {**body, "token_ids": choice.token_ids}


def _logprobs(found: Sequence[tuple[str, float]]) -> Body:
    content = [
        {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []} for token, value in found
    ]
    return {"content": content, "refusal": None}


def _outgoing(call: Mapping[str, Any]) -> Body:
    function = call["function"]
    return {**call, "function": {"name": function["name"], "arguments": outgoing(function["arguments"])}}


def _message(message: object, where: str) -> Message:
    """In the form of chat templates."""
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
    told = call if isinstance(call, dict) else {}
    function = told.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{where} must be objects with a function that has a name and arguments", where)
    return tool_call(function.get("name"), function.get("arguments"), told.get("id"), where)
