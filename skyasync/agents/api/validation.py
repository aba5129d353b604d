"""The fields of a request, read and checked.

Invariant: every field is either carried out or rejected with an error that names it; only fields that cannot change an
answer are ignored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from skyasync.agents.api.types import Body, RequestError, from_json
from skyasync.config.keys import Key
from skyasync.envs.images import NO_IMAGES, image_part, read_parts
from skyasync.errors import UserError, nearest
from skyasync.inference.interface import LARGEST_BIAS, LIMITS, SamplingParams
from skyasync.rollout.chat import Tools

T = TypeVar("T")

#: The numbers by which a request may sample, by the names of ``SamplingParams``.
NUMBERS = ("temperature", "top_p", "top_k", "min_p", "min_tokens", "presence_penalty", "frequency_penalty",
           "repetition_penalty", "seed", "max_tokens")  # fmt: skip
LENGTHS = (("max_completion_tokens", "max_tokens"), ("max_output_tokens", "max_tokens"))
MOST_STOPS, LONGEST_STOP = 64, 256
MOST_BIASES = 4096
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

_BIAS = Key("", float, low=-LARGEST_BIAS, high=LARGEST_BIAS)


def check_fields(
    body: Body, known: Collection[str], ignored: Collection[str], neutral: Mapping[str, tuple[Any, ...]]
) -> None:
    """Raises ``RequestError`` for a field that is not ``known``, unless its value is one that requests nothing."""
    for name, value in body.items():
        if name in known or name in ignored:
            continue
        if name not in neutral:
            close = nearest(name[:100], {*known, *neutral}, count=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise RequestError(f"unknown field {name:.100}{hint}", name[:100], "unknown_parameter")
        if value not in neutral[name]:
            raise RequestError(f"{name}={value!r:.200} is not supported here: remove it", name, "unsupported_parameter")


def given(body: Mapping[str, Any], name: str, kind: type[T], form: str, default: T | None = None) -> T:
    """The value of a field, which must be of this type; ``default`` if it is null or missing."""
    value = body.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, kind):
        raise RequestError(f"{name} must be {form}", name)
    return value


def flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    return given(body, name, bool, "true or false", default)


def number(body: Mapping[str, Any], name: str, limits: Key) -> float | None:
    """The number of a field within its bounds; None if it is null or missing."""
    value = body.get(name)
    if value is None:
        return None
    right_kind = type(value) is int or (type(value) is float and limits.type is float)
    if not right_kind or not limits.allows(value):
        kind = "number" if limits.type is float else "whole number"
        raise RequestError(f"{name} must be a {kind} {limits.bounds()}; it is {value!r:.100}", name)
    return value


def sampling(body: Body, defaults: SamplingParams) -> SamplingParams:
    """How to sample; ``defaults`` hold for what the request leaves out. Fields are by the names of all APIs."""
    chosen: dict[str, Any] = {}
    for field, name in (*zip(NUMBERS, NUMBERS, strict=True), *LENGTHS):
        value = number(body, field, LIMITS[name])
        if value is not None:
            chosen[name] = value
    if bias := given(body, "logit_bias", dict, "an object", {}):
        if len(bias) > MOST_BIASES:
            raise RequestError(f"logit_bias has {len(bias)} tokens; it may have {MOST_BIASES}", "logit_bias")
        if not all(token.isascii() and token.isdigit() and len(token) < 10 for token in bias):
            raise RequestError("logit_bias must have token ids as its names", "logit_bias")
        chosen["logit_bias"] = {int(token): number(bias, token, _BIAS) or 0.0 for token in bias}
    for name in ("stop", "stop_sequences"):
        value = body.get(name)
        if value is None:
            continue
        stop = [value] if isinstance(value, str) else value
        if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
            raise RequestError(f"{name} must be a text or a list of texts, none of them empty", name)
        if len(stop) > MOST_STOPS or max(map(len, stop), default=0) > LONGEST_STOP:
            most = f"{MOST_STOPS} texts of {LONGEST_STOP} characters"
            raise RequestError(f"{name} may have {most}; it has {len(stop)}, or a longer one", name)
        chosen["stop"] = tuple(stop)
    try:
        return replace(defaults, **chosen)
    except ValueError as error:  # of half a surrogate pair
        raise RequestError(str(error)) from error


def content_of(content: object, where: str) -> str | list[dict[str, Any]]:
    """The text of a message; a list of parts if images are among them, which have been read.

    Raises:
        RequestError: for a part that is neither text nor an image as a data: URL.
    """
    if not isinstance(content, list) or not any(image_part(part) for part in content):
        return text_of(content, where)
    try:
        parts = read_parts(content, files=False)
    except UserError as error:
        raise RequestError(f"{where}: {error}", where, "unsupported_content") from error
    return [part if image_part(part) else {"type": "text", "text": text_of([part], where)} for part in parts]


def text_of(content: object, where: str) -> str:
    """The text of a message, or of its parts together.

    Raises:
        RequestError: for a part that is not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [content]
    for part in parts:
        check_no_image(part, where)
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise RequestError(f"{where} must be text, or a list of parts of type text", where)
    return "".join(part["text"] for part in parts)


def check_no_image(part: object, where: str) -> None:
    """Raises ``RequestError`` for a part that is an image."""
    if kind := image_part(part):
        raise RequestError(f"{where} has a part of type {kind}: {NO_IMAGES}", where, "unsupported_content")


def tool_call(name: object, arguments: object, identity: object, where: str) -> dict[str, Any]:
    """A call that a message brings back, as templates read it."""
    if not isinstance(name, str):
        raise RequestError(f"{where} must have a name and arguments", where)
    with contextlib.suppress(ValueError, RecursionError):  # what is no JSON is shown to the model as it is
        arguments = from_json(arguments) if isinstance(arguments, str) else arguments
    return {"id": str(identity or ""), "type": "function", "function": {"name": name, "arguments": arguments}}


def function_tools(body: Body, shown: bool, kind: str, schema: str) -> Tools:
    """The tools of a request in the form of chat completions, which templates read; None if the model is shown none.

    Args:
        shown: the result of ``shows_tools``.
        kind: the type that a tool must have.
        schema: the field of a tool with the schema of its parameters.
    """
    requested = given(body, "tools", list, "a list of tools", [])
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(requested if shown else ()):
        where = f"tools[{index}]"
        tool_type = tool.get("type", "custom" if kind == "custom" else None) if isinstance(tool, dict) else tool
        if not isinstance(tool, dict) or tool_type != kind:
            raise RequestError(f"{where} has the type {tool_type}: only tools of type {kind} are known here", where)
        name, description, parameters = tool.get("name"), tool.get("description"), tool.get(schema)
        if not isinstance(name, str) or not name:
            raise RequestError(f"{where} must have a name", where)
        function: dict[str, Any] = {"name": name}
        if isinstance(description, str):
            function["description"] = description
        function["parameters"] = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
        tools.append({"type": "function", "function": function})
    return tools or None


def shows_tools(choice: object, name: str = "tool_choice") -> bool:
    """Whether the model is shown the tools. Raises ``RequestError`` if it is to be forced to call one."""
    if choice not in (None, "auto", "none"):
        raise RequestError(f"{name} must be auto or none: a call of a tool cannot be enforced here", "tool_choice")
    return choice != "none"
