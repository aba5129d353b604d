"""Parsers of thinking before the text, in the formats of the families that write it.

Invariant: a reply is thinking from its beginning or not at all: it begins with the mark, or the template has opened it.
Thinking that never ends is all there is of the reply.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar

from skyasync.agents.parsers import REASONING_PARSERS, ReasoningParser
from skyasync.agents.parsers.tools import before
from skyasync.errors import UserError
from skyasync.rollout.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class _Between(ReasoningParser):
    """Thinking between two marks."""

    marks: ClassVar[tuple[str, str]]

    def opens(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(self.marks[0])

    def split(self, text: str, *, opened: bool, done: bool) -> tuple[str, str]:
        start, end = self.marks
        bare = text.lstrip()
        if not bare.startswith(start):
            if not done and start.startswith(bare):  # it may become the mark
                return "", ""
            if not opened:
                return "", text
        thought, ended, said = bare.removeprefix(start).partition(end)
        if ended:
            return thought.strip(), said.lstrip()
        return (thought.strip() if done else before(thought, (end,)).lstrip()), ""


@REASONING_PARSERS.register("think")
@REASONING_PARSERS.register("qwen3")
@REASONING_PARSERS.register("deepseek_r1")
class Think(_Between):
    """``<think>...</think>``: Qwen 3, DeepSeek R1, and many others."""

    marks: ClassVar[tuple[str, str]] = ("<think>", "</think>")


@REASONING_PARSERS.register("mistral")
class MistralThink(_Between):
    """``[THINK]...[/THINK]``: Magistral."""

    marks: ClassVar[tuple[str, str]] = ("[THINK]", "[/THINK]")


@REASONING_PARSERS.register("seed_oss")
class SeedThink(_Between):
    """``<seed:think>...</seed:think>``: Seed-OSS."""

    marks: ClassVar[tuple[str, str]] = ("<seed:think>", "</seed:think>")


class FunctionReasoning(ReasoningParser):
    """A user's ``text -> (reasoning, text)``; an error leaves the reply as text."""

    def __init__(self, function: Callable[[str], tuple[str | None, str | None]]) -> None:
        self._function = function

    def split(self, text: str, *, opened: bool, done: bool) -> tuple[str, str]:
        if not done:
            return "", ""
        try:
            reasoning, said = self._function(text)
        except Exception as error:
            log.warning("the reasoning parser has failed, and the reply is left as text: %r", error)
            return "", text
        return reasoning or "", said or ""


class VLLMReasoning(FunctionReasoning):
    """One of vLLM's.

    Raises:
        UserError: if it cannot be made for this tokenizer (its marks are no tokens).
    """

    def __init__(self, parser: Callable[..., Any], tokenizer: Tokenizer, name: str) -> None:
        self._parser, self._tokenizer = parser, tokenizer
        try:
            parser(tokenizer)
        except Exception as error:
            raise UserError(f"generator.reasoning_parser={name}: not with this model's tokenizer: {error}") from error
        super().__init__(self._extracted)

    def _extracted(self, text: str) -> tuple[str | None, str | None]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest.model_validate({"messages": [], "model": "policy"})
        found: tuple[str | None, str | None] = self._parser(self._tokenizer).extract_reasoning(text, request)
        return found
