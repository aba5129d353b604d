"""The tokens of a reply to its reasoning, its text and its calls of tools.

Invariant: of an incomplete reply only what will not change is read: each part is the beginning of the same part of any
longer reply. Left out are incomplete characters, and what may become a stop string, a mark or the blanks before a mark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from skyasync.agents.parsers import ReasoningParser, ToolParser
from skyasync.agents.parsers.tools import before_partial
from skyasync.arrays import Ints
from skyasync.rollout.chat import Tools
from skyasync.rollout.tokenizer import Tokenizer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_PROMPT_END = 32  # tokens of a prompt that are looked at for an open mark


class ParsedReply(NamedTuple):
    """``reasoning_tokens``: how many of its tokens are reasoning."""

    reasoning: str
    text: str
    functions: list[dict[str, Any]]
    stopped_by: str | None = None
    reasoning_tokens: int = 0


@dataclass
class ReplyParser:
    """Args: reasoning: None leaves thinking in the text."""

    tokenizer: Tokenizer
    tools: ToolParser
    reasoning: ReasoningParser | None = None
    _kept: dict[bool, frozenset[int]] = field(default_factory=dict)

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
        reasoning, said, functions = "", text, list[dict[str, Any]]()
        if self.reasoning is not None:
            reasoning, said = self.reasoning.split(text, opened=opened, done=done)
        if tools and done:
            said, functions = self.tools.read(said, tools)
        elif tools:
            said = self.tools.sure(said)
        count = self._reasoning_tokens(whole, reasoning, said, functions) if done and reasoning else 0
        return ParsedReply(reasoning, said, functions if several else functions[:1], stopped_by, count)

    def _decoded(self, tokens: list[int], framed: bool, tools: Tools) -> str:
        """The text, with those special tokens that are marks."""
        kept = self._marks(bool(tools)) if framed else frozenset[int]()
        if not kept:
            return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        shown = [token for token in tokens if token in kept or token not in self._special]
        return self.tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    @cached_property
    def _special(self) -> frozenset[int]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return frozenset(getattr(self.tokenizer, "all_special_ids", ())) | {t for t, a in added.items() if a.special}

    def _marks(self, tools: bool) -> frozenset[int]:
        """The special tokens that the parsers read."""
        if tools not in self._kept:
            found = set[int]()
            ends = {self.tokenizer.eos_token_id, getattr(self.tokenizer, "pad_token_id", None)}
            for parser in (self.tools if tools else None, self.reasoning):
                if parser is not None and parser.marks is None:
                    found |= self._special - ends
                elif parser is not None:
                    marks = parser.marks or ()
                    found |= {t for t in self._special if self.tokenizer.decode([t]).strip() in marks}
            self._kept[tools] = frozenset(found)
        return self._kept[tools]

    def _reasoning_tokens(self, tokens: list[int], reasoning: str, said: str, functions: list[dict[str, Any]]) -> int:
        """The tokens of the reasoning with its marks, by binary search: text only grows with tokens."""
        if not said and not functions:
            return len(tokens)
        low, high = 0, len(tokens)
        while low < high:
            middle = (low + high) // 2
            text = self._decoded(tokens[:middle], True, None)
            ended = self.reasoning is not None and bool(self.reasoning.split(text, opened=True, done=True)[1])
            low, high = (low, middle) if ended else (middle + 1, high)
        return max(low - 1, 0)
