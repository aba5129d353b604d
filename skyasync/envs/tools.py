"""Tools that the model may call in an episode: methods of an environment marked with ``@tool``.

Invariant: a tool's description for the model (name, purpose, arguments) is read from the method,
its docstring and its type hints. A call that cannot be carried out is answered with text that
begins with "error:", for the model to read. Any exception of a tool besides ``ToolError`` is an
error of the environment.

Calls are read in the Hermes form, which Qwen and many others use:
``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them after the text.
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
MOST_LEVELS = 64  # of nested values in calls: templates and clients read them by recursion


class ToolError(Exception):
    """Raised by a tool; the message explains to the model why the call failed."""


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
    """The marked methods of a class, by name."""
    # Of the class, not of an object, whose properties getmembers would run.
    methods = inspect.getmembers(env_class, inspect.isfunction)
    return {name: method for name, method in methods if _MARK in vars(method)}


@cache
def schemas(env_class: Callable[..., object]) -> list[ToolSchema]:
    """The descriptions of an environment's tools for the chat template; none without tools.

    Raises:
        UserError: if a tool lacks a docstring, a type hint or the description of an argument.
    """
    tools = tools_of(env_class)
    if not tools:
        return []
    # Here, because the import takes seconds and most environments have no tools.
    from transformers.utils import get_json_schema

    shown = []
    for name, method in tools.items():
        try:
            shown.append(get_json_schema(MethodType(method, env_class)))
        except Exception as error:
            raise UserError(f"tool {env_class.__name__}.{name}: {error}") from error
    return shown


def read_tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The text before the tool calls, and the calls in the form of templates, without ids.

    A call that is not a JSON object with a name and arguments leaves the complete text as it is, so
    that its reader sees the mistake. So does one that cannot be sent (``as_sent``).
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
        functions = as_sent(functions)
    except ValueError:
        return text, []
    if not functions:
        return text, []
    calls = [{"type": "function", "function": function} for function in functions]
    return text[: text.index("<tool_call>")].rstrip(), calls


def as_sent(functions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls as their JSON is read, in which all keys are text.

    Raises:
        ValueError: for a value at which templates and clients would fail: half a surrogate pair,
            numbers that JSON lacks, more than ``MOST_LEVELS`` levels.
    """
    level: list[Any] = [functions]
    for _ in range(MOST_LEVELS):
        next_level: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                next_level += item.values()
            elif isinstance(item, list):
                next_level += item
        level = next_level
    if level:
        raise ValueError(f"more than {MOST_LEVELS} levels")
    text = json.dumps(functions, ensure_ascii=False, allow_nan=False)
    text.encode()  # raises for half a surrogate pair
    decoded: list[dict[str, Any]] = json.loads(text)
    return decoded


def between(text: str, start: str, end: str) -> Iterator[str]:
    """The texts between two delimiters, from left to right.

    In one pass: a model may write thousands of either delimiter.
    """
    opened = text.find(start)
    while opened >= 0:
        begin = opened + len(start)
        stop = text.find(end, begin)
        if stop < 0:
            return
        yield text[begin:stop]
        opened = text.find(start, stop + len(end))


def answer_to(call: dict[str, Any], owner: object) -> dict[str, str]:
    """Carry out a call; returns the message with its result, or with an error for the model."""
    name = call["function"]["name"]
    arguments = call["function"]["arguments"]
    tools = tools_of(type(owner))
    if name not in tools:
        content = f"error: {unknown('tool', name, tools)}"
    else:
        method = MethodType(tools[name], owner)
        try:
            # Apart from the call: a TypeError inside of the tool is an error of the environment.
            bound = inspect.signature(method).bind(**arguments)
        except TypeError as error:
            content = f"error: {name}: {error}"
        else:
            try:
                content = str(method(*bound.args, **bound.kwargs))
            except ToolError as error:
                content = f"error: {error}"
    return {"role": "tool", "name": name, "content": content}
