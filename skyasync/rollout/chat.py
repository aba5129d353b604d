"""Conversations to tokens, each message once.

Invariant: tokens that the model wrote are never made again from text. What the environment says is
tokenised on its own, framed by the chat template as it would be after an assistant's message.
"""

from __future__ import annotations

from typing import Any

from skyasync.envs.base import Conversation

_BEFORE: Conversation = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]


class ChatTokenizer:
    """A Hugging Face tokenizer with a chat template, remembering what it has framed."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._cache: dict[tuple[tuple[str, str], ...], list[int]] = {}
        self._base: list[int] | None = None

    def prompt(self, conversation: Conversation) -> list[int]:
        """The tokens that the model continues: the conversation and the opening of its own message."""
        key = tuple((message["role"], message["content"]) for message in conversation)
        if key not in self._cache:
            if len(self._cache) > 8192:
                self._cache.clear()
            self._cache[key] = self._frame(conversation, generation=True)
        return self._cache[key]

    def observation(self, messages: Conversation, action: list[int]) -> list[int]:
        """The tokens between the model's message and its next one.

        An action that did not end its message (cut by length) is ended first.
        """
        if self._base is None:
            self._base = self._frame(_BEFORE, generation=False)
        framed = self._frame(_BEFORE + messages, generation=True)
        end = _end_of_message(self._base, self.tokenizer.eos_token_id)
        tail = framed[end:] if framed[: len(self._base)] == self._base else framed
        ended = bool(action) and action[-1] == self.tokenizer.eos_token_id
        return tail if ended else [self.tokenizer.eos_token_id, *tail]

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def _frame(self, conversation: Conversation, *, generation: bool) -> list[int]:
        return self.tokenizer.apply_chat_template(
            conversation, tokenize=True, add_generation_prompt=generation, return_dict=False
        )


def _end_of_message(base: list[int], eos: int) -> int:
    """Just behind the end-of-message token that closes the last assistant message, or the end."""
    return len(base) - base[::-1].index(eos) if eos in base else len(base)
