"""Formats of tool calls and of thinking in models' chat templates, by vLLM's names for them.

Text after a call is no part of the message, as in these templates. A reply is thinking from its
beginning or not at all: it begins with the first delimiter, or the template has opened it. A reply
whose thinking never ends has no text.
"""

from __future__ import annotations

import ast
import json
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, ClassVar

from skyasync.agents.parsers import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    Functions,
    ReasoningParser,
    ToolParser,
    before,
)
from skyasync.envs.tools import between, read_tool_calls
from skyasync.rollout.chat import Tools
from skyasync.rollout.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_DECODER = json.JSONDecoder()
#: Errors of JSON's and Python's parsers, and of a result that is not as a format describes it.
_MALFORMED = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
    SyntaxError,
    MemoryError,
)


class _Delimited(ToolParser):
    """Calls that begin with a delimiter, the first of ``delimiters``."""

    delimiters: ClassVar[tuple[str, ...]] = ()

    def sure(self, text: str) -> str:
        return before(text, self.delimiters[0])

    def read(self, text: str, tools: Tools) -> tuple[str, Functions]:
        front, present, rest = text.partition(self.delimiters[0])
        try:
            calls = list(self._calls(rest)) if present else []
        except _MALFORMED:
            calls = []
        well_formed = all(
            isinstance(call["name"], str) and call["name"] and isinstance(call["arguments"], dict)
            for call in calls
        )
        if calls and well_formed:
            return (front.rstrip(), calls)
        return (text, [])

    def _calls(self, rest: str) -> Iterator[dict[str, Any]]:
        """The calls after the first delimiter; raises an error for what is none."""
        raise NotImplementedError


@TOOL_PARSERS.register("hermes")
@TOOL_PARSERS.register("qwen")
class Hermes(_Delimited):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen, many others."""

    delimiters = ("<tool_call>", "</tool_call>")

    def read(self, text: str, tools: Tools) -> tuple[str, Functions]:
        front, calls = read_tool_calls(text)
        return front, [call["function"] for call in calls]


@TOOL_PARSERS.register("llama3_json")
class Llama(_Delimited):
    """A reply that is ``{"name": ..., "parameters": {...}}`` alone: Llama 3.

    Several calls have a semicolon in between.
    """

    delimiters = ("<|python_tag|>",)
    _CALL = re.compile(r"[^ \n;]")

    def sure(self, text: str) -> str:
        if text.lstrip()[:1] in ("{", ""):  # it may be a call
            return ""
        return super().sure(text)

    def read(self, text: str, tools: Tools) -> tuple[str, Functions]:
        delimited = text
        if self.delimiters[0] not in text and text.lstrip()[:1] == "{":
            delimited = self.delimiters[0] + text  # the model may leave the delimiter out
        front, calls = super().read(delimited, tools)
        if calls:
            return (front, calls)
        return (text, [])

    def _calls(self, rest: str) -> Iterator[dict[str, Any]]:
        position = 0
        while start := self._CALL.search(rest, position):
            call, position = _DECODER.raw_decode(rest, start.start())
            yield {
                "name": call["name"],
                "arguments": call.get("parameters", call.get("arguments", {})),
            }


@TOOL_PARSERS.register("mistral")
class Mistral(_Delimited):
    """``[TOOL_CALLS] [{"name": ..., "arguments": {...}}]``: Mistral.

    Newer models write ``[TOOL_CALLS]name[ARGS]{...}`` for every call.
    """

    delimiters = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    _NAME = re.compile(r"[\w.-]+")

    def identity(self, request: str, index: int) -> str:
        """Nine letters and digits: the template rejects other ids."""
        return sha256(f"{request}-{index}".encode()).hexdigest()[:9]

    def _calls(self, rest: str) -> Iterator[dict[str, Any]]:
        if rest.lstrip().startswith("["):
            for call in json.loads(rest):
                yield {"name": call["name"], "arguments": call.get("arguments", {})}
            return
        for text in rest.split(self.delimiters[0]):
            head, brace, body = text.partition("{")
            name, _, _ = head.partition("[CALL_ID]")
            name = name.strip().removesuffix("[ARGS]").strip()
            if not self._NAME.fullmatch(name):
                raise ValueError(text)
            yield {"name": name, "arguments": json.loads(brace + body)}


@TOOL_PARSERS.register("deepseek_v3")
@TOOL_PARSERS.register("deepseek_v31")
class DeepSeek(_Delimited):
    """Both formats of DeepSeek.

    V3 and R1 write ``function<sep>name`` and a block of JSON, V3.1 ``name<sep>{...}``.
    """

    delimiters = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    )

    def _calls(self, rest: str) -> Iterator[dict[str, Any]]:
        _, begin, sep, end, _ = self.delimiters
        blocks = list(between(rest, begin, end))
        if rest.count(begin) != len(blocks):  # one that never ends
            raise ValueError(rest)
        for block in blocks:
            name, separator, body = block.partition(sep)
            v3_name, fence, code = body.partition("\n```")
            if fence:  # V3: the text in front of the separator is the type
                name = v3_name
                body = code.removeprefix("json").strip().removesuffix("```")
            if not separator or not name.strip():
                raise ValueError(rest)
            yield {"name": name.strip(), "arguments": json.loads(body)}


@TOOL_PARSERS.register("pythonic")
class Pythonic(_Delimited):
    """A reply that is ``[name(argument=value), ...]`` alone, in Python: Llama 3.2 and 4, ToolACE."""

    delimiters = ("<|python_start|>", "<|python_end|>")
    #: Characters: Python's parser takes a tenth of a second for them, and blocks the event loop.
    _LONGEST = 2**15

    def sure(self, text: str) -> str:
        if text.lstrip()[:1] in ("[", "<", ""):  # it may be a list of calls
            return ""
        return text.rstrip()

    def read(self, text: str, tools: Tools) -> tuple[str, Functions]:
        start, end = self.delimiters
        bare = text.strip().removeprefix(start).removesuffix(end).strip()
        if not (bare.startswith("[") and bare.endswith("]")) or len(bare) > self._LONGEST:
            return text, []
        try:
            calls = list(self._calls(bare))
        except _MALFORMED:
            return text, []
        if calls:
            return ("", calls)
        return (text, [])

    def _calls(self, rest: str) -> Iterator[dict[str, Any]]:
        expression = ast.parse(rest, mode="eval").body
        if not isinstance(expression, ast.List):
            raise ValueError(rest)
        for call in expression.elts:
            if not isinstance(call, ast.Call) or call.args:
                raise ValueError(rest)
            arguments = {}
            for keyword in call.keywords:
                if not keyword.arg:  # **mapping
                    raise ValueError(rest)
                arguments[keyword.arg] = ast.literal_eval(keyword.value)
            json.dumps(arguments)  # they travel as JSON
            yield {"name": ast.unparse(call.func), "arguments": arguments}


@dataclass
class FunctionTools(ToolParser):
    """A function ``text, tools -> (text, calls)``.

    An error, or another type of result, leaves the reply as text.
    """

    function: Callable[[str, Tools], tuple[str, Functions]]

    def read(self, text: str, tools: Tools) -> tuple[str, Functions]:
        try:
            front, calls = self.function(text, tools)
            calls = [
                {"name": str(call["name"]), "arguments": dict(call["arguments"])} for call in calls
            ]
            json.dumps(calls)  # they travel as JSON
            return str(front), calls
        except Exception as error:  # of any type: the function is the user's, or vLLM's
            log.warning("the tool parser has failed, and the reply is left as text: %r", error)
            return text, []


def read_with_vllm(
    parser: Callable[..., Any], tokenizer: Tokenizer, text: str, tools: Tools
) -> tuple[str, Functions]:
    """The text and the calls by one of vLLM's parsers.

    They have state, so that every reply has a new one.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    body = {"messages": [], "model": "policy", "tools": list(tools or ()) or None}
    request = ChatCompletionRequest.model_validate(body)
    result = parser(tokenizer, request.tools).extract_tool_calls(text, request)
    calls = []
    for call in result.tool_calls:
        arguments = json.loads(call.function.arguments or "{}")
        calls.append({"name": call.function.name, "arguments": arguments})
    if not calls:
        return text, []
    return result.content or "", calls


# ---------------------------------------------------------------- thinking


class _Between(ReasoningParser):
    """Thinking between two delimiters."""

    delimiters: ClassVar[tuple[str, str]]

    def opens(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(self.delimiters[0])

    def split(self, text: str, *, opened: bool, done: bool) -> tuple[str, str]:
        start, end = self.delimiters
        bare = text.lstrip()
        if not bare.startswith(start):
            if not done and start.startswith(bare):  # it may become the delimiter
                return "", ""
            if not opened:
                return "", text
        thought, ended, rest = bare.removeprefix(start).partition(end)
        if ended:
            return thought.strip(), rest.lstrip()
        if done:
            return thought.strip(), ""
        return before(thought, end).lstrip(), ""


@REASONING_PARSERS.register("think")
@REASONING_PARSERS.register("qwen3")
@REASONING_PARSERS.register("deepseek_r1")
class Think(_Between):
    """``<think>...</think>``: Qwen 3, DeepSeek R1, and many others."""

    delimiters = ("<think>", "</think>")


@REASONING_PARSERS.register("mistral")
class MistralThink(_Between):
    """``[THINK]...[/THINK]``: Magistral."""

    delimiters = ("[THINK]", "[/THINK]")


@REASONING_PARSERS.register("seed_oss")
class SeedThink(_Between):
    """``<seed:think>...</seed:think>``: Seed-OSS."""

    delimiters = ("<seed:think>", "</seed:think>")


@dataclass
class FunctionReasoning(ReasoningParser):
    """A function ``text -> (reasoning, text)``; an error leaves the reply as text."""

    function: Callable[[str], tuple[str | None, str | None]]

    def split(self, text: str, *, opened: bool, done: bool) -> tuple[str, str]:
        if not done:
            return "", ""
        try:
            reasoning, rest = self.function(text)
        except Exception as error:
            log.warning("the reasoning parser has failed, and the reply is left as text: %r", error)
            return "", text
        return reasoning or "", rest or ""


def split_with_vllm(
    parser: Callable[..., Any], tokenizer: Tokenizer, text: str
) -> tuple[str | None, str | None]:
    """The reasoning and the text by one of vLLM's parsers."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    request = ChatCompletionRequest.model_validate({"messages": [], "model": "policy"})
    split: tuple[str | None, str | None] = parser(tokenizer).extract_reasoning(text, request)
    return split
