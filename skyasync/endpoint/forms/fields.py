"""The fields of a request, read and checked.

Invariant: every field is either carried out or refused with an error that names it; only fields that cannot change an
answer are passed over.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar, overload

from skyasync.endpoint.forms.inner import Body, RequestError
from skyasync.engines.protocol import SamplingParams
from skyasync.envs.images import NO_IMAGES, image_part
from skyasync.errors import nearest

T = TypeVar("T")
D = TypeVar("D")

#: Limits of the numbers that say how to sample, by the names of ``SamplingParams``.
LIMITS: dict[str, dict[str, Any]] = {
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


def refuse_others(
    body: Body, known: Collection[str], passed_over: Collection[str], neutral: Mapping[str, tuple[Any, ...]]
) -> None:
    """Raises ``RequestError`` for a field that is not ``known``, unless its value is one that asks for nothing."""
    for name, value in body.items():
        if name in known or name in passed_over:
            continue
        if name not in neutral:
            close = nearest(name, {*known, *neutral}, count=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise RequestError(f"unknown field {name}{hint}", name, "unknown_parameter")
        if value not in neutral[name]:
            raise RequestError(f"{name}={value!r} is not supported here: remove it", name, "unsupported_parameter")


@overload
def given(body: Mapping[str, Any], name: str, kind: type[T], form: str) -> T: ...
@overload
def given(body: Mapping[str, Any], name: str, kind: type[T], form: str, default: D) -> T | D: ...
def given(body: Mapping[str, Any], name: str, kind: type, form: str, default: object = ...) -> object:
    """The value of a field, which must be of this kind; ``default`` where it is null or not there."""
    value = body.get(name)
    if value is None and default is not ...:
        return default
    if not isinstance(value, kind):
        raise RequestError(f"{name} must be {form}", name)
    return value


def flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    return given(body, name, bool, "true or false", default)


def number(body: Mapping[str, Any], name: str, *, low: float = -math.inf, above: float = -math.inf,
           high: float = math.inf, whole: bool = False) -> float | None:  # fmt: skip
    """The number of a field within its bounds; None where it is null or not there."""
    value = body.get(name)
    if value is None:
        return None
    right_kind = type(value) is int or (type(value) is float and not whole)
    if not right_kind or not (low <= value <= high and value > above):
        bounds = [f"at least {low:g}"] * (low > -math.inf) + [f"above {above:g}"] * (above > -math.inf)
        bounds += [f"at most {high:g}"] * (high < math.inf)
        raise RequestError(f"{name} must be a {'whole ' * whole}number {' and '.join(bounds)}; it is {value!r}", name)
    return value


def sampling(body: Body, defaults: SamplingParams, renamed: Mapping[str, str] | None = None) -> SamplingParams:
    """How to sample; ``defaults`` hold where the request says nothing.

    Args:
        renamed: what this form calls a field -> what ``LIMITS`` calls it.
    """
    names = {name: name for name in LIMITS} | {ours: theirs for theirs, ours in (renamed or {}).items()}
    found = {ours: number(body, theirs, **LIMITS[ours]) for ours, theirs in names.items()}
    chosen: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
    if bias := given(body, "logit_bias", dict, "an object", {}):
        if not all(token.isascii() and token.isdigit() for token in bias):
            raise RequestError("logit_bias must have token ids as its names", "logit_bias")
        chosen["logit_bias"] = {int(token): number(bias, token, low=-100.0, high=100.0) or 0.0 for token in bias}
    for name in ("stop", "stop_sequences"):
        if body.get(name) is not None:
            chosen["stop"] = _stop_strings(name, body[name])
    return replace(defaults, **chosen)


def _stop_strings(name: str, said: object) -> tuple[str, ...]:
    stop = [said] if isinstance(said, str) else said
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise RequestError(f"{name} must be a text or a list of texts, none of them empty", name)
    return tuple(stop)


def text_of(content: object, where: str) -> str:
    """The text of a message, or of its parts together.

    Raises:
        RequestError: for a part that is no text, and for pictures in a line of their own.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [content]
    for part in parts:
        refuse_image(part, where)
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise RequestError(f"{where} must be text, or a list of parts of type text", where)
    return "".join(part["text"] for part in parts)


def refuse_image(part: object, where: str) -> None:
    """Raises ``RequestError`` for a part that is a picture."""
    if kind := image_part(part):
        raise RequestError(f"{where} has a part of type {kind}: {NO_IMAGES}", where, "unsupported_content")


def tool_call(name: object, arguments: object, identity: object, where: str) -> dict[str, Any]:
    """A call that a message brings back, in the form of templates."""
    if not isinstance(name, str):
        raise RequestError(f"{where} must have a name and arguments", where)
    with contextlib.suppress(ValueError, RecursionError):  # what is no JSON is shown to the model as it is
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"id": str(identity or ""), "type": "function", "function": {"name": name, "arguments": arguments}}


def function_tool(name: object, description: object, parameters: object, where: str) -> dict[str, Any]:
    """A tool in OpenAI's form, which chat templates read."""
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where} must have a name", where)
    function: dict[str, Any] = {"name": name}
    if isinstance(description, str):
        function["description"] = description
    function["parameters"] = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}
