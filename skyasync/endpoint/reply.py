"""Answers in OpenAI's form, whole or as server-sent events.

Invariant: pure functions of what was sampled. The text of a choice ends before the first stop string; a tool call is
reported only if it is complete, and what is no call stays text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyasync.endpoint.agent_chat import Message


@dataclass(frozen=True)
class Choice:
    """One sampled reply. ``logprobs``: text and log-probability of each token, None if they were not asked for."""

    index: int
    text: str
    finish_reason: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[tuple[str, float]] | None = None
    token_ids: list[int] | None = None

    @property
    def message(self) -> Message:
        """In the form of chat templates, as a later request is read."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


@dataclass(frozen=True)
class Answer:
    """What every form of an answer has. ``created`` is in seconds since 1970."""

    id: str
    model: str
    created: int
    prompt_tokens: int
    completion_tokens: int
    prompt_token_ids: list[int] | None = None

    @property
    def usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


def until_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string."""
    return text[: min((place for s in stop if (place := text.find(s)) >= 0), default=len(text))]


def chat_completion(answer: Answer, choices: Sequence[Choice]) -> dict[str, Any]:
    return _whole(answer, "chat.completion", [_chat_choice(choice) for choice in choices])


def text_completion(answer: Answer, choices: Sequence[Choice]) -> dict[str, Any]:
    return _whole(answer, "text_completion", [_text_choice(choice) for choice in choices])


def chat_chunks(answer: Answer, choices: Sequence[Choice], *, usage: bool) -> Iterator[dict[str, Any]]:
    """The same as events: per choice its role, its text, its tool calls and its end, then the usage if asked for."""
    for choice in choices:
        yield _chunk(answer, choice, {"role": "assistant", "content": ""})
        if choice.text:
            yield _chunk(answer, choice, {"content": choice.text}, logprobs=_logprobs(choice))
        if choice.tool_calls:
            calls = [{"index": i, **_outgoing(call)} for i, call in enumerate(choice.tool_calls)]
            yield _chunk(answer, choice, {"tool_calls": calls})
        yield _chunk(answer, choice, {}, finish_reason=choice.finish_reason)
    if usage:
        yield {**_head(answer, "chat.completion.chunk"), "choices": [], "usage": answer.usage}


def text_chunks(answer: Answer, choices: Sequence[Choice], *, usage: bool) -> Iterator[dict[str, Any]]:
    for choice in choices:
        yield {**_head(answer, "text_completion"), "choices": [_text_choice(choice)]}
    if usage:
        yield {**_head(answer, "text_completion"), "choices": [], "usage": answer.usage}


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.model}


def _whole(answer: Answer, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    body = {**_head(answer, kind), "choices": choices, "usage": answer.usage}
    return body if answer.prompt_token_ids is None else {**body, "prompt_token_ids": answer.prompt_token_ids}


def _chunk(answer: Answer, choice: Choice, delta: dict[str, Any], **more: object) -> dict[str, Any]:
    part = {"index": choice.index, "delta": delta, "finish_reason": None, "logprobs": None, **more}
    return {**_head(answer, "chat.completion.chunk"), "choices": [part]}


def _chat_choice(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.tool_calls:
        message |= {"content": choice.text or None, "tool_calls": [_outgoing(call) for call in choice.tool_calls]}
    body = {"index": choice.index, "message": message, "finish_reason": choice.finish_reason}
    return {**body, "logprobs": _logprobs(choice), **_token_ids(choice)}


def _text_choice(choice: Choice) -> dict[str, Any]:
    body = {"index": choice.index, "text": choice.text, "finish_reason": choice.finish_reason}
    return {**body, "logprobs": _token_logprobs(choice), **_token_ids(choice)}


def _token_logprobs(choice: Choice) -> dict[str, Any] | None:
    """In the form of text completions, which is another."""
    if choice.logprobs is None:
        return None
    tokens, values = [token for token, _ in choice.logprobs], [value for _, value in choice.logprobs]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": None}


def _token_ids(choice: Choice) -> dict[str, Any]:
    return {} if choice.token_ids is None else {"token_ids": choice.token_ids}


def _logprobs(choice: Choice) -> dict[str, Any] | None:
    if choice.logprobs is None:
        return None
    content = [
        {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
        for token, value in choice.logprobs
    ]
    return {"content": content, "refusal": None}


def _outgoing(call: dict[str, Any]) -> dict[str, Any]:
    """Arguments travel as JSON text."""
    function = call["function"]
    return {**call, "function": {"name": function["name"], "arguments": json.dumps(function["arguments"])}}
