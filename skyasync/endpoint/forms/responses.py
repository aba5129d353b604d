"""OpenAI's Responses: ``/v1/responses``.

Invariant: that of ``fields``. The items of one turn of the model (reasoning, what it said, its calls) are one message,
as it was when it was sampled. ``previous_response_id`` goes on from what the episode itself was answered, and holds as
long as the episode; instructions are not carried over, as in OpenAI's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyasync.endpoint.forms.chat import ROLES, openai_error
from skyasync.endpoint.forms.fields import (
    flag,
    function_tool,
    given,
    refuse_image,
    refuse_others,
    sampling,
    text_of,
    tool_call,
)
from skyasync.endpoint.forms.inner import Answer, Asked, Body, Choice, Known, Message, Request, RequestError
from skyasync.endpoint.forms.responses_out import ResponsesStream, response

PASSED_OVER = frozenset(
    ["metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
     "service_tier", "stream_options", "user"]
)  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "context_management": (None, []),
    "conversation": (None,),
    "include": (None, []),
    "max_tool_calls": (None,),
    "moderation": (None,),
    "prompt": (None,),
    "reasoning": (None, {}),
    "text": (None, {}, {"format": {"type": "text"}}),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
}
_FIELDS = frozenset(
    ["input", "instructions", "max_output_tokens", "model", "parallel_tool_calls", "previous_response_id", "store",
     "stream", "temperature", "tool_choice", "tools", "top_p"]
)  # fmt: skip


class ResponsesForm:
    """See ``Form``."""

    prefix = "resp"

    def read(self, body: Body, known: Known) -> Request:
        refuse_others(body, _FIELDS, PASSED_OVER, NEUTRAL)
        said = body.get("input")
        if not isinstance(said, str | list) or not said:
            raise RequestError("input must be a text or a list of items, not empty", "input")
        items = [{"role": "user", "content": said}] if isinstance(said, str) else said
        begun = [*_before(body, known), *_messages(items)]
        told = given(body, "instructions", str, "a text", "")
        tools = given(body, "tools", list, "a list of tools", None) or []
        choice = body.get("tool_choice")
        if choice not in (None, "auto", "none"):
            problem = "tool_choice must be auto or none: a call of a tool cannot be enforced here"
            raise RequestError(problem, "tool_choice")
        asked = Asked(
            model=given(body, "model", str, "a name", "policy"),
            sampling=sampling(body, known.sampling, {"max_output_tokens": "max_tokens"}),
            stream=flag(body, "stream", default=False),
        )
        shown = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)] if choice != "none" else []
        return Request(
            asked,
            [{"role": "system", "content": told}, *begun] if told else begun,
            shown or None,
            flag(body, "parallel_tool_calls", default=True),
            begun=begun if flag(body, "store", default=True) else None,
        )

    def whole(self, request: Request, answer: Answer, choices: Sequence[Choice]) -> Body:
        (choice,) = choices
        return response(request, answer, choice)

    def stream(self, request: Request) -> ResponsesStream:
        return ResponsesStream(request)

    def error(self, error: RequestError) -> Body:
        return openai_error(error)


def _before(body: Body, known: Known) -> list[Message]:
    before = given(body, "previous_response_id", str, "the id of an answer", None)
    if before is None:
        return []
    if before not in known.conversations:
        problem = f"previous_response_id={before:.100} is no answer of this episode that is stored"
        raise RequestError(problem, "previous_response_id", "previous_response_not_found", 404)
    return known.conversations[before]


def _messages(items: Sequence[object]) -> list[Message]:
    """The conversation that the items are."""
    found: list[Message] = []
    turn: Message | None = None  # of the model, to which further items may belong
    for index, item in enumerate(items):
        where = f"input[{index}]"
        refuse_image(item, where)
        kind = _kind(item, where)
        assert isinstance(item, dict)
        ours = kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant")
        if not ours:
            turn = None
            found.append(_message(item, where) if kind == "message" else _output(item, where))
            continue
        if turn is None or _is_another(kind, turn):
            turn = {"role": "assistant", "content": ""}
            found.append(turn)
        _add(turn, item, kind, where)
    for message in found:
        message.pop("_said", None)
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    return found


def _is_another(kind: str, turn: Message) -> bool:
    """Whether an item begins the model's next message: those of one come in a fixed order."""
    if kind == "function_call":
        return False
    return "tool_calls" in turn or "_said" in turn


def _add(turn: Message, item: Body, kind: str, where: str) -> None:
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        turn.setdefault("reasoning_content", []).append(text_of(parts, f"{where}.content"))
    elif kind == "function_call":
        call = tool_call(item.get("name"), item.get("arguments"), item.get("call_id"), where)
        turn.setdefault("tool_calls", []).append(call)
    else:
        turn["content"] = text_of(item.get("content"), f"{where}.content")
        turn["_said"] = True


def _kind(item: object, where: str) -> str:
    kind = item.get("type", "message" if "role" in item else None) if isinstance(item, dict) else None
    if kind not in ("message", "reasoning", "function_call", "function_call_output"):
        raise RequestError(
            f"{where} has the type {kind}: message, reasoning, function_call and function_call_output are read here",
            where,
            "unsupported_content",
        )
    return str(kind)


def _message(item: Body, where: str) -> Message:
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES or role == "tool":
        raise RequestError(f"{where} must have a role of user, assistant, system or developer", where)
    return {"role": ROLES[role], "content": text_of(item.get("content"), f"{where}.content")}


def _output(item: Body, where: str) -> Message:
    said = text_of(item.get("output"), f"{where}.output")
    return {"role": "tool", "content": said, "tool_call_id": str(item.get("call_id", ""))}


def _tool(tool: object, where: str) -> Body:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise RequestError(f"{where} has the type {kind}: only tools of type function are known here", where)
    return function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"), where)
