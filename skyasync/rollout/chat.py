"""Conversations to tokens, each message once.

Invariant: tokens that the model wrote are never made again from text. What the environment says is
tokenised alone, in the frame that the chat template gives it after a message of the model.

Some templates show earlier messages of the model differently as a conversation grows: they drop the
thinking parts of all but the last. Then the model reads what the template shows, and a turn whose
context does not extend the previous one is a sequence of its own (``Trajectory.branches``). With
``data.chat_history=sampled`` the model goes on reading what it wrote: an episode is one sequence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar, cast

from jinja2 import TemplateError

from skyasync.arrays import Ints, ints
from skyasync.envs.base import Conversation, TurnTokens
from skyasync.envs.images import read_parts
from skyasync.errors import UserError
from skyasync.inference.interface import SamplingParams
from skyasync.models.images import images_of, reads_images
from skyasync.rollout.tokenizer import Tokenizer

LONG_TEXT_TOKENS = 4096
"""So many tokens take a tokenizer milliseconds: a thread decodes them."""
MAX_CACHED = 8192  # prompts, and as many observations
CACHED_OBSERVATION_TOKENS = 256  # at most: longer observations are rarely those of other episodes

_CHAT: Conversation = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
_THOUGHT: Conversation = [_CHAT[0], {"role": "assistant", "content": "<think>\nz\n</think>\n\ny"}]


T = TypeVar("T")

Tools = Sequence[dict[str, Any]] | None  # in OpenAI's form


class ChatTokenizer:
    """A Hugging Face tokenizer with a chat template. Prompts are cached.

    Args:
        apply_chat_template: false joins the texts of the messages as they are; a prompt then begins
            with the tokens that the tokenizer puts in front of any text (a beginning-of-sequence
            token).
    """

    def __init__(self, tokenizer: Tokenizer, apply_chat_template: bool = True) -> None:
        self.tokenizer = tokenizer
        self._applies_template = apply_chat_template
        self._cache: dict[str, Ints] = {}  # by the conversation as JSON
        self._observations: dict[str, list[int]] = {}  # by the messages as JSON

    def prompt(self, conversation: Conversation | str, tools: Tools = None) -> Ints:
        """The tokens that the model continues: tools, conversation and opening of its message.

        Raises:
            UserError: if there are tools, and the template would not show them to the model.
        """
        # As text, because messages cannot be hashed.
        key = json.dumps([conversation, tools], sort_keys=True, default=repr)
        if key not in self._cache:
            if tools and not (self._applies_template and knows_tools(self.tokenizer)):
                names = ", ".join(tool["function"]["name"] for tool in tools)
                raise UserError(
                    f"the environment has tools ({names}), but the model's chat template shows none: name one that "
                    f"shows tools with data.chat_template"
                )
            tokens = ints(self._frame(cast(Conversation, conversation), tools, generation=True))
            self._remember(self._cache, key, tokens)
        return self._cache[key]

    def response(
        self, conversation: Conversation, message: dict[str, Any], tools: Tools = None
    ) -> Ints:
        """The tokens of a message of the model, after those of ``prompt``.

        Without a template the message ends by eos.

        Raises:
            UserError: if the template shows the conversation differently once the message is there.
        """
        if not self._applies_template:
            text = self.tokenizer.encode(message["content"], add_special_tokens=False)
            return ints([*text, self.tokenizer.eos_token_id])
        prompt_tokens = self.prompt(conversation, tools)
        full_tokens = ints(self._frame([*conversation, message], tools))
        if full_tokens[: len(prompt_tokens)].tolist() == prompt_tokens.tolist():
            return full_tokens[len(prompt_tokens) :]
        # At the border the tokenizer may join characters of both: the texts may agree.
        prompt_text = _decoded(self.tokenizer, prompt_tokens, skip_special_tokens=False)
        full_text = _decoded(self.tokenizer, full_tokens, skip_special_tokens=False)
        if not full_text.startswith(prompt_text):
            raise UserError(
                f"the chat template shows {prompt_text[-40:]!r} before the response, and with the response it does not: "
                f"set data.chat_template"
            )
        return ints(self.tokenizer.encode(full_text[len(prompt_text) :], add_special_tokens=False))

    def observation(self, messages: Conversation | str, action: Ints) -> list[int]:
        """The tokens between the model's message and its next one.

        An action that did not end its message (cut by length) is ended first.

        Raises:
            UserError: if the template does not end a message with the tokenizer's end-of-sequence
                token.
        """
        messages = cast(Conversation, messages)
        if not self._applies_template:
            return self.tokenizer.encode(_joined_text(messages), add_special_tokens=False)
        eos = self.tokenizer.eos_token_id
        # By it the end of the model's message is found in a frame.
        if not self._eos_count:
            raise UserError(
                f"several turns need a chat template that ends each message with the tokenizer's eos_token "
                f"({self.tokenizer.eos_token!r}); set generator.max_turns=1, or the eos_token of the model's folder"
            )
        key = json.dumps(messages, default=repr)
        tokens = self._observations.get(key)
        if tokens is None:
            frame = self._frame(_CHAT + messages, generation=True)
            tokens = tokens_after(frame, eos, self._eos_count)
            # Many episodes read these: that an answer is wrong, the result of a move.
            if len(tokens) <= CACHED_OBSERVATION_TOKENS:
                self._remember(self._observations, key, tokens)
        if len(action) and action[-1] == eos:
            return tokens
        return [eos, *tokens]

    def reframed(self, conversation: Conversation, tools: Tools, extended: Ints) -> Ints | None:
        """The conversation as the template shows it before the next turn.

        None if its text is the text of ``extended``: other tokens for the same text are no reason
        to replace those that were sampled.
        """
        if not self._reframes:
            return None
        tokens = ints(self._frame(conversation, tools, generation=True))
        text = _decoded(self.tokenizer, tokens, skip_special_tokens=False)
        if text == _decoded(self.tokenizer, extended, skip_special_tokens=False):
            return None
        return tokens

    @staticmethod
    def _remember(cache: dict[str, T], key: str, tokens: T) -> None:
        if len(cache) > MAX_CACHED:
            cache.clear()  # which is rare, and costs less than an order of use
        cache[key] = tokens

    @cached_property
    def _eos_count(self) -> int:
        """The number of end-of-sequence tokens up to the end of the model's message in _CHAT."""
        return self._frame(_CHAT, generation=False).count(self.tokenizer.eos_token_id)

    @cached_property
    def _reframes(self) -> bool:
        """Whether a longer conversation may show earlier messages differently."""
        if not self._applies_template:
            return False
        # Templates that drop thinking parts, or empty ones, show one of these differently.
        for conversation in (_CHAT, _THOUGHT):
            shorter = self._frame(conversation, generation=False)
            longer = self._frame([*conversation, _CHAT[0]], generation=False)
            if longer[: len(shorter)] != shorter:
                return True
        return False

    def text(self, tokens: Ints, sampling: SamplingParams | None = None) -> str:
        """The text of a response for its environment, up to the stop string by default."""
        return self.texts([tokens], sampling or SamplingParams())[0]

    def texts(self, responses: Sequence[Ints], sampling: SamplingParams) -> list[str]:
        """``text`` of each response."""
        texts = _all_decoded(
            self.tokenizer, responses, skip_special_tokens=sampling.skip_special_tokens
        )
        if sampling.include_stop_str_in_output:
            return texts
        return [_before_stop_string(text, sampling.stop) for text in texts]

    def seen(self, read: Ints, wrote: Ints) -> TurnTokens:
        """A turn as the engine had it; the texts with all special tokens."""
        prompt_text = _decoded(self.tokenizer, read, skip_special_tokens=False)
        response_text = _decoded(self.tokenizer, wrote, skip_special_tokens=False)
        return TurnTokens(prompt_text, response_text, ints(read).tolist(), ints(wrote).tolist())

    def _frame(
        self, conversation: Conversation, tools: Tools = None, *, generation: bool = False
    ) -> list[int]:
        messages = _plain_messages(conversation)
        if images_of(messages) and not self._applies_template:
            raise UserError("images need a chat template: set data.apply_chat_template=true")
        if not self._applies_template:
            return self.tokenizer.encode(_joined_text(messages))
        try:
            return template_tokens(self.tokenizer, messages, tools, generation=generation)
        except TemplateError as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise UserError(
                f"the chat template does not take messages of the roles {roles} ({error}): change the prompts "
                f"(data.system_prompt, data.prompt_key), or name another template with data.chat_template"
            ) from error


def template_tokens(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: Tools, *, generation: bool
) -> list[int]:
    """The messages as the template shows them, with each image's placeholder as the model reads it.

    Raises:
        UserError: if the model reads text alone, or the template shows more or fewer placeholders
            than images.
    """
    processor = None
    path = tokenizer.name_or_path
    images = images_of(messages)
    if images or reads_images(path):
        from skyasync.models.vision import processor_of

        # Before the template: the template of a text model fails on images, with another error.
        processor = processor_of(path)
    tokens = tokenizer.apply_chat_template(
        messages,
        tools=tools or None,
        tokenize=True,
        add_generation_prompt=generation,
        return_dict=False,
    )
    if processor:
        return processor.expand(tokens, images).tolist()
    return tokens


class PlainText(ChatTokenizer):
    """Tokens for environments with ``raw_text``.

    The template makes the prompt, and all later text is appended unchanged.
    """

    def opening(self, conversation: Conversation) -> str:
        """The text that an environment begins with."""
        messages = _plain_messages(conversation)
        if not self._applies_template:
            return _joined_text(messages)
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )

    def prompt(self, text: Conversation | str, tools: Tools = None) -> Ints:
        # A template's text begins with the special tokens.
        special = not self._applies_template
        return ints(self.tokenizer.encode(cast(str, text), add_special_tokens=special))

    def observation(self, text: Conversation | str, action: Ints) -> list[int]:
        return self.tokenizer.encode(cast(str, text), add_special_tokens=False)

    def reframed(self, conversation: Conversation, tools: Tools, extended: Ints) -> Ints | None:
        return None

    def texts(self, responses: Sequence[Ints], sampling: SamplingParams) -> list[str]:
        """The texts as they were written, with special tokens and stop strings."""
        return _all_decoded(self.tokenizer, responses, skip_special_tokens=False)


def _decoded(tokenizer: Tokenizer, tokens: Ints, *, skip_special_tokens: bool) -> str:
    return _all_decoded(tokenizer, [tokens], skip_special_tokens=skip_special_tokens)[0]


def _all_decoded(
    tokenizer: Tokenizer, responses: Sequence[Ints], *, skip_special_tokens: bool
) -> list[str]:
    """The text of each response."""
    # Imported here, and cached by Python: transformers takes seconds to load.
    from transformers import PreTrainedTokenizerFast

    batch = [ints(tokens).tolist() for tokens in responses]
    decode: Callable[..., str] = tokenizer.decode
    if (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and not tokenizer.clean_up_tokenization_spaces
    ):
        # The same text without the conversions of transformers.
        backend = tokenizer.backend_tokenizer
        if sum(map(len, batch)) >= LONG_TEXT_TOKENS:
            # Only this call lets other threads run; for short texts it costs more than it saves.
            return list(backend.decode_batch(batch, skip_special_tokens=skip_special_tokens))
        decode = backend.decode
    return [decode(tokens, skip_special_tokens=skip_special_tokens) for tokens in batch]


def _before_stop_string(text: str, stop_strings: Sequence[str]) -> str:
    """The text up to the first stop string in it."""
    starts = [text.find(stop) for stop in stop_strings]  # -1 if it is not there
    return text[: min((start for start in starts if start >= 0), default=None)]


def knows_tools(tokenizer: Tokenizer) -> bool:
    """Whether the chat template shows tools to the model."""
    template = tokenizer.chat_template or ""
    if not isinstance(template, str):  # several by name
        template = json.dumps(template)
    return "tools" in template


def tokens_after(tokens: list[int], end: int, count: int) -> list[int]:
    """The tokens after the ``count``-th ``end``.

    Counting holds if the template shows a message differently in a longer conversation (an emptied
    thinking part), so that the tokens before it are others.
    """
    positions = [position for position, token in enumerate(tokens) if token == end]
    return tokens[positions[count - 1] + 1 :]


def _plain_messages(conversation: Conversation) -> list[dict[str, Any]]:
    """Messages whose lists of content parts (OpenAI's) are joined, as templates expect.

    Lists with an image stay lists.

    Raises:
        UserError: for a part that is neither text nor an image that has been read.
    """
    plain = [dict(message) for message in cast(Sequence[Mapping[str, Any]], conversation)]
    for message in plain:
        content = message.get("content")
        if not isinstance(content, list):
            continue
        content = read_parts(content)
        types = set()
        for part in content:
            if isinstance(part, dict):
                types.add(part.get("type", "text"))
            else:
                types.add(type(part).__name__)
        unsupported = sorted(types - {"text", "image"})
        if unsupported:
            raise UserError(
                f"a message's content has parts of type {', '.join(unsupported)}: only parts of "
                f"type text and image are read"
            )
        if "image" not in types:
            content = "".join(part["text"] for part in content)
        message["content"] = content
    return plain


def _joined_text(messages: Conversation) -> str:
    return "".join(message["content"] for message in messages)
