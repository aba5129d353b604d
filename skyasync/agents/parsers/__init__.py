"""From the tokens of a reply to its reasoning, its text and its calls of tools, in the form of the
model's family.

Invariant: a parser is a function of text alone, and never raises: what is not well-formed is text,
for the program to see. Of an incomplete reply only what will not change is read: each part is the
beginning of the same part of any longer reply. Left out are incomplete characters, and what may
become a stop string, a delimiter or blanks before one.

A parser of your own is ``module:attribute``: for calls a function
``text -> (text, [{"name": ..., "arguments": {...}}])``, for thinking a function
``text -> (reasoning, text)``, or a class with the methods below. ``vllm:NAME`` is vLLM's parser of
this name, if vLLM is installed. Functions and vLLM's parsers read complete replies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import isclass
from typing import Any, ClassVar, NamedTuple, cast

from skyasync.arrays import Ints
from skyasync.envs.tools import as_sent
from skyasync.errors import MissingVLLMError, UserError, unknown
from skyasync.registry import Registry
from skyasync.rollout.chat import Tools
from skyasync.rollout.tokenizer import Tokenizer

Functions = list[dict[str, Any]]  # {"name": ..., "arguments": {...}}
VLLM = "vllm:"
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_PROMPT_END = 32  # tokens of a prompt that are searched for an open delimiter


class ToolParser:
    """``delimiters``: texts that begin or end a call, which may be special tokens; None keeps all
    special tokens."""

    delimiters: ClassVar[tuple[str, ...] | None] = None

    def read(self, text: str, tools: Tools) -> tuple[str, Functions]:
        """The text before the calls, and the calls; the text as it is if one of them is not
        well-formed."""
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


_FORMATS = "skyasync.agents.parsers.formats"
TOOL_PARSERS = Registry(
    "tool parser", {_FORMATS: "hermes qwen llama3_json mistral deepseek_v3 deepseek_v31 pythonic"}
)
REASONING_PARSERS = Registry(
    "reasoning parser", {_FORMATS: "think qwen3 deepseek_r1 mistral seed_oss"}
)


def tool_parser(name: str, tokenizer: Tokenizer) -> ToolParser:
    """Raises ``UserError`` if there is none of this name."""
    from skyasync.agents.parsers.formats import FunctionTools, read_with_vllm

    parser = find_parser(TOOL_PARSERS, name)
    if name.startswith(VLLM):
        return FunctionTools(partial(read_with_vllm, parser, tokenizer))
    if isclass(parser):
        return cast(ToolParser, parser())
    return FunctionTools(lambda text, tools: parser(text))


def reasoning_parser(name: str, tokenizer: Tokenizer) -> ReasoningParser | None:
    """None for "". Raises ``UserError`` if there is none of this name, or it cannot be made for
    this tokenizer."""
    from skyasync.agents.parsers.formats import FunctionReasoning, split_with_vllm

    if not name:
        return None
    parser = find_parser(REASONING_PARSERS, name)
    if not name.startswith(VLLM):
        if isclass(parser):
            return cast(ReasoningParser, parser())
        return FunctionReasoning(parser)
    try:
        parser(tokenizer)
    except Exception as error:  # its delimiters are no tokens
        raise UserError(
            f"generator.reasoning_parser={name}: not with this model's tokenizer: {error}"
        ) from error
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


# ---------------------------------------------------------------- replies


def before(text: str, delimiter: str) -> str:
    """What stands before the delimiter, or before what may become it; without the blanks before
    it."""
    front, present, _ = text.partition(delimiter)
    return (front if present else before_partial(text, [delimiter])).rstrip()


def before_partial(text: str, strings: Sequence[str]) -> str:
    """The text without an end that is the beginning of one of the strings."""
    overlaps = [
        n for string in strings for n in range(1, len(string) + 1) if text.endswith(string[:n])
    ]
    return text[: len(text) - max(overlaps, default=0)]


class ParsedReply(NamedTuple):
    """``reasoning_tokens``: how many of its tokens are reasoning."""

    reasoning: str
    text: str
    functions: list[dict[str, Any]]
    stopped_by: str | None = None
    reasoning_tokens: int = 0


class ReplyParser:
    """Args: reasoning: None leaves thinking in the text."""

    def __init__(
        self, tokenizer: Tokenizer, tools: ToolParser, reasoning: ReasoningParser | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.tools = tools
        self.reasoning = reasoning
        added = tokenizer.added_tokens_decoder.items()
        self._special = {
            *tokenizer.all_special_ids,
            *(token for token, about in added if about.special),
        }
        last = {tokenizer.eos_token_id, tokenizer.pad_token_id}
        #: The special tokens that the parsers read, without and with tools.
        self._delimiters: dict[bool, set[int]] = {False: set(), True: set()}
        for parser, cases in ((reasoning, (False, True)), (tools, (True,))):
            if parser is None:
                continue
            tokens = self._special - last
            if parser.delimiters is not None:
                tokens = {
                    t for t in self._special if tokenizer.decode([t]).strip() in parser.delimiters
                }
            for with_tools in cases:
                self._delimiters[with_tools] |= tokens

    def opens(self, prompt: Ints) -> bool:
        """Whether the template has begun the model's thinking."""
        if self.reasoning is None:
            return False
        end = prompt[-_PROMPT_END:].tolist()
        return self.reasoning.opens(self.tokenizer.decode(end, clean_up_tokenization_spaces=False))

    def read(
        self,
        tokens: Ints,
        stop: Sequence[str],
        tools: Tools,
        *,
        framed: bool,
        opened: bool,
        done: bool,
        several: bool,
    ) -> ParsedReply:
        """A reply, or what is sure of it.

        Args:
            stop: the text ends before the first of these.
            framed: it is a message, not the continuation of a text.
            opened: the result of ``opens`` for its prompt.
            done: the reply is complete.
            several: all of its calls count, not only the first.
        """
        whole = tokens.tolist()
        text = self._decoded(whole, framed, tools)
        stopped_by = min((s for s in stop if s in text), key=text.index, default=None)
        if stopped_by is not None:
            text = text[: text.index(stopped_by)]
        elif not done:
            text = before_partial(text.rstrip(_INCOMPLETE), stop)
        if not framed:
            return ParsedReply("", text, [], stopped_by)
        reasoning = ""
        functions = list[dict[str, Any]]()
        if self.reasoning is not None:
            reasoning, text = self.reasoning.split(text, opened=opened, done=done)
        if tools and done:
            front, functions = self.tools.read(text, tools)
            try:
                functions = as_sent(functions)
                text = front
            except ValueError:
                functions = []
        elif tools:
            text = self.tools.sure(text)
        reasoning_tokens = 0
        if self.reasoning is not None and done and reasoning:  # with its delimiters
            low = 0
            high = len(whole)
            while low < high and (
                text or functions
            ):  # a binary search: text only grows with tokens
                middle = (low + high) // 2
                part = self._decoded(whole[:middle], True, None)
                ended = bool(self.reasoning.split(part, opened=True, done=True)[1])
                low, high = (low, middle) if ended else (middle + 1, high)
            if text or functions:
                reasoning_tokens = max(low - 1, 0)
            else:
                reasoning_tokens = len(whole)
        return ParsedReply(
            reasoning, text, functions if several else functions[:1], stopped_by, reasoning_tokens
        )

    def _decoded(self, tokens: list[int], framed: bool, tools: Tools) -> str:
        """The text, with those special tokens that are delimiters."""
        if framed:
            delimiters = self._delimiters[bool(tools)]
        else:
            delimiters = set[int]()
        if not delimiters:
            return self.tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        shown = [token for token in tokens if token in delimiters or token not in self._special]
        return self.tokenizer.decode(
            shown, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
