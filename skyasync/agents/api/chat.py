"""OpenAI's chat completions (``/v1/chat/completions``) and text completions (``/v1/completions``).

The chunks of a stream add up to the answer that a request without ``stream`` gets.
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
    common_fields,
    content_of,
    event,
    flag,
    given,
    number,
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
    """Chat completions; ``reasoning_content`` is vLLM's name for the thinking of a message."""

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
            function = tool.get("function") if isinstance(tool, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise RequestError(
                    f"tools[{index}] must be of type function, with a name", f"tools[{index}]"
                )
        return ModelRequest(
            **self.common(body, session),
            logprobs=flag(body, "logprobs", default=False),
            messages=[_message(item, f"messages[{index}]") for index, item in enumerate(messages)],
            tools=(tools or None) if shows_tools(body.get("tool_choice")) else None,
            parallel_tool_calls=flag(body, "parallel_tool_calls", default=True),
        )

    def common(self, body: Body, session: Session) -> dict[str, Any]:
        """The arguments of ``ModelRequest`` that chat and text completions share."""
        options = given(body, "stream_options", dict, "an object", {})
        return {
            **common_fields(body, session),
            "choices": int(number(body, "n", _CHOICES) or 1),
            "include_usage": bool(options.get("include_usage")),
            "token_ids": flag(body, "return_token_ids", default=False),
        }

    def answer(self, head: AnswerHead, replies: Sequence[ModelReply]) -> Body:
        body: Body = {
            "id": head.id,
            "object": self.kind,
            "created": head.created,
            "model": head.model,
            "choices": [self.choice(reply) for reply in replies],
            "usage": _usage(head),
        }
        if head.prompt_token_ids is not None:
            body["prompt_token_ids"] = head.prompt_token_ids
        return body

    def update(self, reply: ModelReply) -> str:
        begins = reply.index not in self.sent
        new = self.unsent(reply)
        sent = ""
        if begins:  # clients build the message from its role on
            sent += self._delta(reply, {"role": "assistant", "content": ""})
        if new.reasoning:
            sent += self._delta(reply, {"reasoning_content": new.reasoning})
        if new.text or new.logprobs or new.token_ids:
            fields: Body = {}
            if new.token_ids is not None:
                fields["token_ids"] = new.token_ids
            if new.logprobs:
                fields["logprobs"] = _logprobs(new.logprobs)
            # Tokens may have no text: special ones, or the first bytes of a character.
            sent += self._delta(reply, {"content": new.text} if new.text else {}, **fields)
        if reply.tool_calls:
            calls = [{"index": i, **call} for i, call in enumerate(_tool_calls(reply))]
            sent += self._delta(reply, {"tool_calls": calls})
        if reply.finish_reason:
            sent += self._delta(reply, {}, finish_reason=reply.finish_reason)
        return sent

    def _delta(self, reply: ModelReply, delta: Body, **fields: object) -> str:
        """A chunk with a part of one reply's message, and fields of its choice."""
        choice = {"index": reply.index, "finish_reason": None, "logprobs": None, "delta": delta}
        return self.chunk([choice | fields])

    def end(self, head: AnswerHead, replies: Sequence[ModelReply]) -> str:
        usage = ""
        if self.request.include_usage:
            usage = self.chunk([], usage=_usage(head))
        return usage + event("[DONE]")

    def chunk(self, choices: list[Body], **fields: object) -> str:
        """An event of the stream."""
        body: Body = {
            "id": self.head.id,
            "object": self.chunk_kind,
            "created": self.head.created,
            "model": self.head.model,
            "choices": choices,
        }
        return event({**body, **fields})

    def choice(self, reply: ModelReply) -> Body:
        message: Body = {"role": "assistant", "content": reply.text, "refusal": None}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["content"] = reply.text or None  # as OpenAI sends a message of calls alone
            message["tool_calls"] = _tool_calls(reply)
        body: Body = {
            "index": reply.index,
            "message": message,
            "finish_reason": reply.finish_reason,
            "logprobs": None,
        }
        if reply.logprobs is not None:
            body["logprobs"] = _logprobs(reply.logprobs)
        if reply.token_ids is not None:
            body["token_ids"] = reply.token_ids
        return body


class CompletionsApi(ChatApi):
    """Text completions, of text or of token ids."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def read(self, body: Body, session: Session) -> ModelRequest:
        check_fields(body, COMPLETION_FIELDS, IGNORED, NEUTRAL)
        prompt = body.get("prompt")
        # A batch of one prompt is that prompt.
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
        if new.text or new.logprobs or new.token_ids or reply.finish_reason:
            return self.chunk([self.choice(new)])
        return ""

    def choice(self, reply: ModelReply) -> Body:
        body: Body = {
            "index": reply.index,
            "text": reply.text,
            "finish_reason": reply.finish_reason or None,
            "logprobs": None,
        }
        if reply.logprobs is not None:
            body["logprobs"] = {
                "tokens": [token for token, _ in reply.logprobs],
                "token_logprobs": [value for _, value in reply.logprobs],
                "top_logprobs": None,
                "text_offset": None,
            }
        if reply.token_ids is not None:
            body["token_ids"] = reply.token_ids
        return body


def _usage(head: AnswerHead) -> dict[str, int]:
    return {
        "prompt_tokens": head.prompt_tokens,
        "completion_tokens": head.completion_tokens,
        "total_tokens": head.prompt_tokens + head.completion_tokens,
    }


def _logprobs(pairs: Sequence[tuple[str, float]]) -> Body:
    content = []
    for token, value in pairs:
        encoded = list(token.encode())
        content.append({"token": token, "logprob": value, "bytes": encoded, "top_logprobs": []})
    return {"content": content, "refusal": None}


def _tool_calls(reply: ModelReply) -> list[Body]:
    """The calls of tools, with the arguments as JSON text."""
    calls = []
    for call in reply.tool_calls:
        arguments = json.dumps(call["function"]["arguments"])
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return calls


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
    # Newer servers call it reasoning.
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
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict):
                raise RequestError(
                    f"{where} must be objects with a function that has a name and arguments", where
                )
            read["tool_calls"].append(
                tool_call(function.get("name"), function.get("arguments"), call.get("id"), where)
            )
    return read
