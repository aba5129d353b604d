"""OpenAI's chat completions (``/v1/chat/completions``) and text completions (``/v1/completions``).

A stream adds up to the whole answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from skyasync.agents.api import (
    NUMBERS,
    ROLES,
    AnswerHead,
    Api,
    Body,
    Message,
    ModelReply,
    ModelRequest,
    RequestError,
    check_fields,
    content_of,
    event,
    flag,
    given,
    number,
    sampling,
    shows_tools,
    tool_call,
)
from skyasync.config.keys import Key

if TYPE_CHECKING:
    from skyasync.agents.calls import Session

_CHOICES = Key("", int, low=1, high=128)

#: Fields for OpenAI's own service, which change no answer.
IGNORED = frozenset(
    [
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    ]
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
COMMON = {
    *NUMBERS,
    "model",
    "n",
    "stream",
    "stream_options",
    "return_token_ids",
    "logit_bias",
    "stop",
}
_TOOL_FIELDS = {"tools", "tool_choice", "parallel_tool_calls"}
CHAT_FIELDS = COMMON | _TOOL_FIELDS | {"messages", "logprobs", "max_completion_tokens"}
COMPLETION_FIELDS = COMMON | {"prompt", "logprobs"}


class ChatApi(Api):
    prefix = "chatcmpl"
    kind: ClassVar[str] = "chat.completion"
    chunk_kind: ClassVar[str] = "chat.completion.chunk"

    def read(self, body: Body, session: Session) -> ModelRequest:
        check_fields(body, CHAT_FIELDS, IGNORED, NEUTRAL)
        messages = given(body, "messages", list, "a list of messages")
        if not messages:
            raise RequestError("messages is empty", "messages")
        tools = given(body, "tools", list, "a list of tools", [])
        for index, tool in enumerate(tools):
            if isinstance(tool, dict):
                function = tool.get("function")
            else:
                function = None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise RequestError(
                    f"tools[{index}] must be of type function, with a name", f"tools[{index}]"
                )
        return ModelRequest(
            **self.common(body, session),
            logprobs=flag(body, "logprobs", default=False),
            messages=[
                _message(message, f"messages[{index}]") for index, message in enumerate(messages)
            ],
            tools=(tools or None) if shows_tools(body.get("tool_choice")) else None,
            parallel_tool_calls=flag(body, "parallel_tool_calls", default=True),
        )

    def common(self, body: Body, session: Session) -> dict[str, Any]:
        """The arguments of ``ModelRequest`` that chat and text completions share."""
        options = given(body, "stream_options", dict, "an object", {})
        return {
            "model": given(body, "model", str, "a name", "policy"),
            "sampling": sampling(body, session.sampling),
            "choices": int(number(body, "n", _CHOICES) or 1),
            "stream": flag(body, "stream", default=False),
            "include_usage": bool(options.get("include_usage")),
            "token_ids": flag(body, "return_token_ids", default=False),
        }

    def answer(self, head: AnswerHead, replies: Sequence[ModelReply]) -> Body:
        about = {"id": head.id, "object": self.kind, "created": head.created, "model": head.model}
        body = {
            **about,
            "choices": [self.choice(reply) for reply in replies],
            "usage": _usage(head),
        }
        if head.prompt_token_ids is None:
            return body
        return {**body, "prompt_token_ids": head.prompt_token_ids}

    def update(self, reply: ModelReply) -> str:
        first = reply.index not in self.sent
        new = self.unsent(reply)
        deltas: list[tuple[Body, Body]] = []  # each with what is sent next to it
        if first:
            deltas.append(({"role": "assistant", "content": ""}, {}))
        if new.reasoning:
            deltas.append(({"reasoning_content": new.reasoning}, {}))
        if new.text or new.logprobs or new.token_ids:
            more: Body = {} if new.token_ids is None else {"token_ids": new.token_ids}
            if new.logprobs:
                more["logprobs"] = _logprobs(new.logprobs)
            deltas.append(({"content": new.text} if new.text else {}, more))
        if reply.tool_calls:
            deltas.append(
                ({"tool_calls": [{"index": i, **c} for i, c in enumerate(_tool_calls(reply))]}, {})
            )
        if reply.finish_reason:
            deltas.append(({}, {"finish_reason": reply.finish_reason}))
        empty = {"index": reply.index, "finish_reason": None, "logprobs": None}
        return "".join(self.chunk([{**empty, "delta": delta, **more}]) for delta, more in deltas)

    def end(self, head: AnswerHead, replies: Sequence[ModelReply]) -> str:
        if self.request.include_usage:
            usage = self.chunk([], usage=_usage(head))
        else:
            usage = ""
        return usage + event("[DONE]")

    def chunk(self, choices: list[Body], **more: object) -> str:
        about = {
            "id": self.head.id,
            "object": self.chunk_kind,
            "created": self.head.created,
            "model": self.head.model,
        }
        return event({**about, "choices": choices, **more})

    def choice(self, reply: ModelReply) -> Body:
        message: Body = {"role": "assistant", "content": reply.text, "refusal": None}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message |= {"content": reply.text or None, "tool_calls": _tool_calls(reply)}
        body = {"index": reply.index, "message": message, "finish_reason": reply.finish_reason}
        if reply.logprobs is None:
            body["logprobs"] = None
        else:
            body["logprobs"] = _logprobs(reply.logprobs)
        if reply.token_ids is None:
            return body
        return {**body, "token_ids": reply.token_ids}


class CompletionsApi(ChatApi):
    """Text completions, of text or of token ids."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def read(self, body: Body, session: Session) -> ModelRequest:
        check_fields(body, COMPLETION_FIELDS, IGNORED, NEUTRAL)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        tokens = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not prompt or not (tokens or isinstance(prompt, str)):
            raise RequestError(
                "prompt must be one text or one list of token ids, not empty", "prompt"
            )
        if (body.get("logprobs") or 0) not in (0, 1):
            problem = f"logprobs={body['logprobs']!r:.100} is not supported here"
            problem = f"{problem}: 0 or 1 gives those of the sampled tokens"
            raise RequestError(problem, "logprobs", "unsupported_parameter")
        return ModelRequest(
            **self.common(body, session), logprobs=body.get("logprobs") is not None, prompt=prompt
        )

    def update(self, reply: ModelReply) -> str:
        new = self.unsent(reply)
        sends = new.text or new.logprobs or new.token_ids or reply.finish_reason
        if sends:
            return self.chunk([self.choice(new)])
        return ""

    def choice(self, reply: ModelReply) -> Body:
        body: Body = {
            "index": reply.index,
            "text": reply.text,
            "finish_reason": reply.finish_reason or None,
        }
        body["logprobs"] = None
        if reply.logprobs is not None:
            tokens = [token for token, _ in reply.logprobs]
            values = [value for _, value in reply.logprobs]
            body["logprobs"] = {
                "tokens": tokens,
                "token_logprobs": values,
                "top_logprobs": None,
                "text_offset": None,
            }
        if reply.token_ids is None:
            return body
        return {**body, "token_ids": reply.token_ids}


def _usage(head: AnswerHead) -> dict[str, int]:
    read = head.prompt_tokens
    wrote = head.completion_tokens
    return {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}


def _logprobs(pairs: Sequence[tuple[str, float]]) -> Body:
    content = [
        {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
        for token, value in pairs
    ]
    return {"content": content, "refusal": None}


def _tool_calls(reply: ModelReply) -> list[Body]:
    """The arguments travel as JSON text."""
    return [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"]),
            },
        }
        for call in reply.tool_calls
    ]


def _message(message: object, where: str) -> Message:
    """The message in the form that chat templates read."""
    if not isinstance(message, dict) or message.get("role") not in list(ROLES):
        raise RequestError(f"{where} must be an object with a role of {', '.join(ROLES)}", where)
    read: Message = {
        "role": ROLES[message["role"]],
        "content": content_of(message.get("content"), f"{where}.content"),
    }
    if message["role"] == "tool":
        read["tool_call_id"] = str(message.get("tool_call_id", ""))
    if isinstance(message.get("name"), str):
        read["name"] = message["name"]
    thought = message.get("reasoning_content") or message.get("reasoning")
    if message["role"] == "assistant" and isinstance(thought, str):
        read["reasoning_content"] = thought
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise RequestError(f"{where}.tool_calls must be a list", where)
        where = f"{where}.tool_calls"
        read["tool_calls"] = []
        for call in calls:
            if isinstance(call, dict):
                function = call.get("function")
            else:
                function = None
            if not isinstance(function, dict):
                raise RequestError(
                    f"{where} must be objects with a function that has a name and arguments", where
                )
            read["tool_calls"].append(
                tool_call(function.get("name"), function.get("arguments"), call.get("id"), where)
            )
    return read
