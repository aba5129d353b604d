"""What a request in OpenAI's form asks for.

Invariant: every field is either carried out or refused with an error in OpenAI's form that names it; only fields that
cannot change an answer are passed over. Nothing here touches an engine, a tokenizer or the network.
"""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar, overload

from skyasync.endpoint.agent_chat import Message
from skyasync.engines.protocol import SamplingParams
from skyasync.errors import nearest
from skyasync.rollout.chat import Tools

T = TypeVar("T")
D = TypeVar("D")

MOST_CHOICES = 128

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
_COMMON = frozenset(
    ["model", "n", "stream", "stream_options", "return_token_ids", "temperature", "top_p", "top_k", "min_p",
     "min_tokens", "presence_penalty", "frequency_penalty", "logit_bias", "repetition_penalty", "seed",
     "stop", "max_tokens"]
)  # fmt: skip
CHAT_FIELDS = _COMMON | {
    "messages", "tools", "tool_choice", "parallel_tool_calls", "logprobs", "max_completion_tokens",
}  # fmt: skip
COMPLETION_FIELDS = _COMMON | {"prompt", "logprobs"}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class RequestError(Exception):
    """A request that is answered with an error in OpenAI's form."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@dataclass(frozen=True)
class Asked:
    """What a request asks for besides its prompt."""

    model: str
    sampling: SamplingParams
    choices: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False


@dataclass(frozen=True)
class ChatRequest:
    """``tools`` is None where the model shall not be shown any."""

    asked: Asked
    messages: list[Message]
    tools: Tools = None
    parallel_tool_calls: bool = True


def chat_request(body: dict[str, Any], defaults: SamplingParams) -> ChatRequest:
    """A request to ``/v1/chat/completions``; ``defaults`` hold where it says nothing.

    Raises:
        RequestError: naming the field that is wrong or cannot be carried out.
    """
    _refuse(body, CHAT_FIELDS)
    messages = _given(body, "messages", list, "a list of messages")
    if not messages:
        raise RequestError("messages is empty", "messages")
    tools = _given(body, "tools", list, "a list of tools", None) or None
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise RequestError("tool_choice must be auto or none: a call of a tool cannot be enforced here", "tool_choice")
    if most := _number(body, "max_completion_tokens", low=1, whole=True):
        body = {**body, "max_tokens": most}
    return ChatRequest(
        replace(_asked(body, defaults), logprobs=_given(body, "logprobs", bool, "true or false", False)),
        [_message(message, f"messages[{index}]") for index, message in enumerate(messages)],
        None if choice == "none" else tools,
        _given(body, "parallel_tool_calls", bool, "true or false", True),
    )


def completion_request(body: dict[str, Any], defaults: SamplingParams) -> tuple[Asked, str | list[int]]:
    """A request to ``/v1/completions``: what it asks for, and its one prompt, text or token ids.

    Raises:
        RequestError: naming the field that is wrong or cannot be carried out.
    """
    _refuse(body, COMPLETION_FIELDS)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    tokens = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not prompt or not (tokens or isinstance(prompt, str)):
        raise RequestError("prompt must be one text or one list of token ids, not empty", "prompt")
    if (body.get("logprobs") or 0) not in (0, 1):
        problem = f"logprobs={body['logprobs']!r} is not supported here: 0 or 1 gives those of the sampled tokens"
        raise RequestError(problem, "logprobs", "unsupported_parameter")
    return replace(_asked(body, defaults), logprobs=body.get("logprobs") is not None), prompt


def _refuse(body: dict[str, Any], known: frozenset[str]) -> None:
    for name, value in body.items():
        if name in known or name in PASSED_OVER:
            continue
        if name not in NEUTRAL:
            close = nearest(name, known | NEUTRAL.keys(), count=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise RequestError(f"unknown field {name}{hint}", name, "unknown_parameter")
        if value not in NEUTRAL[name]:
            raise RequestError(f"{name}={value!r} is not supported here: leave it out", name, "unsupported_parameter")


def _asked(body: dict[str, Any], defaults: SamplingParams) -> Asked:
    options = _given(body, "stream_options", dict, "an object", {})
    return Asked(
        model=_given(body, "model", str, "a name", "policy"),
        sampling=_sampling(body, defaults),
        choices=int(_number(body, "n", low=1, high=MOST_CHOICES, whole=True) or 1),
        stream=_given(body, "stream", bool, "true or false", False),
        include_usage=bool(options.get("include_usage")),
        token_ids=_given(body, "return_token_ids", bool, "true or false", False),
    )


def _sampling(body: dict[str, Any], defaults: SamplingParams) -> SamplingParams:
    limits: dict[str, dict[str, Any]] = {
        "temperature": {"low": 0.0, "high": 2.0},
        "top_p": {"above": 0.0, "high": 1.0},
        "top_k": {"low": -1, "whole": True},
        "min_p": {"low": 0.0, "high": 1.0},
        "min_tokens": {"low": 0, "whole": True},
        "presence_penalty": {"low": -2.0, "high": 2.0},
        "frequency_penalty": {"low": -2.0, "high": 2.0},
        "repetition_penalty": {"above": 0.0},
        "seed": {"low": 0, "high": 2**62, "whole": True},
        "max_tokens": {"low": 1, "whole": True},
    }
    given = {name: _number(body, name, **limit) for name, limit in limits.items()}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if bias := _given(body, "logit_bias", dict, "an object", {}):
        if not all(token.isascii() and token.isdigit() for token in bias):
            raise RequestError("logit_bias must have token ids as its names", "logit_bias")
        chosen["logit_bias"] = {int(token): _number(bias, token, low=-100.0, high=100.0) or 0.0 for token in bias}
    if body.get("stop") is not None:
        stop = [body["stop"]] if isinstance(body["stop"], str) else body["stop"]
        if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
            raise RequestError("stop must be a text or a list of texts, none of them empty", "stop")
        chosen["stop"] = tuple(stop)
    return replace(defaults, **chosen)


@overload
def _given(body: dict[str, Any], name: str, kind: type[T], form: str) -> T: ...
@overload
def _given(body: dict[str, Any], name: str, kind: type[T], form: str, default: D) -> T | D: ...
def _given(body: dict[str, Any], name: str, kind: type, form: str, default: object = ...) -> object:
    value = body.get(name)
    if value is None and default is not ...:
        return default
    if not isinstance(value, kind):
        raise RequestError(f"{name} must be {form}", name)
    return value


def _number(body: dict[str, Any], name: str, *, low: float = -math.inf, above: float = -math.inf,
            high: float = math.inf, whole: bool = False) -> float | None:  # fmt: skip
    value = body.get(name)
    if value is None:
        return None
    right_kind = type(value) is int or (type(value) is float and not whole)
    if not right_kind or not (low <= value <= high and value > above):
        bounds = [f"at least {low:g}"] * (low > -math.inf) + [f"above {above:g}"] * (above > -math.inf)
        bounds += [f"at most {high:g}"] * (high < math.inf)
        raise RequestError(f"{name} must be a {'whole ' * whole}number {' and '.join(bounds)}; it is {value!r}", name)
    return value


def _message(message: object, where: str) -> Message:
    """In the form of chat templates."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise RequestError(f"{where} must be an object with a role of {', '.join(ROLES)}", where)
    found: Message = {"role": ROLES[message["role"]], "content": _text(message.get("content"), f"{where}.content")}
    if message["role"] == "tool":
        found["tool_call_id"] = str(message.get("tool_call_id", ""))
    if isinstance(message.get("name"), str):
        found["name"] = message["name"]
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise RequestError(f"{where}.tool_calls must be a list", where)
        found["tool_calls"] = [_tool_call(call, f"{where}.tool_calls") for call in calls]
    return found


def _text(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise RequestError(f"{where} must be text, or a list of parts of type text", where)
    return "".join(part["text"] for part in parts)


def _tool_call(call: object, where: str) -> dict[str, Any]:
    given = call if isinstance(call, dict) else {}
    function = given.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} must be objects with a function that has a name and arguments", where)
    arguments = function.get("arguments")
    with contextlib.suppress(ValueError):  # what is no JSON is shown to the model as it is
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"id": str(given.get("id", "")), "type": "function",
            "function": {"name": function["name"], "arguments": arguments}}  # fmt: skip
