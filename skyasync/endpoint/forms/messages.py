"""Anthropic's messages: ``/v1/messages``.

Invariant: that of ``fields``. A conversation in blocks is the one that OpenAI's form would have: the results of tools
are messages of their own, in front of what else the user says with them, and thinking is its message's reasoning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from skyasync.endpoint.forms.fields import (
    flag,
    function_tool,
    given,
    number,
    refuse_image,
    refuse_others,
    sampling,
    text_of,
    tool_call,
)
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
from skyasync.inference.interface import LIMITS

#: Bookkeeping of Anthropic's own service; it caches and routes, and changes no answer.
PASSED_OVER = frozenset(["cache_control", "inference_geo", "metadata", "service_tier", "speed", "user_profile_id"])
#: Fields whose default value asks for nothing, and that value; any other is refused.
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
_TEXTS = ("content", "reasoning_content")
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}


class MessagesForm:
    """See ``Form``."""

    prefix = "msg"

    def read(self, body: Body, known: Known) -> Request:
        refuse_others(body, _FIELDS, PASSED_OVER, NEUTRAL)
        if number(body, "max_tokens", LIMITS["max_tokens"]) is None:
            raise RequestError("max_tokens must be given", "max_tokens")
        return self.read_prompt(body, known)

    def read_prompt(self, body: Body, known: Known) -> Request:
        """Without what says how long the answer may be, as for counting tokens."""
        said = given(body, "messages", list, "a list of messages")
        messages = [found for i, message in enumerate(said) for found in _messages(message, f"messages[{i}]")]
        if not messages:
            raise RequestError("messages is empty", "messages")
        if messages[-1]["role"] == "assistant":
            problem = "messages ends with the model's own message: a reply that is begun for it is not supported here"
            raise RequestError(problem, "messages")
        if system := text_of(body.get("system"), "system"):
            messages.insert(0, {"role": "system", "content": system})
        tools = given(body, "tools", list, "a list of tools", None) or []
        choice = given(body, "tool_choice", dict, "an object", {})
        if choice.get("type", "auto") not in ("auto", "none"):
            problem = "tool_choice.type must be auto or none: a call of a tool cannot be enforced here"
            raise RequestError(problem, "tool_choice")
        asked = Asked(
            model=given(body, "model", str, "a name", "policy"),
            sampling=sampling(body, known.sampling),
            stream=flag(body, "stream", default=False),
        )
        shown = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)] if choice.get("type") != "none" else []
        return Request(asked, messages, shown or None, not flag(choice, "disable_parallel_tool_use", default=False))

    def whole(self, request: Request, answer: Answer, choices: Sequence[Choice]) -> Body:
        (choice,) = choices
        return {**_opened(answer), "content": _blocks(choice), **_stopped(choice), "usage": _usage(answer)}

    def stream(self, request: Request) -> MessagesStream:
        return MessagesStream()

    def error(self, error: RequestError) -> Body:
        return {
            "type": "error",
            "error": {"type": _ERRORS.get(error.status, "invalid_request_error"), "message": str(error)},
        }


class MessagesStream:
    """See ``Stream``. One block is open at a time: the thinking, the text, then each call of a tool."""

    def __init__(self) -> None:
        self._told = Told()
        self._open = ""
        self._blocks = 0

    def begin(self, answer: Answer) -> Iterator[Event]:
        message = {**_opened(answer), "stop_reason": None, "stop_sequence": None, "usage": _usage(answer)}
        yield _event("message_start", message=message)

    def go_on(self, choice: Choice) -> Iterator[Event]:
        news = self._told.news(choice)
        if news.reasoning:
            yield from self._go_on("thinking", {"thinking": "", "signature": ""}, thinking=news.reasoning)
        if news.text:
            yield from self._go_on("text", {"text": ""}, text=news.text)
        for call in choice.tool_calls:
            block = _tool_use(call)
            yield from self._close()
            arguments = outgoing(block.pop("input"))
            yield from self._start({**block, "input": {}})
            yield self._delta(type="input_json_delta", partial_json=arguments)
        if choice.finish_reason:
            yield from self._close()

    def end(self, answer: Answer, choices: Sequence[Choice]) -> Iterator[Event]:
        (choice,) = choices
        yield _event("message_delta", delta=_stopped(choice), usage={"output_tokens": answer.completion_tokens})
        yield _event("message_stop")

    def fail(self, error: RequestError) -> Iterator[Event]:
        yield Event("error", MessagesForm().error(error))

    def _go_on(self, kind: str, empty: Body, **said: str) -> Iterator[Event]:
        if self._open != kind:
            yield from self._close()
            yield from self._start({"type": kind, **empty})
        yield self._delta(type=f"{kind}_delta", **said)

    def _start(self, block: Body) -> Iterator[Event]:
        self._open = block["type"]
        yield _event("content_block_start", index=self._blocks, content_block=block)

    def _delta(self, **delta: str) -> Event:
        return _event("content_block_delta", index=self._blocks, delta=delta)

    def _close(self) -> Iterator[Event]:
        if self._open:
            yield _event("content_block_stop", index=self._blocks)
            self._open, self._blocks = "", self._blocks + 1


def _event(name: str, **data: object) -> Event:
    return Event(name, {"type": name, **data})


def _opened(answer: Answer) -> Body:
    return {"id": answer.id, "type": "message", "role": "assistant", "model": answer.model, "content": []}


def _usage(answer: Answer) -> dict[str, int]:
    return {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens}


def _stopped(choice: Choice) -> Body:
    by_string = choice.stopped_by is not None and choice.finish_reason == "stop"
    reason = "stop_sequence" if by_string else _STOPS[choice.finish_reason]
    return {"stop_reason": reason, "stop_sequence": choice.stopped_by if by_string else None}


def _blocks(choice: Choice) -> list[Body]:
    blocks: list[Body] = []
    if choice.reasoning:
        blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
    if choice.text:
        blocks.append({"type": "text", "text": choice.text})
    return [*blocks, *(_tool_use(call) for call in choice.tool_calls)]


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
    found: Message = {"role": role, "content": []}
    only_results = bool(content)
    for index, block in enumerate(content):
        place = f"{where}.content[{index}]"
        refuse_image(block, place)
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result" and role == "user":
            yield _result(block, place)
            continue
        only_results = False
        _add_block(found, block, kind, place)
    if not only_results:
        yield {name: "".join(said) if name in _TEXTS else said for name, said in found.items()}


def _add_block(message: Message, block: Any, kind: str | None, where: str) -> None:  # noqa: ANN401  (JSON)
    if kind == "text":
        message["content"].append(text_of([block], where))
    elif kind == "thinking" and message["role"] == "assistant":
        message.setdefault("reasoning_content", []).append(given(block, "thinking", str, "text"))
    elif kind == "tool_use" and message["role"] == "assistant":
        call = tool_call(block.get("name"), block.get("input"), block.get("id"), where)
        message.setdefault("tool_calls", []).append(call)
    else:
        raise RequestError(f"{where} has the type {kind}, which is not read here in a message of {message['role']}",
                           where, "unsupported_content")  # fmt: skip


def _result(block: Body, where: str) -> Message:
    said = text_of(block.get("content"), f"{where}.content")
    return {"role": "tool", "content": said, "tool_call_id": str(block.get("tool_use_id", ""))}


def _tool(tool: object, where: str) -> Body:
    if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise RequestError(f"{where} has the type {kind}: only tools of the program's own are known here", where)
    return function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"), where)
