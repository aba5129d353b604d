"""The model's tokenizer.

Invariant: what comes is what ``AutoTokenizer`` would give. Importing that takes seconds, since it knows all models; a
folder whose tokenizer is of no model's own class, but the ``tokenizers`` library's, does without.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, cast, overload


class Tokenizer(Protocol):
    """What the library asks of a tokenizer: a Hugging Face one does, and so does one of your own with these."""

    chat_template: str | None
    clean_up_tokenization_spaces: bool
    eos_token: str | None
    eos_token_id: int

    def __len__(self) -> int: ...
    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Mapping[str, Any]: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, **more: bool) -> str: ...
    @overload
    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
        tokenize: Literal[True] = True, add_generation_prompt: bool = False, return_dict: Literal[False],
    ) -> list[int]: ...  # fmt: skip
    @overload
    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
        tokenize: Literal[False], add_generation_prompt: bool = False,
    ) -> str: ...  # fmt: skip


GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast")  # names of one class


def quick_tokenizer(folder: str) -> Tokenizer:
    """What ``tokenizer.json`` and the chat template make, without the classes of models: for counting tokens."""
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()  # it would say that the model has a class of its own
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder)
    finally:
        logging.set_verbosity(before)


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a folder or of a model on the hub."""
    if _is_generic(Path(path)):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(path)
    from transformers import AutoTokenizer

    return cast(Tokenizer, AutoTokenizer.from_pretrained(path))


def _is_generic(folder: Path) -> bool:
    config = folder / "tokenizer_config.json"
    if not config.is_file() or not (folder / "tokenizer.json").is_file():
        return False
    found = json.loads(config.read_text(encoding="utf-8"))
    return found.get("tokenizer_class") in GENERIC and "auto_map" not in found
