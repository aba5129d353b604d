"""Parsers of thinking before the text, in the formats of the families that write it.

Invariant: a reply is thinking from its beginning or not at all: it begins with the first delimiter, or the template has
opened it. Thinking that never ends is all there is of the reply.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from skyasync.agents.parsers import REASONING_PARSERS, ReasoningParser
from skyasync.agents.parsers.tools import before
from skyasync.rollout.tokenizer import Tokenizer

log = logging.getLogger(__name__)


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

    delimiters: ClassVar[tuple[str, str]] = ("<think>", "</think>")


@REASONING_PARSERS.register("mistral")
class MistralThink(_Between):
    """``[THINK]...[/THINK]``: Magistral."""

    delimiters: ClassVar[tuple[str, str]] = ("[THINK]", "[/THINK]")


@REASONING_PARSERS.register("seed_oss")
class SeedThink(_Between):
    """``<seed:think>...</seed:think>``: Seed-OSS."""

    delimiters: ClassVar[tuple[str, str]] = ("<seed:think>", "</seed:think>")


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


def split_with_vllm(parser: Callable[..., Any], tokenizer: Tokenizer, text: str) -> tuple[str | None, str | None]:
    """The reasoning and the text by one of vLLM's parsers."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    request = ChatCompletionRequest.model_validate({"messages": [], "model": "policy"})
    split: tuple[str | None, str | None] = parser(tokenizer).extract_reasoning(text, request)
    return split
