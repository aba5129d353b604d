"""Conversations to tokens, each message once.

Invariant: tokens that the model wrote are never made again from text. What the environment says is
tokenised on its own, framed by the chat template as it would be after an assistant's message.

Some templates frame the model's earlier messages anew as a conversation grows: they drop the thinking parts of
all but the last. Then the model reads what the template shows, and a turn whose context does not extend the one before
is a sequence of its own (``Trajectory.branches``). With ``data.chat_history=sampled`` the model goes on reading what it
wrote: an episode is one sequence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, cast

from skyasync.arrays import Ints, ints
from skyasync.envs.base import Conversation, Seen
from skyasync.envs.images import NO_IMAGES, image_part
from skyasync.errors import UserError
from skyasync.inference.interface import SamplingParams
from skyasync.rollout.tokenizer import Tokenizer

LONG = 4096
"""Tokens whose text takes a tokenizer milliseconds: a thread makes it, so that the event loop goes on."""

_BEFORE: Conversation = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
_THOUGHT: Conversation = [_BEFORE[0], {"role": "assistant", "content": "<think>\nz\n</think>\n\ny"}]


Tools = Sequence[dict[str, Any]] | None  # in OpenAI's form


class _Frame:
    """What both ways of framing have."""

    tokenizer: Tokenizer

    def seen(self, read: Ints, wrote: Ints) -> Seen:
        """A turn as the engine had it; the texts with all their special tokens."""
        before, behind = (_decoded(self.tokenizer, tokens, skip_special_tokens=False) for tokens in (read, wrote))
        return Seen(before, behind, ints(read).tolist(), ints(wrote).tolist())


class ChatTokenizer(_Frame):
    """A Hugging Face tokenizer with a chat template, remembering what it has framed.

    Args:
        apply_chat_template: false takes the messages' texts as they are, one behind the other; a prompt then begins
            with the tokens that the tokenizer puts in front of any text (a beginning-of-sequence token).
    """

    def __init__(self, tokenizer: Tokenizer, apply_chat_template: bool = True) -> None:
        self.tokenizer = tokenizer
        self._framed = apply_chat_template
        self._cache: dict[str, Ints] = {}  # by the conversation as JSON
        self._ends: int | None = None  # end-of-message tokens up to the end of the model's message in _BEFORE

    def prompt(self, conversation: Conversation | str, tools: Tools = None) -> Ints:
        """The tokens that the model continues: the tools, the conversation and the opening of its own message.

        Raises:
            UserError: if there are tools, of which the template would not tell the model.
        """
        key = json.dumps([conversation, tools], sort_keys=True, default=repr)
        if key not in self._cache:
            if len(self._cache) > 8192:
                self._cache.clear()
            if tools and not (self._framed and knows_tools(self.tokenizer)):
                names = ", ".join(tool["function"]["name"] for tool in tools)
                raise UserError(f"the environment has tools ({names}), but the model's chat template shows none")
            self._cache[key] = ints(self._frame(cast(Conversation, conversation), tools, generation=True))
        return self._cache[key]

    def observation(self, messages: Conversation | str, action: Ints) -> list[int]:
        """The tokens between the model's message and its next one.

        An action that did not end its message (cut by length) is ended first.

        Raises:
            UserError: if the template does not end a message with the tokenizer's end-of-sequence token.
        """
        messages = cast(Conversation, messages)
        if not self._framed:
            return self.tokenizer.encode(_joined(messages), add_special_tokens=False)
        eos = self.tokenizer.eos_token_id
        if self._ends is None:
            self._ends = self._frame(_BEFORE, generation=False).count(eos)
            if not self._ends:
                raise UserError(
                    f"several turns need a chat template that ends each message with the tokenizer's eos_token "
                    f"({self.tokenizer.eos_token!r}); set generator.max_turns=1, or the eos_token of the model's folder"
                )
        tail = _behind(self._frame(_BEFORE + messages, generation=True), eos, self._ends)
        ended = len(action) > 0 and action[-1] == eos
        return tail if ended else [eos, *tail]

    def anew(self, conversation: Conversation, tools: Tools, extended: Ints) -> Ints | None:
        """The conversation as the template shows it before the next turn; None where that is what ``extended`` says.

        Texts are compared: other tokens for the same text are no reason to leave those that were sampled.
        """
        if not self._reframes:
            return None
        tokens = ints(self._frame(conversation, tools, generation=True))
        same = _decoded(self.tokenizer, tokens, skip_special_tokens=False) == _decoded(
            self.tokenizer, extended, skip_special_tokens=False
        )
        return None if same else tokens

    @cached_property
    def _reframes(self) -> bool:
        """Whether a longer conversation may show earlier messages differently."""
        return self._framed and not all(self._keeps(conversation) for conversation in (_BEFORE, _THOUGHT))

    def text(self, tokens: Ints, sampling: SamplingParams | None = None) -> str:
        """What an environment reads of a response: up to its stop string, if that is not to be included."""
        sampling = sampling or SamplingParams()
        text = _decoded(self.tokenizer, tokens, skip_special_tokens=sampling.skip_special_tokens)
        if sampling.include_stop_str_in_output:
            return text
        return text[: min((found for s in sampling.stop if (found := text.find(s)) >= 0), default=None)]

    def _keeps(self, conversation: Conversation) -> bool:
        """Whether a further message leaves the tokens of this conversation as they are."""
        shorter = self._frame(conversation, generation=False)
        longer = self._frame([*conversation, {"role": "user", "content": "x"}], generation=False)
        return longer[: len(shorter)] == shorter

    def _frame(self, conversation: Conversation, tools: Tools = None, *, generation: bool) -> list[int]:
        messages = [{**message, **_text_of(message)} for message in conversation]
        if not self._framed:
            return self.tokenizer.encode(_joined(messages))
        return self.tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            tokenize=True,
            add_generation_prompt=generation,
            return_dict=False,
        )


class PlainText(_Frame):
    """For environments with ``raw_text``: the template makes the prompt, then text follows text, as it is.

    Args:
        apply_chat_template: false makes the prompt of the messages' texts alone.
    """

    def __init__(self, tokenizer: Tokenizer, apply_chat_template: bool = True) -> None:
        self.tokenizer = tokenizer
        self._framed = apply_chat_template

    def opening(self, conversation: Conversation) -> str:
        """What an environment is given to begin with."""
        messages = [{**message, **_text_of(message)} for message in conversation]
        if not self._framed:
            return _joined(messages)
        text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text

    def prompt(self, text: Conversation | str, tools: Tools = None) -> Ints:
        return ints(self.tokenizer.encode(cast(str, text), add_special_tokens=not self._framed))

    def observation(self, text: Conversation | str, action: Ints) -> list[int]:
        tokens: list[int] = self.tokenizer.encode(cast(str, text), add_special_tokens=False)
        return tokens

    def anew(self, conversation: Conversation, tools: Tools, extended: Ints) -> Ints | None:
        """Text follows text."""
        return None

    def text(self, tokens: Ints, sampling: SamplingParams | None = None) -> str:
        """Special tokens and stop strings included: what is read is exactly what was written."""
        return _decoded(self.tokenizer, tokens, skip_special_tokens=False)


def _decoded(tokenizer: Tokenizer, tokens: Ints, *, skip_special_tokens: bool) -> str:
    """The tokens' text. Long ones go through the backend's call for several, which alone lets other threads run."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if len(tokens) < LONG or backend is None or tokenizer.clean_up_tokenization_spaces:
        text: str = tokenizer.decode(ints(tokens).tolist(), skip_special_tokens=skip_special_tokens)
        return text
    (text,) = backend.decode_batch([ints(tokens).tolist()], skip_special_tokens=skip_special_tokens)
    return text


def knows_tools(tokenizer: Tokenizer) -> bool:
    """Whether the chat template shows tools to the model."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "tools" in (template if isinstance(template, str) else json.dumps(template))


def _text_of(message: Mapping[str, Any]) -> dict[str, str]:
    """OpenAI's list of content parts as the text they make together, which is what templates expect.

    Raises:
        UserError: for a part that is not text.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return {}
    kinds = [part.get("type", "text") if isinstance(part, dict) else type(part).__name__ for part in content]
    if pictures := sorted({kind for part in content if (kind := image_part(part))}):
        raise UserError(f"a message's content has parts of type {', '.join(pictures)}: {NO_IMAGES}")
    if other := sorted({kind for kind in kinds if kind != "text"}):
        raise UserError(f"a message's content has parts of type {', '.join(other)}: only parts of type text are read")
    return {"content": "".join(part["text"] for part in content)}


def _joined(messages: Conversation) -> str:
    return "".join(message["content"] for message in messages)


def _behind(tokens: list[int], end: int, count: int) -> list[int]:
    """What follows the ``count``-th ``end``. Counting holds where a template frames a message anew in a longer
    conversation (an emptied thinking part), so that what is in front of it differs."""
    places = [t for t, token in enumerate(tokens) if token == end]
    return tokens[places[count - 1] + 1 :]
