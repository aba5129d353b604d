"""The model's tokenizer, as ``AutoTokenizer`` would load it.

Importing ``AutoTokenizer`` takes seconds, since it knows all models. A folder whose tokenizer has
no class of its own, but that of the ``tokenizers`` library, is loaded without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, cast, overload

from skyasync.errors import UserError, unknown

# Two names of one class: transformers 5 and earlier.
GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast")

Messages = Sequence[Mapping[str, Any]]


class Tokenizer(Protocol):
    """The interface of a tokenizer, which Hugging Face's have and a user's needs."""

    added_tokens_decoder: Mapping[int, Any]
    all_special_ids: Sequence[int]
    chat_template: str | None
    clean_up_tokenization_spaces: bool
    eos_token: str | None
    eos_token_id: int
    name_or_path: str
    pad_token_id: int | None

    def __len__(self) -> int: ...
    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Mapping[str, Any]: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, **more: bool
    ) -> str: ...
    def get_vocab(self) -> Mapping[str, int]: ...
    @overload
    def apply_chat_template(
        self,
        conversation: Messages,
        *,
        tools: Messages | None = None,
        tokenize: Literal[True] = True,
        add_generation_prompt: bool = False,
        return_dict: Literal[False],
    ) -> list[int]: ...
    @overload
    def apply_chat_template(
        self,
        conversation: Messages,
        *,
        tools: Messages | None = None,
        tokenize: Literal[False],
        add_generation_prompt: bool = False,
    ) -> str: ...


def with_template(tokenizer: Tokenizer, template: str, kwargs: Mapping[str, Any]) -> Tokenizer:
    """The same tokenizer, which from here on uses ``data.chat_template`` and its arguments.

    Args:
        template: a file's path or Jinja text; empty leaves the tokenizer's own.

    Raises:
        UserError: for an argument that the template does not read.
    """
    if template:
        tokenizer.chat_template = template_text(template)
    if kwargs:
        variables = _template_variables(tokenizer.chat_template)
        for name in kwargs:
            if variables is not None and name not in variables:
                # transformers sets these itself
                settable = variables - {"messages", "tools", "add_generation_prompt"}
                raise UserError(
                    f"data.chat_template_kwargs.{name}: the chat template reads no such variable; "
                    f"{unknown('variable', name, settable)}"
                )
        instance: Any = tokenizer  # the method of this one object
        instance.apply_chat_template = partial(tokenizer.apply_chat_template, **kwargs)
    return tokenizer


def template_text(template: str) -> str:
    """Jinja text unchanged, or the content of the file.

    Raises:
        UserError: if it is neither.
    """
    if "{" in template:
        return template
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"data.chat_template={template} is neither a file nor Jinja text: {error.strerror}"
        ) from error


def _template_variables(template: object) -> set[str] | None:
    """The variables that a template reads; None if it cannot be parsed here."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.meta import find_undeclared_variables
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=[loopcontrols])
    try:
        parsed = environment.parse(template if isinstance(template, str) else "")
        return find_undeclared_variables(parsed)
    except TemplateError:  # transformers' own extensions
        return None


def quick_tokenizer(folder: str) -> Tokenizer:
    """A tokenizer for counting tokens, from ``tokenizer.json``, without the classes of models."""
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it would say that the model has a class of its own
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder)
    finally:
        logging.set_verbosity(verbosity)


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a folder or of a model on the hub."""
    config = Path(path) / "tokenizer_config.json"
    if config.is_file() and (Path(path) / "tokenizer.json").is_file():
        settings = json.loads(config.read_text(encoding="utf-8"))
        if settings.get("tokenizer_class") in GENERIC and "auto_map" not in settings:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path)
    from transformers import AutoTokenizer

    return cast(Tokenizer, AutoTokenizer.from_pretrained(path))
