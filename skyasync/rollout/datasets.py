"""Rows from files or functions to prompts.

A row has a ``prompt`` (a conversation, or one string for the user's message), perhaps an ``env_class``, and
whatever else the environment wants to know. Invariant: rows are never dropped silently.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from skyasync.errors import UserError
from skyasync.registry import resolve_reference
from skyasync.rollout.chat import ChatTokenizer
from skyasync.rollout.types import Prompt, PromptId

log = logging.getLogger(__name__)


def load_prompts(sources: Sequence[str], default_env: str, tokenizer: Any, max_prompt_length: int) -> list[Prompt]:
    """The prompts of all sources: parquet or JSON-lines files, or ``module:function`` that returns rows.

    Raises:
        UserError: naming the source or the row that is wrong.
    """
    rows = [row for source in sources for row in _rows(source)]
    prompts = [_prompt(index, dict(row), default_env) for index, row in enumerate(rows)]
    chat = ChatTokenizer(tokenizer)
    kept = [p for p in prompts if len(chat.prompt(p.messages)) <= max_prompt_length]
    if len(kept) < len(prompts):
        log.warning(
            "%d of %d prompts have more than trainer.max_prompt_length=%d tokens and are left out",
            len(prompts) - len(kept), len(prompts), max_prompt_length,
        )  # fmt: skip
    if prompts and not kept:
        raise UserError(f"no prompt has at most trainer.max_prompt_length={max_prompt_length} tokens")
    return kept


def _rows(source: str) -> Iterable[dict[str, Any]]:
    path = Path(source)
    if path.suffix in (".parquet", ".jsonl", ".json"):
        if not path.is_file():
            raise UserError(f"data file {source!r} does not exist")
        from datasets import load_dataset
        from datasets.exceptions import DatasetGenerationError

        kind = "parquet" if path.suffix == ".parquet" else "json"
        try:
            return load_dataset(kind, data_files=str(path), split="train")
        except (DatasetGenerationError, ValueError) as error:
            raise UserError(f"data file {source!r} cannot be read: {error.__cause__ or error}") from error
    if ":" in source:
        return resolve_reference(source, kind="data source")()
    raise UserError(f"data source {source!r} is neither a .parquet, .jsonl or .json file nor module:function")


def _prompt(index: int, row: dict[str, Any], default_env: str) -> Prompt:
    if "prompt" not in row:
        raise UserError(f"data row {index} has no column 'prompt'; it has: {', '.join(row)}")
    messages = row.pop("prompt")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    env_class = row.pop("env_class", None) or default_env
    if not env_class:
        raise UserError(f"data row {index} names no env_class and environment.env_class is empty")
    extras = row.pop("extras", None) or {}
    return Prompt(PromptId(0, index), messages, env_class, {**row, **extras})
