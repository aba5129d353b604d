"""Parsers: what models of different families write as calls of tools, and as thinking.

Invariant: a parser is a function of text alone, and never raises: what is not well-formed is text, for the program to
see. What is ``sure`` of an incomplete text is the beginning of what is read from the complete one.

A parser of your own is ``module:attribute``: for calls a function ``text -> (text, [{"name": ..., "arguments":
{...}}])``, for thinking a function ``text -> (reasoning, text)``, or a class with the methods below. ``vllm:NAME`` is
vLLM's parser of this name, if vLLM is installed. Functions and vLLM's parsers read complete replies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import isclass
from typing import Any, ClassVar, cast

from skyasync.errors import MissingVLLMError, UserError, unknown
from skyasync.registry import Registry
from skyasync.rollout.chat import Tools
from skyasync.rollout.tokenizer import Tokenizer

Functions = list[dict[str, Any]]  # {"name": ..., "arguments": {...}}
VLLM = "vllm:"


class ToolParser:
    """``delimiters``: texts that begin or end a call, which may be special tokens; None keeps all special tokens."""

    delimiters: ClassVar[tuple[str, ...] | None] = None

    def read(self, text: str, tools: Tools) -> tuple[str, Functions]:
        """The text before the calls, and the calls; the text as it is if one of them is not well-formed."""
        raise NotImplementedError

    def sure(self, text: str) -> str:
        """How much of an incomplete text stands before any call."""
        return ""

    def identity(self, request: str, index: int) -> str:
        """An id for a call, in the form that the family's chat template expects."""
        return f"call_{request}-{index}"


class ReasoningParser:
    """``delimiters``: as those of ``ToolParser``."""

    delimiters: ClassVar[tuple[str, ...] | None] = None

    def opens(self, prompt: str) -> bool:
        """Whether the model goes on thinking after a prompt with this end."""
        return False

    def split(self, text: str, *, opened: bool, done: bool) -> tuple[str, str]:
        """The reasoning, and the text after it; of a text that is not ``done``, what is certain."""
        raise NotImplementedError


TOOL_PARSERS = Registry(
    "tool parser",
    {"skyasync.agents.parsers.tools": "hermes qwen llama3_json mistral deepseek_v3 deepseek_v31 pythonic"},
)
REASONING_PARSERS = Registry(
    "reasoning parser", {"skyasync.agents.parsers.reasoning": "think qwen3 deepseek_r1 mistral seed_oss"}
)


def tool_parser(name: str, tokenizer: Tokenizer) -> ToolParser:
    """Raises ``UserError`` if there is none of this name."""
    from skyasync.agents.parsers.tools import FunctionTools, read_with_vllm

    parser = find_parser(TOOL_PARSERS, name)
    if name.startswith(VLLM):
        return FunctionTools(partial(read_with_vllm, parser, tokenizer))
    return cast(ToolParser, parser()) if isclass(parser) else FunctionTools(lambda text, tools: parser(text))


def reasoning_parser(name: str, tokenizer: Tokenizer) -> ReasoningParser | None:
    """None for "". Raises ``UserError`` if there is none of this name, or it cannot be made for this tokenizer."""
    from skyasync.agents.parsers.reasoning import FunctionReasoning, split_with_vllm

    if not name:
        return None
    parser = find_parser(REASONING_PARSERS, name)
    if not name.startswith(VLLM):
        return cast(ReasoningParser, parser()) if isclass(parser) else FunctionReasoning(parser)
    try:
        parser(tokenizer)
    except Exception as error:  # its delimiters are no tokens
        raise UserError(f"generator.reasoning_parser={name}: not with this model's tokenizer: {error}") from error
    return FunctionReasoning(partial(split_with_vllm, parser, tokenizer))


def check_parsers(tools: str, reasoning: str) -> None:
    """Raises ``UserError`` for a name without a parser."""
    for name, registry in ((tools, TOOL_PARSERS), (reasoning, REASONING_PARSERS)):
        if name:
            find_parser(registry, name)


def find_parser(registry: Registry, name: str) -> Callable[..., Any]:
    """The class or function of this name. Importing one of vLLM's takes seconds."""
    if not name.startswith(VLLM):
        part = registry.find(name)
        if not callable(part):
            raise UserError(f"parser {name} is neither a function nor a class")
        return cast(Callable[..., Any], part)
    if find_spec("vllm") is None:
        raise MissingVLLMError(f"parser {name}: vLLM")
    find: Callable[[str], Callable[..., Any]]
    if registry is TOOL_PARSERS:
        manager = import_module("vllm.tool_parsers").ToolParserManager
        find = manager.get_tool_parser
    else:
        manager = import_module("vllm.reasoning").ReasoningParserManager
        find = manager.get_reasoning_parser
    short = name.removeprefix(VLLM)
    if short not in manager.list_registered():
        raise UserError(unknown("parser of vLLM", short, manager.list_registered()))
    return find(short)
