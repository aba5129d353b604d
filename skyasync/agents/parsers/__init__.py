"""Parsers: from the tokens of a reply to its reasoning, its text and its calls of tools.

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
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decodes the first bytes of a longer character
_PROMPT_END = 32  # tokens of a prompt that are searched for an open delimiter


class ToolParser:
    """Reads the calls of tools in a model's own format.

    Attributes:
        delimiters: texts that begin or end a call, which may be special tokens; None keeps all
            special tokens.
    """

    delimiters: ClassVar[tuple[str, ...] | None] = None

    def read(self, text: str, tools: Tools) -> tuple[str, Functions]:
        """The text before the calls, and the calls; all of the text if a call is malformed."""
        raise NotImplementedError

    def sure(self, text: str) -> str:
        """The beginning of an incomplete text that stands before any call."""
        return ""

    def identity(self, request: str, index: int) -> str:
        """An id for a call, in the form that the family's chat template expects."""
        return f"call_{request}-{index}"


class ReasoningParser:
    """Reads the thinking in a model's own format; ``delimiters`` as in ``ToolParser``."""

    delimiters: ClassVar[tuple[str, ...] | None] = None

    def opens(self, prompt: str) -> bool:
        """Whether a prompt with this end has begun the model's thinking."""
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

    def read(text: str, tools: Tools) -> tuple[str, Functions]:
        reply: tuple[str, Functions] = parser(text)  # a user's function has no use for the tools
        return reply

    return FunctionTools(read)


def reasoning_parser(name: str, tokenizer: Tokenizer) -> ReasoningParser | None:
    """The parser of this name; None for "".

    Raises:
        UserError: if there is none of this name, or it cannot be made for this tokenizer.
    """
    from skyasync.agents.parsers.formats import FunctionReasoning, split_with_vllm

    if not name:
        return None
    parser = find_parser(REASONING_PARSERS, name)
    if not name.startswith(VLLM):
        if isclass(parser):
            return cast(ReasoningParser, parser())
        return FunctionReasoning(parser)
    try:
        parser(tokenizer)  # now, so that the run does not begin with a parser that always fails
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
        parser = registry.find(name)
        if not callable(parser):
            raise UserError(f"parser {name} is neither a function nor a class")
        return cast(Callable[..., Any], parser)
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
    """The text before a delimiter, or before an end that may become it, without blanks there."""
    front, present, _ = text.partition(delimiter)
    if not present:
        front = before_partial(text, [delimiter])
    return front.rstrip()


def before_partial(text: str, strings: Sequence[str]) -> str:
    """The text without an end that is the beginning of one of the strings."""
    overlap = 0  # characters
    for string in strings:
        for length in range(overlap + 1, len(string) + 1):
            if text.endswith(string[:length]):
                overlap = length
    return text[: len(text) - overlap]


class ParsedReply(NamedTuple):
    """The components of a reply."""

    reasoning: str
    text: str
    functions: list[dict[str, Any]]
    stopped_by: str | None = None  # the stop string that ended the text
    reasoning_tokens: int = 0  # number of the reply's tokens that are reasoning


class ReplyParser:
    """Reads replies with the parsers of a model's family.

    Args:
        reasoning: None leaves thinking in the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, tools: ToolParser, reasoning: ReasoningParser | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.tools = tools
        self.reasoning = reasoning
        self._special = set(tokenizer.all_special_ids)
        for token, description in tokenizer.added_tokens_decoder.items():
            if description.special:
                self._special.add(token)
        thinking = set[int]()
        if reasoning is not None:
            thinking = self._delimiter_tokens(reasoning)
        #: The special tokens that the parsers read, without and with tools.
        self._delimiters = {False: thinking, True: thinking | self._delimiter_tokens(tools)}

    def _delimiter_tokens(self, parser: ToolParser | ReasoningParser) -> set[int]:
        """The special tokens that a parser must see in the text."""
        if parser.delimiters is None:
            return self._special - {self.tokenizer.eos_token_id, self.tokenizer.pad_token_id}
        tokens = set()
        for token in self._special:
            if self.tokenizer.decode([token]).strip() in parser.delimiters:
                tokens.add(token)
        return tokens

    def opens(self, prompt: Ints) -> bool:
        """Whether the template has begun the model's thinking."""
        if self.reasoning is None:
            return False
        end = prompt[-_PROMPT_END:].tolist()
        text = self.tokenizer.decode(end, clean_up_tokenization_spaces=False)
        return self.reasoning.opens(text)

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
        """A reply, or what is certain of it.

        Args:
            tokens: of the reply, ``[length]``.
            stop: the text ends before the first of these.
            framed: it is a message, not the continuation of a text.
            opened: the result of ``opens`` for its prompt.
            done: the reply is complete.
            several: all of its calls count, not only the first.
        """
        ids = tokens.tolist()
        text = self._decoded(ids, framed, tools)
        stopped_by = min((s for s in stop if s in text), key=text.index, default=None)
        if stopped_by is not None:
            text = text[: text.index(stopped_by)]
        elif not done:
            text = before_partial(text.rstrip(_INCOMPLETE), stop)
        if not framed:
            return ParsedReply(
                "",
                text,
                [],
                stopped_by,
            )
        reasoning = ""
        functions = list[dict[str, Any]]()
        # The thinking is split off first: calls that it mentions are not made.
        if self.reasoning is not None:
            reasoning, text = self.reasoning.split(text, opened=opened, done=done)
        if tools and done:
            front, functions = self.tools.read(text, tools)
            try:
                functions = as_sent(functions)
                text = front
            except ValueError:  # no JSON: the program sees it as text
                functions = []
        elif tools:
            text = self.tools.sure(text)
        reasoning_tokens = 0
        if done and reasoning:
            reasoning_tokens = len(ids)
            if text or functions:
                reasoning_tokens = self._reasoning_tokens(ids)
        if not several:
            functions = functions[:1]
        return ParsedReply(
            reasoning,
            text,
            functions=functions,
            stopped_by=stopped_by,
            reasoning_tokens=reasoning_tokens,
        )

    def _reasoning_tokens(self, ids: list[int]) -> int:
        """Number of tokens before the text that follows the thinking, with its delimiters.

        A binary search for the shortest prefix that has such a text: it only grows with tokens.
        """
        assert self.reasoning is not None
        low = 0
        high = len(ids)
        while low < high:
            middle = (low + high) // 2
            prefix = self._decoded(ids[:middle], True, None)
            _, text = self.reasoning.split(prefix, opened=True, done=True)
            if text:
                high = middle
            else:
                low = middle + 1
        return max(low - 1, 0)

    def _decoded(self, ids: list[int], framed: bool, tools: Tools) -> str:
        """The text, with the special tokens that are delimiters."""
        delimiters = set[int]()
        if framed:
            delimiters = self._delimiters[bool(tools)]
        if delimiters:
            ids = [token for token in ids if token in delimiters or token not in self._special]
        return self.tokenizer.decode(
            ids, skip_special_tokens=not delimiters, clean_up_tokenization_spaces=False
        )
