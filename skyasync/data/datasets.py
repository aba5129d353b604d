"""Rows to prompts.

A row has a prompt (a conversation, or one string for the user's message), perhaps an ``env_class``,
a label, a domain, and whatever else the environment wants to know. In place of a prompt it may have
``responses_create_params`` (NeMo Gym). Invariant: rows are never dropped silently.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeGuard, TypeVar, cast

from skyasync.config.parts import reported_metric
from skyasync.config.schema import Config, DataConfig
from skyasync.config.schema.data import eval_sets
from skyasync.config.schema.environment import domains_of, judges, tags_of
from skyasync.data.sources import Row, reader, rows
from skyasync.data.stream import StreamedPrompts
from skyasync.envs.base import Conversation
from skyasync.envs.images import READ, image_column, read_messages, with_images
from skyasync.envs.reward import reward_inputs
from skyasync.errors import UserError, nearest, unknown
from skyasync.rewards.settings import RowChecks
from skyasync.rewards.signature import CONVERSATION
from skyasync.rollout.chat import ChatTokenizer
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.rollout.types import Prompt, PromptId

log = logging.getLogger(__name__)

P = TypeVar("P", bound=Prompt)


def load_prompts(
    sources: Sequence[str],
    cfg: Config,
    tokenizer: Tokenizer,
    *,
    is_eval: bool = False,
    known: Mapping[str, Iterable[Row]] = MappingProxyType({}),
) -> list[Prompt]:
    """The prompts of all sources (see ``skyasync.data.sources``), numbered through.

    Args:
        is_eval: for evaluation.
        known: rows of some of the sources, which are not read again.

    Raises:
        UserError: naming the source or the row that is wrong.
    """
    given = [known[s] if s in known else rows(s, cfg, is_eval=is_eval) for s in sources]
    prompts = [
        as_prompt(index, row, cfg)
        for index, row in enumerate(row for part in given for row in part)
    ]
    chat = ChatTokenizer(tokenizer, cfg.data.apply_chat_template)
    limit = cfg.trainer.max_prompt_length
    lengths = [_length(prompt, chat) for prompt in prompts]
    short = short_enough(prompts, lengths, limit, f"trainer.max_prompt_length={limit}", "prompt")
    if short and not is_eval:
        _check_domains(short, cfg)
        _check_env_classes(short, cfg)
    check_rows(short, cfg, is_eval=is_eval)
    return short


def short_enough(
    examples: Sequence[P], lengths: Sequence[int], most: int, bound: str, name: str
) -> list[P]:
    """The examples of at most ``most`` tokens; a warning counts the others.

    Args:
        bound: where ``most`` is set, for messages ("trainer.max_prompt_length=512").
        name: of one example, for messages.

    Raises:
        UserError: if all are too long.
    """
    short = [example for example, length in zip(examples, lengths, strict=True) if length <= most]
    if examples and not short:
        raise UserError(
            f"no {name} has at most {bound} tokens: the shortest of {len(examples)} has {min(lengths)}"
        )
    left = len(examples) - len(short)
    if left:
        log.warning(
            "%d of %d %ss have more than %s tokens and are left out",
            left,
            len(examples),
            name,
            bound,
        )
    return short


def _length(prompt: Prompt, chat: ChatTokenizer) -> int:
    """In tokens. Raises ``UserError`` naming the row, if the model cannot read it."""
    try:
        return len(chat.prompt(prompt.messages))
    except UserError as error:
        raise UserError(f"data row {prompt.id.row}: {error}") from error


def load_eval_prompts(
    cfg: Config, tokenizer: Tokenizer, known: Mapping[str, Iterable[Row]] = MappingProxyType({})
) -> list[Prompt]:
    """The prompts of ``data.val_data`` and ``data.val_sets``, each with its set's name, numbered
    through."""
    prompts: list[Prompt] = []
    for name, one in eval_sets(cfg.data).items():
        first = prompts[-1].id.row + 1 if prompts else 0
        loaded = load_prompts(one.data, cfg, tokenizer, is_eval=True, known=known)
        prompts += [
            replace(p, id=PromptId(p.id.epoch, first + p.id.row), eval_set=name) for p in loaded
        ]
    return prompts


def stream_prompts(sources: Sequence[str], cfg: Config, tokenizer: Tokenizer) -> StreamedPrompts:
    """The prompts of all sources as a stream (``data.streaming``), its first block read.

    Prompts that are too long are reported at the first, and whenever there are twice as many.

    Raises:
        UserError: naming the source or the row that is wrong.
    """
    chat = ChatTokenizer(tokenizer, cfg.data.apply_chat_template)
    limit = cfg.trainer.max_prompt_length
    read = too_long = reported = 0

    def as_prompts(first: int, rows: Sequence[Row]) -> list[Prompt]:
        nonlocal read, too_long, reported
        prompts = [as_prompt(number, row, cfg) for number, row in enumerate(rows, first)]
        short = [prompt for prompt in prompts if _length(prompt, chat) <= limit]
        read = read + len(prompts)
        too_long = too_long + len(prompts) - len(short)
        if too_long > 2 * reported:
            reported = too_long
            message = "%d of %d prompts so far have more than trainer.max_prompt_length=%d tokens and are left out"
            log.warning(message, too_long, read, limit)
        check_rows(short, cfg)
        return short

    prompts = StreamedPrompts(
        [reader(source, cfg) for source in sources], as_prompts, cfg.data.shuffle_buffer
    )
    _check_env_classes(prompts, cfg)
    try:
        _check_domains(prompts, cfg)
    except UserError as error:  # it may be one of a later row
        log.warning("among the first %d prompts: %s", len(prompts), error)
    return prompts


def warn_of_overlap(train: Sequence[Prompt], evaluation: Sequence[Prompt]) -> int:
    """How many held-out prompts are also trained on; a warning says so if there are any."""
    trained, tested = (
        [
            "\n".join(str(message.get("content")) for message in prompt.messages)
            for prompt in prompts
        ]
        for prompts in (train, evaluation)
    )
    shared = sum(map(set(trained).__contains__, tested))
    if shared:
        log.warning("%d of %d held-out prompts are also training prompts", shared, len(tested))
    return shared


def as_prompt(index: int, given: object, cfg: Config) -> Prompt:
    """A row as the prompt that it is.

    Raises:
        UserError: for what is no row, a column that is missing, or a prompt that is neither text
            nor a conversation.
    """
    if not isinstance(given, Mapping):
        raise UserError(
            f"data row {index} is not an object with columns; found {str(given)[:80]!r}"
        )
    row = dict(given)
    messages, conversation = messages_of(index, row, cfg.data)
    messages = placed(index, row, messages)
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
    for name, column, usual in (
        ("label", cfg.data.label_key, "label"),
        ("domain", cfg.data.domain_key, "domain"),
    ):
        if column != usual or column in row:
            extras[name] = _column(index, row, column, f"data.{name}_key")
    if conversation and env_class == "reward":
        extras[CONVERSATION] = True
    if cfg.environment.domains and extras.get("domain"):
        extras["domain"] = tags_of(cfg.environment.domains).get(
            str(extras["domain"]), extras["domain"]
        )
    return Prompt(PromptId(0, index), messages, env_class, extras)


def placed(index: int, row: dict[str, Any], messages: Conversation) -> Conversation:
    """The messages with their images read, and with the images of the row's columns, which are
    removed from the row.

    Raises:
        UserError: for an image that cannot be read, or is in another column.
    """
    column = image_column(
        {**{n: v for n, v in row.items() if n not in READ}, **(row.get("extras") or {})}
    )
    if column:
        raise UserError(
            f"data row {index}: the row has {column}: images are read from the columns {' and '.join(READ)} only; "
            f"remove the column if the task does not need it"
        )
    try:
        column = image_column({name: row.get(name) for name in READ})
        if column:
            images = row.pop(column)
            several = isinstance(images, Sequence) and not isinstance(images, str | bytes)
            messages = with_images(messages, images if several else [images])
        return cast(Conversation, read_messages(messages))
    except UserError as error:
        raise UserError(f"data row {index}: {error}") from error


def messages_of(index: int, row: dict[str, Any], data: DataConfig) -> tuple[Conversation, bool]:
    """The prompt, which is taken out of the row, and whether it is a conversation there."""
    params = row.get("responses_create_params")
    if isinstance(params, Mapping) and params.get("input"):
        prompt = _responses_input(params)  # the row stays whole: its server reads it
    else:
        prompt = _column(index, row, data.prompt_key, "data.prompt_key")
        row.pop(data.prompt_key, None)
    if isinstance(prompt, str) and prompt.lstrip().startswith("[") and '"role"' in prompt:
        with suppress(ValueError):  # ROLL's data has conversations as JSON
            parsed = json.loads(prompt)
            prompt = parsed if is_conversation(parsed) else prompt
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    elif not data.apply_chat_template:
        raise UserError(
            f"data row {index} holds a conversation, and data.apply_chat_template=false takes text"
        )
    elif not is_conversation(prompt):
        raise UserError(
            f"data row {index}: {data.prompt_key!r} must be a string, or a list of messages with role and content; "
            f"found {str(prompt)[:80]!r}"
        )
    else:
        messages = [dict(message) for message in prompt]
    if data.system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    return messages, not isinstance(prompt, str)


def _responses_input(params: Mapping[str, Any]) -> object:
    """The input of a request in the form of OpenAI's Responses API, as messages."""
    given = params["input"]
    if isinstance(given, str):
        items = [{"role": "user", "content": given}]
    else:
        items = given
    if params.get("instructions"):
        items = [{"role": "system", "content": params["instructions"]}, *items]
    messages = []
    for item in items if is_conversation(items) else ():
        content = item["content"]
        if isinstance(content, list):
            texts = ("input_text", "output_text", "text")
            parts = [
                {"type": "text", "text": p["text"]} if p.get("type") in texts else p
                for p in content
            ]
            text = all(p.get("type") == "text" for p in parts)
            if text:
                content = "\n".join(p["text"] for p in parts)
            else:
                content = parts
        messages.append(
            {"role": "system" if item["role"] == "developer" else item["role"], "content": content}
        )
    return messages or given


def is_conversation(value: object) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    return (
        isinstance(value, Sequence)
        and len(value) > 0
        and all(
            isinstance(m, Mapping) and isinstance(m.get("role"), str) and "content" in m
            for m in value
        )
    )


def _column(index: int, row: Mapping[str, Any], name: str, key: str) -> object:
    """A column by its name, or ``a.b`` for b in column a."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            nested = [
                f"{outer}.{inner}"
                for outer, v in row.items()
                if isinstance(v, Mapping)
                for inner in v
            ]
            close = nearest(name, [*row, *nested], count=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UserError(
                f"data row {index} has no column {name!r} ({key}); it has: {', '.join(row)}{hint}"
            )
        value = value[part]
    return value


def _check_domains(prompts: Sequence[Prompt], cfg: Config) -> None:
    """Raises ``UserError`` for a domain with settings of its own that no training row has."""
    present = {str(p.extras.get("domain") or "") for p in prompts}
    for name in domains_of(cfg.environment.domains):
        if name not in present:
            raise UserError(
                f"environment.domains.{name}: no training row has this domain (data.domain_key={cfg.data.domain_key}): "
                f"{unknown('domain', name, present - {''})}"
            )


def check_rows(prompts: Iterable[Prompt], cfg: Config, *, is_eval: bool = False) -> None:
    """Raises ``UserError`` for a row that its reward functions or judges could not judge, hours
    later, or that has no metric to filter its groups by."""
    checks = RowChecks(cfg.environment)
    metric = reported_metric(cfg)
    for prompt in prompts:
        if prompt.env_class == "reward":
            try:
                known = reward_inputs(prompt.extras, prompt.messages, "")
                checks.check(known)
                if metric and not is_eval:
                    checks.check_metric(metric, known)
            except UserError as error:
                raise UserError(f"data row {prompt.id.row}: {error}") from error


def _check_env_classes(prompts: Sequence[Prompt], cfg: Config) -> None:
    """Raises ``UserError`` if there are reward functions, and every row has an environment of its
    own."""
    funcs = judges(cfg.environment)
    named = sorted({p.env_class for p in prompts})
    if funcs and "reward" not in named:
        raise UserError(
            f"the reward functions {', '.join(funcs)} would judge no row, since all rows name their env_class "
            f"({', '.join(named)}): set environment.env_class_from_rows=false"
        )
