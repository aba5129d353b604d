"""Tools that the model may call while it plays an episode: methods of an environment, marked with
``@tool``.

Invariant: what the model is shown of a tool (its name, what it does, its arguments) is read from
the method itself, its docstring and its type hints. A call that cannot be carried out is answered
with text that begins with "error:", for the model to read; what a tool raises besides ``ToolError``
is an error of the environment.

Calls are read in the Hermes form, which Qwen and many others use:
``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them behind the text.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from functools import cache
from types import MethodType
from typing import Any, TypeVar

from skyasync.errors import UserError, unknown

ToolSchema = dict[str, Any]  # in OpenAI's form, which chat templates read
Tool = TypeVar("Tool", bound=Callable[..., Any])

_MARK = "_is_tool"
MOST_LEVELS = 64
"""Of nested values in calls, which templates and clients read by recursion."""


class ToolError(Exception):
    """Raised by a tool to tell the model why it cannot do what was asked."""


def tool(method: Tool) -> Tool:
    """Let the model call this method; its docstring describes it, ``Args:`` section included.

    Raises:
        TypeError: for an ``async def``, which would not be awaited.
    """
    if inspect.iscoroutinefunction(method):
        raise TypeError(f"tool {method.__qualname__} is async def: a tool must be a plain method")
    setattr(method, _MARK, True)
    return method


def tools_of(env_class: object) -> dict[str, Callable[..., Any]]:
    """Name -> method, for every method of a class that is marked. Of the class: an object's
    properties would run."""
    return {
        name: method
        for name, method in inspect.getmembers(env_class, inspect.isfunction)
        if _MARK in vars(method)
    }


@cache
def schemas(env_class: Callable[..., object]) -> list[ToolSchema]:
    """What the chat template is told of an environment's tools; none for one that has none.

    Raises:
        UserError: if a tool lacks a docstring, a type hint or the description of an argument.
    """
    tools = tools_of(env_class)
    if not tools:
        return []
    from transformers.utils import get_json_schema

    shown = []
    for name, method in tools.items():
        try:
            shown.append(get_json_schema(MethodType(method, env_class)))
        except Exception as error:
            raise UserError(f"tool {env_class.__name__}.{name}: {error}") from error
    return shown


def read_tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The text in front of the tool calls, and the calls in the form of templates, without ids.

    A call that is no JSON object with a name and arguments leaves the whole text as it is, so that
    its reader sees what was wrong. So does one that cannot be sent (``as_sent``).
    """
    functions = []
    for part in between(text, "<tool_call>", "</tool_call>"):
        try:
            call = json.loads(part)
        except (ValueError, RecursionError):
            return text, []
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return text, []
        arguments = call.get("arguments", {})
        if not isinstance(arguments, dict):
            return text, []
        functions.append({"name": call["name"], "arguments": arguments})
    try:
        calls = [{"type": "function", "function": function} for function in as_sent(functions)]
    except ValueError:
        return text, []
    if calls:
        return (text[: text.index("<tool_call>")].rstrip(), calls)
    return (text, [])


def as_sent(functions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls as their JSON is read, in which all keys are text.

    Raises:
        ValueError: for what templates and clients would fail at: half a surrogate pair, numbers
            that JSON lacks, more than ``MOST_LEVELS`` levels.
    """
    level: list[Any] = [functions]
    for _ in range(MOST_LEVELS):
        inner = [
            item.values() if isinstance(item, dict) else item
            for item in level
            if isinstance(item, dict | list)
        ]
        level = [value for values in inner for value in values]
    if level:
        raise ValueError(f"more than {MOST_LEVELS} levels")
    written = json.dumps(functions, ensure_ascii=False, allow_nan=False)
    written.encode()
    read: list[dict[str, Any]] = json.loads(written)
    return read


def between(text: str, start: str, end: str) -> Iterator[str]:
    """What stands between the marks, from left to right, in one pass: a model may write thousands
    of either."""
    place = text.find(start)
    while place >= 0 and (close := text.find(end, place + len(start))) >= 0:
        yield text[place + len(start) : close]
        place = text.find(start, close + len(end))


def answer_to(call: dict[str, Any], owner: object) -> dict[str, str]:
    """The message that a call is answered with."""
    name = call["function"]["name"]
    arguments = call["function"]["arguments"]
    tools = tools_of(type(owner))
    if name not in tools:
        content = f"error: {unknown('tool', name, tools)}"
    else:
        method = MethodType(tools[name], owner)
        try:
            bound = inspect.signature(method).bind(**arguments)
        except TypeError as error:
            content = f"error: {name}: {error}"
        else:
            try:
                content = str(method(*bound.args, **bound.kwargs))
            except ToolError as error:
                content = f"error: {error}"
    return {"role": "tool", "name": name, "content": content}
