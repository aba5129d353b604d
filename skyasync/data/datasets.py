"""Rows to prompts.

A row has a prompt (a conversation, or one string for the user's message), perhaps an ``env_class``, a label, a
domain, and whatever else the environment wants to know. Invariant: rows are never dropped silently.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeGuard

from skyasync.config.parts import reported_metric
from skyasync.config.schema import Config, DataConfig
from skyasync.config.schema.data import eval_sets
from skyasync.config.schema.environment import domains_of, judges, tags_of
from skyasync.data.sources import Row, reader, rows
from skyasync.data.stream import StreamedPrompts
from skyasync.envs.base import Conversation
from skyasync.envs.images import NO_IMAGES, image_column
from skyasync.envs.reward import known_of
from skyasync.errors import UserError, nearest, unknown
from skyasync.rewards.settings import RowChecks
from skyasync.rewards.signature import CONVERSATION
from skyasync.rollout.chat import ChatTokenizer
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.rollout.types import Prompt, PromptId

log = logging.getLogger(__name__)


def load_prompts(
    sources: Sequence[str],
    cfg: Config,
    tokenizer: Tokenizer,
    *,
    held_out: bool = False,
    known: Mapping[str, Iterable[Row]] = MappingProxyType({}),
) -> list[Prompt]:
    """The prompts of all sources (see ``skyasync.data.sources``), numbered through.

    Args:
        known: rows of some of the sources, which are not asked for again.

    Raises:
        UserError: naming the source or the row that is wrong.
    """
    given = [known[s] if s in known else rows(s, cfg, held_out=held_out) for s in sources]
    found = [row for part in given for row in part]
    prompts = [as_prompt(index, row, cfg) for index, row in enumerate(found)]
    chat = ChatTokenizer(tokenizer, cfg.data.apply_chat_template)
    limit = cfg.trainer.max_prompt_length
    kept = [p for p in prompts if len(chat.prompt(p.messages)) <= limit]
    if len(kept) < len(prompts):
        log.warning(
            "%d of %d prompts have more than trainer.max_prompt_length=%d tokens and are left out",
            len(prompts) - len(kept), len(prompts), limit,
        )  # fmt: skip
    if prompts and not kept:
        shortest = min(len(chat.prompt(p.messages)) for p in prompts)
        raise UserError(
            f"no prompt has at most trainer.max_prompt_length={limit} tokens: raise it to at least {shortest}, the "
            f"shortest of {len(prompts)}"
        )
    if kept and not held_out:
        _check_domains(kept, cfg)
        _check_judged(kept, cfg)
    check_rows(kept, cfg, held_out=held_out)
    return kept


def load_eval_prompts(
    cfg: Config, tokenizer: Tokenizer, known: Mapping[str, Iterable[Row]] = MappingProxyType({})
) -> list[Prompt]:
    """The prompts of ``data.val_data`` and ``data.val_sets``, each with its set's name, numbered through."""
    prompts: list[Prompt] = []
    for name, one in eval_sets(cfg.data).items():
        first = prompts[-1].id.row + 1 if prompts else 0
        found = load_prompts(one.data, cfg, tokenizer, held_out=True, known=known)
        prompts += [replace(p, id=PromptId(p.id.epoch, first + p.id.row), eval_set=name) for p in found]
    return prompts


def stream_prompts(sources: Sequence[str], cfg: Config, tokenizer: Tokenizer) -> StreamedPrompts:
    """The prompts of all sources as a stream (``data.streaming``), its first block read.

    Raises:
        UserError: naming the source or the row that is wrong.
    """
    chat, left_out = ChatTokenizer(tokenizer, cfg.data.apply_chat_template), _LeftOut(cfg.trainer.max_prompt_length)

    def as_prompts(first: int, rows: Sequence[Row]) -> list[Prompt]:
        prompts = [as_prompt(number, row, cfg) for number, row in enumerate(rows, first)]
        kept = [p for p in prompts if len(chat.prompt(p.messages)) <= left_out.limit]
        left_out.count(len(prompts) - len(kept), len(prompts))
        check_rows(kept, cfg)
        return kept

    found = StreamedPrompts([reader(source, cfg) for source in sources], as_prompts, cfg.data.shuffle_buffer)
    _check_judged(found, cfg)
    try:
        _check_domains(found, cfg)
    except UserError as error:  # it may be one of a later row
        log.warning("among the first %d prompts: %s", len(found), error)
    return found


class _LeftOut:
    """Prompts of a stream that are too long: told at the first, and whenever there are twice as many."""

    def __init__(self, limit: int) -> None:
        self.limit, self._many, self._of, self._told = limit, 0, 0, 0

    def count(self, many: int, of: int) -> None:
        self._many, self._of = self._many + many, self._of + of
        if self._many > 2 * self._told:
            self._told = self._many
            log.warning(
                "%d of %d prompts so far have more than trainer.max_prompt_length=%d tokens and are left out",
                self._many, self._of, self.limit,
            )  # fmt: skip


def warn_of_overlap(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> int:
    """How many held-out prompts are also trained on; says so if there are any."""
    trained = {_text(prompt) for prompt in train}
    shared = sum(_text(prompt) in trained for prompt in held_out)
    if shared:
        log.warning("%d of %d held-out prompts are also training prompts", shared, len(held_out))
    return shared


def as_prompt(index: int, given: object, cfg: Config) -> Prompt:
    """A row as the prompt that it is.

    Raises:
        UserError: for what is no row, a column that is not there, or a prompt of a form that is none.
    """
    if not isinstance(given, Mapping):
        raise UserError(f"data row {index} is no object with columns; found {str(given)[:80]!r}")
    row = dict(given)
    if column := image_column({**row, **(row.get("extras") or {})}):
        raise UserError(
            f"data row {index}: the row has {column}: {NO_IMAGES} (drop the column if it has no part in the task)"
        )
    messages, conversation = _messages(index, row, cfg.data)
    env_class = row.pop("env_class", None)
    if not env_class or not cfg.environment.env_class_from_rows:
        env_class = cfg.environment.env_class or ("reward" if judges(cfg.environment) else "")
    if cfg.generator.agent_program:
        env_class = "agent"  # the program judges
    if not env_class:
        raise UserError(
            f"data row {index} names no env_class and environment.env_class is empty: set it, or "
            f"environment.reward_funcs"
        )
    extras = {**row, **(row.pop("extras", None) or {})}
    for name, column, usual in (("label", cfg.data.label_key, "label"), ("domain", cfg.data.domain_key, "domain")):
        if column != usual or column in row:
            extras[name] = _column(index, row, column, f"data.{name}_key")
    if conversation and env_class == "reward":
        extras[CONVERSATION] = True
    if cfg.environment.domains and extras.get("domain"):
        extras["domain"] = tags_of(cfg.environment.domains).get(str(extras["domain"]), extras["domain"])
    return Prompt(PromptId(0, index), messages, env_class, extras)


def _messages(index: int, row: dict[str, Any], data: DataConfig) -> tuple[Conversation, bool]:
    """The prompt, and whether the row has it as a conversation."""
    prompt = _column(index, row, data.prompt_key, "data.prompt_key")
    row.pop(data.prompt_key, None)
    prompt = _unpacked(prompt)
    conversation = not isinstance(prompt, str)
    if not isinstance(prompt, str):
        if not data.apply_chat_template:
            raise UserError(f"data row {index} holds a conversation, and data.apply_chat_template=false takes text")
        if not _is_conversation(prompt):
            raise UserError(
                f"data row {index}: {data.prompt_key!r} must be a string, or a list of messages with role and content; "
                f"found {str(prompt)[:80]!r}"
            )
        messages = [dict(message) for message in prompt]
    else:
        messages = [{"role": "user", "content": prompt}]
    if data.system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    return messages, conversation


def _unpacked(prompt: object) -> object:
    """A conversation that is written as JSON, as ROLL's data has it, as what it is; anything else as it is."""
    if isinstance(prompt, str) and prompt.lstrip().startswith("[") and '"role"' in prompt:
        try:
            found = json.loads(prompt)
        except ValueError:
            return prompt
        return found if _is_conversation(found) else prompt
    return prompt


def _is_conversation(value: object) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    return (
        isinstance(value, Sequence)
        and len(value) > 0
        and all(isinstance(m, Mapping) and isinstance(m.get("role"), str) and "content" in m for m in value)
    )


def _column(index: int, row: Mapping[str, Any], name: str, key: str) -> object:
    """A column by its name, or ``a.b`` for b in column a."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            close = nearest(name, _names(row), count=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UserError(f"data row {index} has no column {name!r} ({key}); it has: {', '.join(row)}{hint}")
        value = value[part]
    return value


def _names(row: Mapping[str, Any]) -> Iterable[str]:
    for name, value in row.items():
        yield name
        if isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in value)


def _check_domains(prompts: Sequence[Prompt], cfg: Config) -> None:
    """Every domain with settings of its own is met in the training rows: another name would be a slip."""
    found = {str(p.extras.get("domain") or "") for p in prompts}
    for name in domains_of(cfg.environment.domains):
        if name not in found:
            raise UserError(
                f"environment.domains.{name} is no training row's domain (data.domain_key={cfg.data.domain_key}): "
                f"{unknown('domain', name, found - {''})}"
            )


def check_rows(prompts: Iterable[Prompt], cfg: Config, *, held_out: bool = False) -> None:
    """Raises ``UserError`` for a row that its reward functions or judges could not judge, hours later, or that has no
    metric to filter its groups by."""
    checks, metric = RowChecks(cfg.environment), reported_metric(cfg)
    for prompt in prompts:
        if prompt.env_class == "reward":
            try:
                known = known_of(prompt.extras, prompt.messages, "")
                checks.check(known)
                if metric and not held_out:
                    checks.check_metric(metric, known)
            except UserError as error:
                raise UserError(f"data row {prompt.id.row}: {error}") from error


def _check_judged(prompts: Sequence[Prompt], cfg: Config) -> None:
    """Reward functions that no row asks for would be ignored without a word."""
    funcs, named = judges(cfg.environment), sorted({p.env_class for p in prompts})
    if funcs and "reward" not in named:
        raise UserError(
            f"the reward functions {', '.join(funcs)} would judge no row, since all rows name their env_class "
            f"({', '.join(named)}): set environment.env_class_from_rows=false"
        )


def _text(prompt: Prompt) -> str:
    return "\n".join(str(message.get("content")) for message in prompt.messages)
