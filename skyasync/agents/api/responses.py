"""OpenAI's Responses: ``/v1/responses``.

Invariant: the items of one turn of the model (reasoning, text, calls) are one message, as it was
sampled. The items that a stream adds, in their order and with their ids, are those of the whole
answer. ``previous_response_id`` continues a conversation of the same episode, for as long as the
episode runs; instructions are not carried over, as in OpenAI's own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from skyasync.agents.api import (
    ROLES,
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
    shows_tools,
    text_of,
    tool_call,
)

if TYPE_CHECKING:
    from skyasync.agents.calls import Session

_CACHE = {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
#: Fields for OpenAI's own service, which change no answer.
IGNORED = _CACHE | {"metadata", "safety_identifier", "service_tier", "stream_options", "user"}
#: Fields whose default value requests nothing, and that value; any other is rejected.
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
_SAMPLING = {"max_output_tokens", "temperature", "top_p"}
_TOOLS = {"parallel_tool_calls", "tool_choice", "tools"}
_FIELDS = (
    _SAMPLING
    | _TOOLS
    | {"input", "instructions", "model", "previous_response_id", "store", "stream"}
)
_ITEMS = ("message", "reasoning", "function_call", "function_call_output")


class ResponsesApi(Api):
    """OpenAI's Responses.

    In a stream one item is open at a time: the reasoning, the message, then the calls of tools.
    """

    prefix = "resp"

    def __init__(self, body: Body, session: Session) -> None:
        super().__init__(body, session)
        self._events = 0  # sent so far: their sequence numbers
        self._open: Body = {}  # the item that is open
        self._added = 0  # items that are complete

    def read(self, body: Body, session: Session) -> ModelRequest:
        check_fields(body, _FIELDS, IGNORED, NEUTRAL)
        items = body.get("input")
        if not isinstance(items, str | list) or not items:
            raise RequestError("input must be a text or a list of items, not empty", "input")
        messages: list[Message] = []
        if body.get("previous_response_id") is not None:
            previous = given(body, "previous_response_id", str, "the id of an answer")
            if previous not in session.conversations:
                problem = (
                    f"previous_response_id={previous:.100} is not a stored answer of this episode"
                )
                raise RequestError(
                    problem, "previous_response_id", "previous_response_not_found", 404
                )
            messages += session.conversations[previous]
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        messages += _messages(items)
        instructions = given(body, "instructions", str, "a text", "")
        shown_messages = messages
        if instructions:  # not stored: a later request has its own
            shown_messages = [{"role": "system", "content": instructions}, *messages]
        return ModelRequest(
            **common_fields(body, session),
            messages=shown_messages,
            tools=function_tools(
                body, shows_tools(body.get("tool_choice")), "function", "parameters"
            ),
            parallel_tool_calls=flag(body, "parallel_tool_calls", default=True),
            stored=messages if flag(body, "store", default=True) else None,
        )

    def answer(self, head: AnswerHead, replies: Sequence[ModelReply]) -> Body:
        (reply,) = replies
        body = self._response(head)
        body["status"] = _status(reply)
        if body["status"] == "incomplete":
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        body["output"] = _items(head, reply)
        body["usage"] = {
            "input_tokens": head.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": head.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reply.reasoning_tokens},
            "total_tokens": head.prompt_tokens + head.completion_tokens,
        }
        return body

    def begin(self, head: AnswerHead) -> str:
        self.head = head
        opened = {**self._response(head), "status": "in_progress", "output": []}
        sent = self._event("response.created", response=opened)
        return sent + self._event("response.in_progress", response=opened)

    def update(self, reply: ModelReply) -> str:
        new = self.unsent(reply)
        sent = ""
        if new.reasoning:
            sent += self._open_item(_text_item(self.head, "reasoning", "", "in_progress"))
            sent += self._in_part("response.reasoning_text.delta", delta=new.reasoning)
        if new.text:
            if self._open.get("type") == "reasoning":  # the text comes after all of the thinking
                reasoning = _text_item(self.head, "reasoning", reply.reasoning, _status(reply))
                sent += self._finish(reasoning)
            sent += self._open_item(_text_item(self.head, "message", "", "in_progress"))
            sent += self._in_part("response.output_text.delta", delta=new.text, logprobs=[])
        if reply.finish_reason:
            # Calls of tools are complete at once; the item that is open comes first.
            for item in _items(self.head, reply)[self._added :]:
                sent += self._open_item({**item, "status": "in_progress"})
                sent += self._finish(item)
        return sent

    def end(self, head: AnswerHead, replies: Sequence[ModelReply]) -> str:
        answer = self.answer(head, replies)
        return self._event(f"response.{answer['status']}", response=answer)

    def fail(self, error: RequestError) -> str:
        failed = {**self._response(self.head), "status": "failed", "output": []}
        failed["error"] = {"code": "server_error", "message": str(error)}
        return self._event("response.failed", response=failed)

    def _event(self, kind: str, **data: object) -> str:
        number = self._events
        self._events += 1
        return event({"type": kind, "sequence_number": number, **data}, kind)

    def _in_part(self, kind: str, **data: object) -> str:
        return self._event(
            kind, item_id=self._open["id"], output_index=self._added, content_index=0, **data
        )

    def _open_item(self, item: Body) -> str:
        """Begin an item, unless it is open already."""
        if self._open.get("type") == item["type"]:
            return ""
        is_call = item["type"] == "function_call"
        empty: Body = {"arguments": ""} if is_call else {"content": []}
        self._open = {**item, **empty}
        sent = self._event("response.output_item.added", output_index=self._added, item=self._open)
        if not is_call:
            sent += self._in_part("response.content_part.added", part=item["content"][0])
        return sent

    def _finish(self, item: Body) -> str:
        """End the open item, which is complete now."""
        if item["type"] == "function_call":
            place = {"item_id": item["id"], "output_index": self._added}
            arguments = item["arguments"]
            sent = self._event("response.function_call_arguments.delta", **place, delta=arguments)
            sent += self._event(
                "response.function_call_arguments.done",
                **place,
                name=item["name"],
                arguments=arguments,
            )
        else:
            (part,) = item["content"]
            logprobs: Body = {"logprobs": []} if item["type"] == "message" else {}
            sent = self._in_part(f"response.{part['type']}.done", text=part["text"], **logprobs)
            sent += self._in_part("response.content_part.done", part=part)
        sent += self._event("response.output_item.done", output_index=self._added, item=item)
        self._open = {}
        self._added += 1
        return sent

    def _response(self, head: AnswerHead) -> Body:
        """The fields that an answer has from its beginning."""
        request = self.request
        return {
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "model": head.model,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": request.parallel_tool_calls,
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "max_output_tokens": request.sampling.max_tokens,
            "tool_choice": "auto" if request.tools else "none",
            "tools": [
                {"type": "function", "strict": None, **tool["function"]}
                for tool in request.tools or ()
            ],
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "store": request.stored is not None,
            "usage": None,
        }


def _messages(items: Sequence[object]) -> list[Message]:
    """The items as a conversation."""
    messages: list[Message] = []
    turn: Message | None = None  # of the model, to which the next items may belong
    has_text = False  # of the turn: another text or reasoning begins the next turn
    for index, item in enumerate(items):
        where = f"input[{index}]"
        check_no_image(item, where)
        kind = None
        if isinstance(item, dict):  # messages may leave out their type
            kind = item.get("type", "message" if "role" in item else None)
        if not isinstance(item, dict) or kind not in _ITEMS:
            problem = f"{where} has the type {kind}: {', '.join(_ITEMS[:-1])} and {_ITEMS[-1]} are read here"
            raise RequestError(problem, where, "unsupported_content")
        role = item.get("role")
        if kind == "function_call_output":
            turn = None
            result = content_of(item.get("output"), f"{where}.output")
            messages.append(
                {"role": "tool", "content": result, "tool_call_id": str(item.get("call_id", ""))}
            )
        elif kind == "message" and role != "assistant":
            if not isinstance(role, str) or role not in ROLES or role == "tool":
                raise RequestError(
                    f"{where} must have a role of user, assistant, system or developer", where
                )
            turn = None
            content = content_of(item.get("content"), f"{where}.content")
            messages.append({"role": ROLES[role], "content": content})
        else:
            # A turn is reasoning, text, calls: an item that cannot follow begins the next turn.
            if turn is None or (kind != "function_call" and (has_text or "tool_calls" in turn)):
                turn = {"role": "assistant", "content": ""}
                has_text = False
                messages.append(turn)
            if kind == "reasoning":
                reasoning = item.get("content") or item.get("summary") or []
                texts = turn.setdefault("reasoning_content", [])
                texts.append(text_of(reasoning, f"{where}.content"))
            elif kind == "function_call":
                call = tool_call(
                    item.get("name"), item.get("arguments"), item.get("call_id"), where
                )
                turn.setdefault("tool_calls", []).append(call)
            else:
                turn["content"] = text_of(item.get("content"), f"{where}.content")
                has_text = True
    for message in messages:
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    return messages


def _items(head: AnswerHead, reply: ModelReply) -> list[Body]:
    """The items of an answer; a reply without anything is an empty message."""
    items: list[Body] = []
    if reply.reasoning:
        items.append(_text_item(head, "reasoning", reply.reasoning, _status(reply)))
    if reply.text or not (reply.reasoning or reply.tool_calls):
        items.append(_text_item(head, "message", reply.text, _status(reply)))
    for call in reply.tool_calls:
        function = call["function"]
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{call['id']}",
                "call_id": call["id"],
                "name": function["name"],
                "arguments": json.dumps(function["arguments"]),
                "status": "completed",
            }
        )
    return items


def _status(reply: ModelReply) -> str:
    if reply.finish_reason in ("length", "abort"):
        return "incomplete"
    return "completed"


def _text_item(head: AnswerHead, kind: str, text: str, status: str) -> Body:
    """An item of type "reasoning" or "message"."""
    if kind == "reasoning":
        fields: Body = {"id": f"rs_{head.id}", "summary": []}
        part: Body = {"type": "reasoning_text", "text": text}
    else:
        fields = {"id": f"msg_{head.id}", "role": "assistant"}
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": kind, **fields, "content": [part], "status": status}
