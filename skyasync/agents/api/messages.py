"""Anthropic's messages: ``/v1/messages``.

Invariant: a conversation in blocks is the one that chat completions would have: the results of tools are messages of
their own, before what else the user says with them, and thinking is the reasoning of its message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
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
    check_fields,
    check_no_image,
    flag,
    function_tool,
    given,
    number,
    sampling,
    shows_tools,
    text_of,
    tool_call,
    tool_result,
)
from skyasync.inference.interface import LIMITS

#: Bookkeeping of Anthropic's own service; it caches and routes, and changes no answer.
IGNORED = frozenset(["cache_control", "inference_geo", "metadata", "service_tier", "speed", "user_profile_id"])
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
_FIELDS = frozenset(
    ["max_tokens", "messages", "model", "stop_sequences", "stream", "system", "temperature", "tool_choice", "tools",
     "top_k", "top_p"]
)  # fmt: skip
_ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
           429: "rate_limit_error", 500: "api_error", 503: "overloaded_error"}  # fmt: skip
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}


class MessagesApi:
    """See ``Api``."""

    prefix = "msg"

    def read(self, body: Body, episode: EpisodeContext) -> ModelRequest:
        check_fields(body, _FIELDS, IGNORED, NEUTRAL)
        if number(body, "max_tokens", LIMITS["max_tokens"]) is None:
            raise RequestError("max_tokens must be given", "max_tokens")
        return self.read_prompt(body, episode)

    def read_prompt(self, body: Body, episode: EpisodeContext) -> ModelRequest:
        """For counting tokens: ``max_tokens`` may be missing."""
        given_messages = given(body, "messages", list, "a list of messages")
        messages = [m for i, message in enumerate(given_messages) for m in _messages(message, f"messages[{i}]")]
        if not messages:
            raise RequestError("messages is empty", "messages")
        if messages[-1]["role"] == "assistant":
            problem = "messages ends with the model's own message: a reply that is begun for it is not supported here"
            raise RequestError(problem, "messages")
        if system := text_of(body.get("system"), "system"):
            messages.insert(0, {"role": "system", "content": system})
        tools = given(body, "tools", list, "a list of tools", None) or []
        choice = given(body, "tool_choice", dict, "an object", {})
        shown = shows_tools(choice.get("type", "auto"), "tool_choice.type")
        tools = [function_tool(tool, f"tools[{i}]", "custom", "input_schema") for i, tool in enumerate(tools) if shown]
        return ModelRequest(
            model=given(body, "model", str, "a name", "policy"),
            sampling=sampling(body, episode.sampling),
            stream=flag(body, "stream", default=False),
            messages=messages,
            tools=tools or None,
            parallel_tool_calls=not flag(choice, "disable_parallel_tool_use", default=False),
        )

    def answer(self, request: ModelRequest, head: AnswerHead, replies: Sequence[ModelReply]) -> Body:
        (reply,) = replies
        blocks: list[Body] = []
        if reply.reasoning:
            blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
        if reply.text:
            blocks.append({"type": "text", "text": reply.text})
        blocks += [_tool_use(call) for call in reply.tool_calls]
        return {**_head(head), "content": blocks, **_stop(reply), "usage": _usage(head)}

    def stream(self, request: ModelRequest) -> MessagesStream:
        return MessagesStream()

    def error(self, error: RequestError) -> Body:
        kind = _ERRORS.get(error.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}


class MessagesStream:
    """See ``ApiStream``. One block is open at a time: the thinking, the text, then each call of a tool."""

    def __init__(self) -> None:
        self._sent = SentReply()
        self._open = ""
        self._blocks = 0

    def begin(self, head: AnswerHead) -> Iterator[ServerSentEvent]:
        message = {**_head(head), "stop_reason": None, "stop_sequence": None, "usage": _usage(head)}
        yield _event("message_start", message=message)

    def update(self, reply: ModelReply) -> Iterator[ServerSentEvent]:
        new = self._sent.delta(reply)
        if new.reasoning:
            yield from self._extend("thinking", {"thinking": "", "signature": ""}, thinking=new.reasoning)
        if new.text:
            yield from self._extend("text", {"text": ""}, text=new.text)
        for call in reply.tool_calls:
            block = _tool_use(call)
            yield from self._close()
            arguments = json.dumps(block.pop("input"))
            yield self._start({**block, "input": {}})
            yield self._delta(type="input_json_delta", partial_json=arguments)
        if reply.finish_reason:
            yield from self._close()

    def end(self, head: AnswerHead, replies: Sequence[ModelReply]) -> Iterator[ServerSentEvent]:
        (reply,) = replies
        yield _event("message_delta", delta=_stop(reply), usage={"output_tokens": head.completion_tokens})
        yield _event("message_stop")

    def fail(self, error: RequestError) -> Iterator[ServerSentEvent]:
        yield ServerSentEvent("error", MessagesApi().error(error))

    def _extend(self, kind: str, empty: Body, **new: str) -> Iterator[ServerSentEvent]:
        if self._open != kind:
            yield from self._close()
            yield self._start({"type": kind, **empty})
        yield self._delta(type=f"{kind}_delta", **new)

    def _start(self, block: Body) -> ServerSentEvent:
        self._open = block["type"]
        return _event("content_block_start", index=self._blocks, content_block=block)

    def _delta(self, **delta: str) -> ServerSentEvent:
        return _event("content_block_delta", index=self._blocks, delta=delta)

    def _close(self) -> Iterator[ServerSentEvent]:
        if self._open:
            yield _event("content_block_stop", index=self._blocks)
            self._open, self._blocks = "", self._blocks + 1


def _event(name: str, **data: object) -> ServerSentEvent:
    return ServerSentEvent(name, {"type": name, **data})


def _head(head: AnswerHead) -> Body:
    return {"id": head.id, "type": "message", "role": "assistant", "model": head.model, "content": []}


def _usage(head: AnswerHead) -> dict[str, int]:
    return {"input_tokens": head.prompt_tokens, "output_tokens": head.completion_tokens}


def _stop(reply: ModelReply) -> Body:
    by_string = reply.stopped_by is not None and reply.finish_reason == "stop"
    reason = "stop_sequence" if by_string else _STOPS[reply.finish_reason]
    return {"stop_reason": reason, "stop_sequence": reply.stopped_by if by_string else None}


def _tool_use(call: dict[str, Any]) -> Body:
    function = call["function"]
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]}


def _messages(message: object, where: str) -> Iterator[Message]:
    """One of Anthropic's messages as those that chat templates read."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise RequestError(f"{where} must be an object with a role of user, assistant or system", where)
    role, content = message["role"], message.get("content")
    if not isinstance(content, list):
        yield {"role": role, "content": text_of(content, f"{where}.content")}
        return
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    only_results = bool(content)
    for index, block in enumerate(content):
        place = f"{where}.content[{index}]"
        check_no_image(block, place)
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result" and role == "user":
            yield tool_result(block.get("content"), block.get("tool_use_id", ""), f"{place}.content")
            continue
        only_results = False
        if kind == "text":
            texts.append(text_of([block], place))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(given(block, "thinking", str, "text"))
        elif kind == "tool_use" and role == "assistant":
            calls.append(tool_call(block.get("name"), block.get("input"), block.get("id"), place))
        else:
            problem = f"{place} has the type {kind}, which is not read here in a message of {role}"
            raise RequestError(problem, place, "unsupported_content")
    if not only_results:
        found: Message = {"role": role, "content": "".join(texts)}
        if thoughts:
            found["reasoning_content"] = "".join(thoughts)
        if calls:
            found["tool_calls"] = calls
        yield found
