"""The tokens of a reply to its reasoning, its text and its calls of tools.

Invariant: of an incomplete reply only what will not change is read: each part is the beginning of the same part of any
longer reply. Left out are incomplete characters, and what may become a stop string, a delimiter or blanks before one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from skyasync.agents.parsers import ReasoningParser, ToolParser
from skyasync.agents.parsers.tools import before_partial
from skyasync.arrays import Ints
from skyasync.rollout.chat import Tools
from skyasync.rollout.tokenizer import Tokenizer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_PROMPT_END = 32  # tokens of a prompt that are looked at for an open delimiter


class ParsedReply(NamedTuple):
    """``reasoning_tokens``: how many of its tokens are reasoning."""

    reasoning: str
    text: str
    functions: list[dict[str, Any]]
    stopped_by: str | None = None
    reasoning_tokens: int = 0


class ReplyParser:
    """Args: reasoning: None leaves thinking in the text."""

    def __init__(self, tokenizer: Tokenizer, tools: ToolParser, reasoning: ReasoningParser | None = None) -> None:
        self.tokenizer, self.tools, self.reasoning = tokenizer, tools, reasoning
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = set(getattr(tokenizer, "all_special_ids", ())) | {t for t, a in added.items() if a.special}
        last = {tokenizer.eos_token_id, getattr(tokenizer, "pad_token_id", None)}
        #: The special tokens that the parsers read, without and with tools.
        self._delimiters: dict[bool, set[int]] = {False: set(), True: set()}
        for parser, cases in ((reasoning, (False, True)), (tools, (True,))):
            if parser is None:
                continue
            tokens = self._special - last
            if parser.delimiters is not None:
                tokens = {t for t in self._special if tokenizer.decode([t]).strip() in parser.delimiters}
            for with_tools in cases:
                self._delimiters[with_tools] |= tokens

    def opens(self, prompt: Ints) -> bool:
        """Whether the template has begun the model's thinking."""
        if self.reasoning is None:
            return False
        end = prompt[-_PROMPT_END:].tolist()
        return self.reasoning.opens(self.tokenizer.decode(end, clean_up_tokenization_spaces=False))

    def read(
        self, tokens: Ints, stop: Sequence[str], tools: Tools, *, framed: bool, opened: bool, done: bool, several: bool
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
        reasoning, functions = "", list[dict[str, Any]]()
        if self.reasoning is not None:
            reasoning, text = self.reasoning.split(text, opened=opened, done=done)
        if tools and done:
            text, functions = self.tools.read(text, tools)
        elif tools:
            text = self.tools.sure(text)
        reasoning_tokens = 0
        if self.reasoning is not None and done and reasoning:  # with its delimiters
            low, high = 0, len(whole)
            while low < high and (text or functions):  # a binary search: text only grows with tokens
                middle = (low + high) // 2
                part = self._decoded(whole[:middle], True, None)
                ended = bool(self.reasoning.split(part, opened=True, done=True)[1])
                low, high = (low, middle) if ended else (middle + 1, high)
            reasoning_tokens = max(low - 1, 0) if text or functions else len(whole)
        return ParsedReply(reasoning, text, functions if several else functions[:1], stopped_by, reasoning_tokens)

    def _decoded(self, tokens: list[int], framed: bool, tools: Tools) -> str:
        """The text, with those special tokens that are delimiters."""
        delimiters = self._delimiters[bool(tools)] if framed else set[int]()
        if not delimiters:
            return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        shown = [token for token in tokens if token in delimiters or token not in self._special]
        return self.tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False)
