"""What models of different families make of a call of a tool, and of thinking, as text.

Invariant: a parser is a pure function of text, and never raises: what is not well-formed is text, for the program to
see. What is ``sure`` of a text that is not complete is the beginning of what will be said of the whole.

A parser of one's own is ``module:attribute``: for calls a function ``text -> (text, [{"name": ..., "arguments":
{...}}])``, for thinking a function ``text -> (reasoning, text)``, or a class with the methods below. ``vllm:NAME`` is
vLLM's parser of this name, where vLLM is installed. These are read when the reply is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from inspect import isclass
from typing import Any, Protocol, cast

from skyasync.errors import MissingVLLMError, UserError, unknown
from skyasync.registry import Registry
from skyasync.rollout.chat import Tools
from skyasync.rollout.tokenizer import Tokenizer

Functions = list[dict[str, Any]]  # {"name": ..., "arguments": {...}}
VLLM = "vllm:"


class ToolParser(Protocol):
    """Attributes: marks: texts by which it knows a call, which may be special tokens; None keeps all of these."""

    marks: tuple[str, ...] | None

    def read(self, text: str, tools: Tools) -> tuple[str, Functions]:
        """The text in front of the calls, and the calls; the text as it is where one of them is not well-formed."""

    def sure(self, text: str) -> str:
        """How much of a text that goes on is in front of any call."""

    def identity(self, request: str, index: int) -> str:
        """A name for a call, in the form that the family's chat template wants."""


class ReasoningParser(Protocol):
    marks: tuple[str, ...] | None

    def opens(self, prompt: str) -> bool:
        """Whether a prompt that ends so leaves the model thinking."""

    def split(self, text: str, *, opened: bool, done: bool) -> tuple[str, str]:
        """The reasoning, and the text behind it; of a text that is not ``done``, what is sure."""


TOOL_PARSERS = Registry(
    "tool parser",
    {"skyasync.endpoint.parsers.tools": "hermes qwen llama3_json mistral deepseek_v3 deepseek_v31 pythonic"},
)
REASONING_PARSERS = Registry(
    "reasoning parser", {"skyasync.endpoint.parsers.reasoning": "think qwen3 deepseek_r1 mistral seed_oss"}
)


def tool_parser(name: str, tokenizer: Tokenizer) -> ToolParser:
    """Raises ``UserError`` if there is none of this name."""
    from skyasync.endpoint.parsers.others import FunctionTools, VLLMTools

    if name.startswith(VLLM):
        return VLLMTools(_of_vllm(name, "tool_parsers", "ToolParserManager"), tokenizer)
    found: Any = TOOL_PARSERS.find(name)
    return cast(ToolParser, found()) if isclass(found) else FunctionTools(_callable(found, name))


def reasoning_parser(name: str, tokenizer: Tokenizer) -> ReasoningParser | None:
    """None for "". Raises ``UserError`` if there is none of this name."""
    from skyasync.endpoint.parsers.others import FunctionReasoning, VLLMReasoning

    if not name:
        return None
    if name.startswith(VLLM):
        return VLLMReasoning(_of_vllm(name, "reasoning", "ReasoningParserManager"), tokenizer, name)
    found: Any = REASONING_PARSERS.find(name)
    return cast(ReasoningParser, found()) if isclass(found) else FunctionReasoning(_callable(found, name))


def check_parsers(tools: str, reasoning: str) -> None:
    """Raises ``UserError`` for a name behind which there is no parser."""
    for name, registry in ((tools, TOOL_PARSERS), (reasoning, REASONING_PARSERS)):
        if name.startswith(VLLM):
            tool = registry is TOOL_PARSERS
            _of_vllm(
                name, *(("tool_parsers", "ToolParserManager") if tool else ("reasoning", "ReasoningParserManager"))
            )
        elif name:
            found = registry.find(name)
            if not isclass(found):
                _callable(found, name)


def _callable(found: object, name: str) -> Callable[..., Any]:
    if not callable(found):
        raise UserError(f"parser {name} is neither a function nor a class")
    return found


def _of_vllm(name: str, module: str, manager: str) -> Callable[..., Any]:
    """vLLM's class of this name; importing it takes seconds."""
    if find_spec("vllm") is None:
        raise MissingVLLMError(f"parser {name}: vLLM")
    from importlib import import_module

    parsers = getattr(import_module(f"vllm.{module}"), manager)
    short = name.removeprefix(VLLM)
    if short not in parsers.list_registered():
        raise UserError(unknown("parser of vLLM", short, parsers.list_registered()))
    find = getattr(parsers, "get_tool_parser", None) or parsers.get_reasoning_parser
    found: Callable[..., Any] = find(short)
    return found
