"""Calls of tools in the forms of the families that write them.

The forms are those of the models' own chat templates; their names are vLLM's.

Invariant: that of the room. What stands behind a call is no part of the message, as in these templates.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any

from skyasync.endpoint.parsers import TOOL_PARSERS, Functions
from skyasync.envs.tools import between, read_tool_calls
from skyasync.rollout.chat import Tools

_DECODER = json.JSONDecoder()


def before(text: str, marks: Sequence[str]) -> str:
    """What stands in front of the first mark, or of what may become one; without the blanks in front of it."""
    end = min((place for mark in marks if (place := text.find(mark)) >= 0), default=-1)
    if end < 0:
        end = len(text) - max((_overlap(text, mark) for mark in marks), default=0)
    return text[:end].rstrip()


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of the text are the beginning of the mark."""
    return next((n for n in range(min(len(mark), len(text)), 0, -1) if text.endswith(mark[:n])), 0)


class _Marked:
    """Calls that begin with a mark."""

    marks: tuple[str, ...] | None = ()

    def sure(self, text: str) -> str:
        return before(text, self.marks or ())

    def identity(self, request: str, index: int) -> str:
        return f"call_{request}-{index}"

    def read(self, text: str, tools: Tools) -> tuple[str, Functions]:
        (mark, *_) = self.marks or ("",)
        front, found, rest = text.partition(mark)
        try:
            calls = list(self._calls(rest)) if found else []
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SyntaxError, MemoryError):
            calls = []
        return (front.rstrip(), calls) if calls and all(map(_is_call, calls)) else (text, [])

    def _calls(self, rest: str) -> Iterator[dict[str, Any]]:
        """The calls behind the first mark; raises for what is none."""
        raise NotImplementedError


def _is_call(call: dict[str, Any]) -> bool:
    return isinstance(call["name"], str) and bool(call["name"]) and isinstance(call["arguments"], dict)


@TOOL_PARSERS.register("hermes")
@TOOL_PARSERS.register("qwen")
class Hermes(_Marked):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3, and many others."""

    marks = ("<tool_call>", "</tool_call>")

    def sure(self, text: str) -> str:
        return before(text, ("<tool_call>",))

    def read(self, text: str, tools: Tools) -> tuple[str, Functions]:
        front, calls = read_tool_calls(text)
        return front, [call["function"] for call in calls]


@TOOL_PARSERS.register("llama3_json")
class Llama(_Marked):
    """The whole reply is ``{"name": ..., "parameters": {...}}``; several have a semicolon in between: Llama 3."""

    marks = ("<|python_tag|>",)
    _CALL = re.compile(r"[^ \n;]")

    def sure(self, text: str) -> str:
        return "" if text.lstrip()[:1] in ("{", "") else super().sure(text)

    def read(self, text: str, tools: Tools) -> tuple[str, Functions]:
        marked = text if self.marks[0] in text or text.lstrip()[:1] != "{" else self.marks[0] + text
        front, calls = super().read(marked, tools)
        return (front, calls) if calls else (text, [])

    def _calls(self, rest: str) -> Iterator[dict[str, Any]]:
        place = 0
        while begun := self._CALL.search(rest, place):
            place = begun.start()
            call, place = _DECODER.raw_decode(rest, place)
            yield {"name": call["name"], "arguments": call.get("parameters", call.get("arguments", {}))}


@TOOL_PARSERS.register("mistral")
class Mistral(_Marked):
    """``[TOOL_CALLS] [{"name": ..., "arguments": {...}}]``; newer ones ``[TOOL_CALLS]name[ARGS]{...}`` for each."""

    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    _NAME = re.compile(r"[\w.-]+")

    def sure(self, text: str) -> str:
        return before(text, self.marks[:1])

    def identity(self, request: str, index: int) -> str:
        """Nine letters and digits, or the template refuses the conversation."""
        return sha256(f"{request}-{index}".encode()).hexdigest()[:9]

    def _calls(self, rest: str) -> Iterator[dict[str, Any]]:
        if rest.lstrip().startswith("["):
            for call in json.loads(rest):
                yield {"name": call["name"], "arguments": call.get("arguments", {})}
            return
        for piece in rest.split(self.marks[0]):
            head, brace, rest = piece.partition("{")
            name = head.partition("[CALL_ID]")[0].strip().removesuffix("[ARGS]").strip()
            if not self._NAME.fullmatch(name):
                raise ValueError(piece)
            yield {"name": name, "arguments": json.loads(brace + rest)}


@TOOL_PARSERS.register("deepseek_v3")
@TOOL_PARSERS.register("deepseek_v31")
class DeepSeek(_Marked):
    """Both of DeepSeek's: V3 and R1 write ``function<sep>name`` and a block of JSON, V3.1 ``name<sep>{...}``."""

    marks = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    )

    def sure(self, text: str) -> str:
        return before(text, self.marks[:1])

    def _calls(self, rest: str) -> Iterator[dict[str, Any]]:
        _, begin, sep, end, _ = self.marks
        found = list(between(rest, begin, end))
        if rest.count(begin) != len(found):
            raise ValueError(rest)
        for head, mark, body in (call.partition(sep) for call in found):
            name, fence, block = body.partition("\n```")
            if fence:
                head, body = name, block.removeprefix("json").strip().removesuffix("```")
            if not mark or not head.strip():
                raise ValueError(rest)
            yield {"name": head.strip(), "arguments": json.loads(body)}


@TOOL_PARSERS.register("pythonic")
class Pythonic(_Marked):
    """The whole reply is ``[name(argument=value), ...]``, as Python writes it: Llama 3.2 and 4, ToolACE."""

    marks = ("<|python_start|>", "<|python_end|>")
    _LONGEST = 2**15  # characters: Python's own parser takes a tenth of a second for them, and holds up everything else

    def sure(self, text: str) -> str:
        return "" if text.lstrip()[:1] in ("[", "<", "") else text.rstrip()

    def read(self, text: str, tools: Tools) -> tuple[str, Functions]:
        bare = text.strip().removeprefix(self.marks[0]).removesuffix(self.marks[1]).strip()
        if not (bare.startswith("[") and bare.endswith("]")) or len(bare) > self._LONGEST:
            return text, []
        try:
            calls = list(self._calls(bare))
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            return text, []
        return ("", calls) if calls else (text, [])

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
