"""Anthropic's messages: ``/v1/messages``.

Invariant: a conversation in blocks is the one that chat completions would have. Results of tools
are messages of their own, before the user's text next to them. Thinking is the reasoning of its
message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from skyasync.agents.api import (
    AnswerHead,
    Api,
    Body,
    Message,
    ModelReply,
    ModelRequest,
    RequestError,
    check_fields,
    check_no_image,
    common_fields,
    content_of,
    event,
    flag,
    function_tools,
    given,
    number,
    shows_tools,
    text_of,
    tool_call,
)
from skyasync.inference.interface import LIMITS

if TYPE_CHECKING:
    from skyasync.agents.calls import Session

#: Fields for Anthropic's own service, which caches and routes; they change no answer.
IGNORED = frozenset(
    ["cache_control", "inference_geo", "metadata", "service_tier", "speed", "user_profile_id"]
)
#: Fields whose default value requests nothing, and that value; any other is rejected.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "container": (None,),
    "context_management": (None,),
    "diagnostics": (None,),
    "mcp_servers": (None, []),
    "output_config": (None, {}),
    "output_format": (None,),
    "thinking": (None,),
}
_SAMPLING = {"max_tokens", "stop_sequences", "temperature", "top_k", "top_p"}
_FIELDS = _SAMPLING | {"messages", "model", "stream", "system", "tool_choice", "tools"}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}


class MessagesApi(Api):
    """Anthropic's messages.

    In a stream one block is open at a time: the thinking, the text, then the calls of tools.
    """

    prefix = "msg"

    def __init__(self, body: Body, session: Session) -> None:
        super().__init__(body, session)
        self._open_block = ""  # the type of the open block
        self._blocks = 0  # blocks that are complete

    def read(self, body: Body, session: Session) -> ModelRequest:
        if not self.counts_tokens:
            check_fields(body, _FIELDS, IGNORED, NEUTRAL)
            if number(body, "max_tokens", LIMITS["max_tokens"]) is None:
                raise RequestError("max_tokens must be given", "max_tokens")
        messages: list[Message] = []
        for index, message in enumerate(given(body, "messages", list, "a list of messages")):
            messages += _messages(message, f"messages[{index}]")
        if not messages:
            raise RequestError("messages is empty", "messages")
        if messages[-1]["role"] == "assistant":
            problem = (
                "messages ends with the model's own message: a prefilled reply is not supported"
            )
            raise RequestError(problem, "messages")
        system = text_of(body.get("system"), "system")
        if system:
            messages.insert(0, {"role": "system", "content": system})
        choice = given(body, "tool_choice", dict, "an object", {})
        shown = shows_tools(choice.get("type", "auto"), "tool_choice.type")
        return ModelRequest(
            **common_fields(body, session),
            messages=messages,
            tools=function_tools(body, shown, "custom", "input_schema"),
            parallel_tool_calls=not flag(choice, "disable_parallel_tool_use", default=False),
        )

    def answer(self, head: AnswerHead, replies: Sequence[ModelReply]) -> Body:
        (reply,) = replies
        blocks: list[Body] = []
        if reply.reasoning:
            blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
        if reply.text:
            blocks.append({"type": "text", "text": reply.text})
        blocks += [_tool_use(call) for call in reply.tool_calls]
        return {**_message_head(head), "content": blocks, **_stop(reply)}

    def begin(self, head: AnswerHead) -> str:
        message = {**_message_head(head), "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message=message)

    def update(self, reply: ModelReply) -> str:
        new = self.unsent(reply)
        sent = ""
        if new.reasoning:
            sent += self._begin_block({"type": "thinking", "thinking": "", "signature": ""})
            sent += self._delta({"type": "thinking_delta", "thinking": new.reasoning})
        if new.text:
            sent += self._begin_block({"type": "text", "text": ""})
            sent += self._delta({"type": "text_delta", "text": new.text})
        for call in reply.tool_calls:
            block = _tool_use(call)
            sent += self._end_block()  # calls are blocks of one type
            sent += self._begin_block({**block, "input": {}})
            arguments = json.dumps(block["input"])
            sent += self._delta({"type": "input_json_delta", "partial_json": arguments})
        if reply.finish_reason:
            sent += self._end_block()
        return sent

    def end(self, head: AnswerHead, replies: Sequence[ModelReply]) -> str:
        (reply,) = replies
        delta = _event(
            "message_delta", delta=_stop(reply), usage={"output_tokens": head.completion_tokens}
        )
        return delta + _event("message_stop")

    def fail(self, error: RequestError) -> str:
        return event(self.error(error), "error")

    @staticmethod
    def error(error: RequestError) -> Body:
        kind = _ERRORS.get(error.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}

    def _begin_block(self, block: Body) -> str:
        """End the open block and begin this one, unless one of its type is open already."""
        if self._open_block == block["type"]:
            return ""
        sent = self._end_block()
        self._open_block = block["type"]
        return sent + _event("content_block_start", index=self._blocks, content_block=block)

    def _delta(self, delta: Body) -> str:
        """A part of the open block."""
        return _event("content_block_delta", index=self._blocks, delta=delta)

    def _end_block(self) -> str:
        """End the open block, if any."""
        if not self._open_block:
            return ""
        sent = _event("content_block_stop", index=self._blocks)
        self._open_block = ""
        self._blocks += 1
        return sent


class CountTokensApi(MessagesApi):
    """Counts tokens: fields that do not belong to the prompt are not checked."""

    counts_tokens = True


def _event(name: str, **data: object) -> str:
    return event({"type": name, **data}, name)


def _message_head(head: AnswerHead) -> Body:
    """The fields of a message that are known when it begins."""
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": [],
        "usage": {"input_tokens": head.prompt_tokens, "output_tokens": head.completion_tokens},
    }


def _stop(reply: ModelReply) -> Body:
    """Why a message has ended."""
    # A reply that is cut by its length or makes a call has another reason, with or without a stop
    # string.
    if reply.stopped_by is not None and reply.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stopped_by}
    return {"stop_reason": _STOPS[reply.finish_reason], "stop_sequence": None}


def _tool_use(call: dict[str, Any]) -> Body:
    function = call["function"]
    return {
        "type": "tool_use",
        "id": call["id"],
        "name": function["name"],
        "input": function["arguments"],
    }


def _messages(message: object, where: str) -> Iterator[Message]:
    """The messages that a chat template reads for one message in Anthropic's form."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise RequestError(
            f"{where} must be an object with a role of user, assistant or system", where
        )
    role = message["role"]
    content = message.get("content")
    if not isinstance(content, list):
        yield {"role": role, "content": text_of(content, f"{where}.content")}
        return
    blocks: list[Body] = []  # of text and images
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    only_results = bool(content)  # else there is a message of the user or the model
    for index, block in enumerate(content):
        place = f"{where}.content[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result" and role == "user":
            result = content_of(block.get("content"), f"{place}.content")
            yield {
                "role": "tool",
                "content": result,
                "tool_call_id": str(block.get("tool_use_id", "")),
            }
            continue
        only_results = False
        if kind == "text":
            blocks.append({"type": "text", "text": text_of([block], place)})
        elif kind == "image":
            blocks.append(block)
        elif kind == "thinking" and role == "assistant":
            thoughts.append(given(block, "thinking", str, "text"))
        elif kind == "tool_use" and role == "assistant":
            calls.append(tool_call(block.get("name"), block.get("input"), block.get("id"), place))
        else:
            check_no_image(block, place)
            problem = f"{place} has the type {kind}, which is not read here in a message of {role}"
            raise RequestError(problem, place, "unsupported_content")
    if not only_results:
        turn: Message = {"role": role, "content": content_of(blocks, f"{where}.content")}
        if thoughts:
            turn["reasoning_content"] = "".join(thoughts)
        if calls:
            turn["tool_calls"] = calls
        yield turn
