"""The formats of calls of tools and of thinking in the models' own chat templates, by vLLM's names
for them.

What follows a call is no part of the message, as in these templates. A reply is thinking from its
beginning or not at all: it begins with the first delimiter, or the template has opened it. Thinking
that never ends is all there is of the reply.
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


class _Delimited(ToolParser):
    """Calls that begin with a delimiter, the first of ``delimiters``."""

    delimiters: ClassVar[tuple[str, ...]] = ()

    def sure(self, text: str) -> str:
        return before(text, self.delimiters[0])

    def read(self, text: str, tools: Tools) -> tuple[str, Functions]:
        front, present, rest = text.partition(self.delimiters[0])
        try:
            calls = list(self._calls(rest)) if present else []
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
            SyntaxError,
            MemoryError,
        ):
            calls = []
        whole = all(
            isinstance(c["name"], str) and c["name"] and isinstance(c["arguments"], dict)
            for c in calls
        )
        if calls and whole:
            return (front.rstrip(), calls)
        return (text, [])

    def _calls(self, rest: str) -> Iterator[dict[str, Any]]:
        """The calls after the first delimiter; raises an error for what is none."""
        raise NotImplementedError


@TOOL_PARSERS.register("hermes")
@TOOL_PARSERS.register("qwen")
class Hermes(_Delimited):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3, and
    many others."""

    delimiters = ("<tool_call>", "</tool_call>")

    def read(self, text: str, tools: Tools) -> tuple[str, Functions]:
        front, calls = read_tool_calls(text)
        return front, [call["function"] for call in calls]


@TOOL_PARSERS.register("llama3_json")
class Llama(_Delimited):
    """The whole reply is ``{"name": ..., "parameters": {...}}``; several have a semicolon in
    between: Llama 3."""

    delimiters = ("<|python_tag|>",)
    _CALL = re.compile(r"[^ \n;]")

    def sure(self, text: str) -> str:
        if text.lstrip()[:1] in ("{", ""):
            return ""
        return super().sure(text)

    def read(self, text: str, tools: Tools) -> tuple[str, Functions]:
        if self.delimiters[0] in text or text.lstrip()[:1] != "{":
            marked = text
        else:
            marked = self.delimiters[0] + text
        front, calls = super().read(marked, tools)
        if calls:
            return (front, calls)
        return (text, [])

    def _calls(self, rest: str) -> Iterator[dict[str, Any]]:
        place = 0
        while start := self._CALL.search(rest, place):
            place = start.start()
            call, place = _DECODER.raw_decode(rest, place)
            yield {
                "name": call["name"],
                "arguments": call.get("parameters", call.get("arguments", {})),
            }


@TOOL_PARSERS.register("mistral")
class Mistral(_Delimited):
    """``[TOOL_CALLS] [{"name": ..., "arguments": {...}}]``; newer ones
    ``[TOOL_CALLS]name[ARGS]{...}`` for each."""

    delimiters = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    _NAME = re.compile(r"[\w.-]+")

    def identity(self, request: str, index: int) -> str:
        """Nine letters and digits, or the template refuses the conversation."""
        return sha256(f"{request}-{index}".encode()).hexdigest()[:9]

    def _calls(self, rest: str) -> Iterator[dict[str, Any]]:
        if rest.lstrip().startswith("["):
            for call in json.loads(rest):
                yield {"name": call["name"], "arguments": call.get("arguments", {})}
            return
        for piece in rest.split(self.delimiters[0]):
            head, brace, rest = piece.partition("{")
            name = head.partition("[CALL_ID]")[0].strip().removesuffix("[ARGS]").strip()
            if not self._NAME.fullmatch(name):
                raise ValueError(piece)
            yield {"name": name, "arguments": json.loads(brace + rest)}


@TOOL_PARSERS.register("deepseek_v3")
@TOOL_PARSERS.register("deepseek_v31")
class DeepSeek(_Delimited):
    """Both of DeepSeek's: V3 and R1 write ``function<sep>name`` and a block of JSON, V3.1
    ``name<sep>{...}``."""

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
        if rest.count(begin) != len(blocks):
            raise ValueError(rest)
        for head, separated, body in (block.partition(sep) for block in blocks):
            name, fence, code = body.partition("\n```")
            if fence:
                head = name
                body = code.removeprefix("json").strip().removesuffix("```")
            if not separated or not head.strip():
                raise ValueError(rest)
            yield {"name": head.strip(), "arguments": json.loads(body)}


@TOOL_PARSERS.register("pythonic")
class Pythonic(_Delimited):
    """The whole reply is ``[name(argument=value), ...]``, as Python writes it: Llama 3.2 and 4,
    ToolACE."""

    delimiters = ("<|python_start|>", "<|python_end|>")
    _LONGEST = (
        2**15
    )  # characters, for which Python's parser takes a tenth of a second and blocks the event loop

    def sure(self, text: str) -> str:
        if text.lstrip()[:1] in ("[", "<", ""):
            return ""
        return text.rstrip()

    def read(self, text: str, tools: Tools) -> tuple[str, Functions]:
        bare = (
            text.strip().removeprefix(self.delimiters[0]).removesuffix(self.delimiters[1]).strip()
        )
        if not (bare.startswith("[") and bare.endswith("]")) or len(bare) > self._LONGEST:
            return text, []
        try:
            calls = list(self._calls(bare))
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            return text, []
        if calls:
            return ("", calls)
        return (text, [])

    def _calls(self, rest: str) -> Iterator[dict[str, Any]]:
        written = ast.parse(rest, mode="eval").body
        if not isinstance(written, ast.List):
            raise ValueError(rest)
        for call in written.elts:
            if not isinstance(call, ast.Call) or call.args or not all(k.arg for k in call.keywords):
                raise ValueError(rest)
            arguments = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
            json.dumps(arguments)  # they travel as JSON
            yield {"name": ast.unparse(call.func), "arguments": arguments}


@dataclass
class FunctionTools(ToolParser):
    """A function ``text, tools -> (text, calls)``; an error, or another type of result, leaves the
    reply as text."""

    function: Callable[[str, Tools], tuple[str, Functions]]

    def read(self, text: str, tools: Tools) -> tuple[str, Functions]:
        try:
            front, calls = self.function(text, tools)
            calls = [
                {"name": str(call["name"]), "arguments": dict(call["arguments"])} for call in calls
            ]
            json.dumps(calls)
            return str(front), calls
        except Exception as error:
            log.warning("the tool parser has failed, and the reply is left as text: %r", error)
            return text, []


def read_with_vllm(
    parser: Callable[..., Any], tokenizer: Tokenizer, text: str, tools: Tools
) -> tuple[str, Functions]:
    """The text and the calls by one of vLLM's parsers; a new one for each reply, since they keep
    state."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    body = {"messages": [], "model": "policy", "tools": list(tools or ()) or None}
    request = ChatCompletionRequest.model_validate(body)
    result = parser(tokenizer, request.tools).extract_tool_calls(text, request)
    calls = [
        {"name": call.function.name, "arguments": json.loads(call.function.arguments or "{}")}
        for call in result.tool_calls
    ]
    return (result.content or "") if calls else text, calls


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
        return (thought.strip() if done else before(thought, end).lstrip()), ""


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
