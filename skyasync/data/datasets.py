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
from itertools import chain
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
    loaded_rows: Mapping[str, Iterable[Row]] = MappingProxyType({}),
) -> list[Prompt]:
    """The prompts of all sources (see ``skyasync.data.sources``), numbered through.

    Args:
        is_eval: for evaluation.
        loaded_rows: rows of some of the sources, which are not read again.

    Raises:
        UserError: naming the source or the row that is wrong.
    """
    tables = []
    for source in sources:
        if source in loaded_rows:
            tables.append(loaded_rows[source])
        else:
            tables.append(rows(source, cfg, is_eval=is_eval))
    prompts = [as_prompt(index, row, cfg) for index, row in enumerate(chain(*tables))]
    chat = ChatTokenizer(tokenizer, cfg.data.apply_chat_template)
    limit = cfg.trainer.max_prompt_length
    lengths = [_length(prompt, chat) for prompt in prompts]
    short_prompts = short_enough(
        prompts, lengths, limit, f"trainer.max_prompt_length={limit}", "prompt"
    )
    if short_prompts and not is_eval:
        _check_domains(short_prompts, cfg)
        _check_env_classes(short_prompts, cfg)
    check_rows(short_prompts, cfg, is_eval=is_eval)
    return short_prompts


def short_enough(
    examples: Sequence[P], lengths: Sequence[int], max_tokens: int, bound: str, name: str
) -> list[P]:
    """The examples of at most ``max_tokens``; a warning counts the others.

    Args:
        bound: the setting of ``max_tokens``, for messages ("trainer.max_prompt_length=512").
        name: of one example, for messages.

    Raises:
        UserError: if all are too long.
    """
    short_examples = []
    for example, length in zip(examples, lengths, strict=True):
        if length <= max_tokens:
            short_examples.append(example)
    if examples and not short_examples:
        raise UserError(
            f"no {name} has at most {bound} tokens: the shortest of {len(examples)} has {min(lengths)}"
        )
    too_long = len(examples) - len(short_examples)
    if too_long:
        message = "%d of %d %ss have more than %s tokens and are left out"
        log.warning(message, too_long, len(examples), name, bound)
    return short_examples


def _length(prompt: Prompt, chat: ChatTokenizer) -> int:
    """The length in tokens. Raises ``UserError`` naming the row, if the model cannot read it."""
    try:
        return len(chat.prompt(prompt.messages))
    except UserError as error:
        raise UserError(f"data row {prompt.id.row}: {error}") from error


def load_eval_prompts(
    cfg: Config,
    tokenizer: Tokenizer,
    loaded_rows: Mapping[str, Iterable[Row]] = MappingProxyType({}),
) -> list[Prompt]:
    """The prompts of ``data.val_data`` and ``data.val_sets`` with their sets' names."""
    prompts: list[Prompt] = []
    for name, eval_set in eval_sets(cfg.data).items():
        # Numbered through: an identity is of one prompt of one set.
        offset = prompts[-1].id.row + 1 if prompts else 0
        set_prompts = load_prompts(
            eval_set.data, cfg, tokenizer, is_eval=True, loaded_rows=loaded_rows
        )
        for prompt in set_prompts:
            identity = PromptId(prompt.id.epoch, offset + prompt.id.row)
            prompts.append(replace(prompt, id=identity, eval_set=name))
    return prompts


def stream_prompts(sources: Sequence[str], cfg: Config, tokenizer: Tokenizer) -> StreamedPrompts:
    """The prompts of all sources as a stream (``data.streaming``), its first block read.

    Prompts that are too long are reported at the first, and whenever there are twice as many.

    Raises:
        UserError: naming the source or the row that is wrong.
    """
    chat = ChatTokenizer(tokenizer, cfg.data.apply_chat_template)
    limit = cfg.trainer.max_prompt_length
    read = 0
    too_long = 0
    reported = 0  # of the prompts that are too long

    def as_prompts(start: int, rows: Sequence[Row]) -> list[Prompt]:
        nonlocal read, too_long, reported
        prompts = [as_prompt(number, row, cfg) for number, row in enumerate(rows, start)]
        short_prompts = [prompt for prompt in prompts if _length(prompt, chat) <= limit]
        read += len(prompts)
        too_long += len(prompts) - len(short_prompts)
        # Not for every block: a stream has thousands.
        if too_long > 2 * reported:
            reported = too_long
            message = "%d of %d prompts so far have more than trainer.max_prompt_length=%d tokens and are left out"
            log.warning(message, too_long, read, limit)
        check_rows(short_prompts, cfg)
        return short_prompts

    readers = [reader(source, cfg) for source in sources]
    prompts = StreamedPrompts(readers, as_prompts, cfg.data.shuffle_buffer)
    _check_env_classes(prompts, cfg)
    try:
        _check_domains(prompts, cfg)
    except UserError as error:  # it may be one of a later row
        log.warning("among the first %d prompts: %s", len(prompts), error)
    return prompts


def warn_of_overlap(train: Sequence[Prompt], evaluation: Sequence[Prompt]) -> int:
    """The number of held-out prompts that are also trained on; a warning if there are any."""
    train_texts = set(map(_text, train))
    shared_count = sum(_text(prompt) in train_texts for prompt in evaluation)
    if shared_count:
        log.warning(
            "%d of %d held-out prompts are also training prompts", shared_count, len(evaluation)
        )
    return shared_count


def _text(prompt: Prompt) -> str:
    return "\n".join(str(message.get("content")) for message in prompt.messages)


def as_prompt(index: int, value: object, cfg: Config) -> Prompt:
    """Convert a row to a prompt.

    Raises:
        UserError: for another type, a column that is missing, or a prompt that is neither text nor
            a conversation.
    """
    if not isinstance(value, Mapping):
        raise UserError(
            f"data row {index} is not an object with columns; found {str(value)[:80]!r}"
        )
    row = dict(value)
    messages, conversation = messages_of(index, row, cfg.data)
    messages = with_row_images(index, row, messages)
    environment = cfg.environment
    env_class = row.pop("env_class", None)
    if not env_class or not environment.env_class_from_rows:
        env_class = environment.env_class
        if not env_class and judges(environment):
            env_class = "reward"
    if cfg.generator.agent_program:
        env_class = "agent"  # the program judges
    if not env_class:
        raise UserError(
            f"data row {index} names no env_class and environment.env_class is empty: set it, or "
            f"environment.reward_funcs"
        )
    # Columns for the environment may also be inside a column ``extras``.
    extras = dict(row)
    extras |= row.pop("extras", None) or {}
    for name, column in (("label", cfg.data.label_key), ("domain", cfg.data.domain_key)):
        # The default column may be missing; one that the user names may not.
        if column != name or column in row:
            extras[name] = _column(index, row, column, f"data.{name}_key")
    if conversation and env_class == "reward":
        extras[CONVERSATION] = True
    domain = extras.get("domain")
    if environment.domains and domain:
        extras["domain"] = tags_of(environment.domains).get(str(domain), domain)
    return Prompt(PromptId(0, index), messages, env_class, extras)


def with_row_images(index: int, row: dict[str, Any], messages: Conversation) -> Conversation:
    """The messages with their images read, and with the images of the row's columns.

    The image columns are removed from the row.

    Raises:
        UserError: for an image that cannot be read, or is in another column.
    """
    unread = {name: value for name, value in row.items() if name not in READ}
    unread |= row.get("extras") or {}
    column = image_column(unread)
    if column:
        raise UserError(
            f"data row {index}: the row has {column}: images are read from the columns {' and '.join(READ)} only; "
            f"remove the column if the task does not need it"
        )
    try:
        column = image_column({name: row.get(name) for name in READ})
        if column:
            images = row.pop(column)
            if not isinstance(images, Sequence) or isinstance(images, str | bytes):
                images = [images]
            messages = with_images(messages, images)
        return cast(Conversation, read_messages(messages))
    except UserError as error:
        raise UserError(f"data row {index}: {error}") from error


def messages_of(index: int, row: dict[str, Any], data: DataConfig) -> tuple[Conversation, bool]:
    """Take the prompt out of a row; returns it, and whether it is a conversation there."""
    params = row.get("responses_create_params")
    if isinstance(params, Mapping) and params.get("input"):
        prompt = _responses_input(params)  # it stays in the row: the row's server reads it
    else:
        prompt = _column(index, row, data.prompt_key, "data.prompt_key")
        row.pop(data.prompt_key, None)
    if isinstance(prompt, str) and prompt.lstrip().startswith("[") and '"role"' in prompt:
        # ROLL's data has conversations as JSON. Other text stays text.
        with suppress(ValueError):
            conversation = json.loads(prompt)
            if is_conversation(conversation):
                prompt = conversation
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
    items = params["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if params.get("instructions"):
        items = [{"role": "system", "content": params["instructions"]}, *items]
    if not is_conversation(items):
        return params["input"]  # which the caller rejects, with its text
    messages = []
    for item in items:
        # The API's newer name of the role, which chat templates do not have.
        role = "system" if item["role"] == "developer" else item["role"]
        messages.append({"role": role, "content": _plain_content(item["content"])})
    return messages


def _plain_content(content: Any) -> Any:  # noqa: ANN401  (a string, or a list of parts)
    """The content of the Responses API in the form of chat messages."""
    if not isinstance(content, list):
        return content
    content_parts = []
    texts = []
    for part in content:
        if part.get("type") in ("input_text", "output_text", "text"):
            texts.append(part["text"])
            content_parts.append({"type": "text", "text": part["text"]})
        else:
            content_parts.append(part)
    if len(texts) == len(content_parts):
        return "\n".join(texts)
    return content_parts


def is_conversation(value: object) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Whether a value is a list of messages with role and content."""
    if not isinstance(value, Sequence) or not value:
        return False
    return all(map(_is_message, value))


def _is_message(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    return isinstance(value.get("role"), str) and "content" in value


def _column(index: int, row: Mapping[str, Any], name: str, key: str) -> object:
    """A column by its name, or ``a.b`` for b in column a."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            names = list(row)
            for outer, nested in row.items():
                if isinstance(nested, Mapping):
                    names += [f"{outer}.{inner}" for inner in nested]
            suggestions = nearest(name, names, count=1)
            hint = f"; did you mean {suggestions[0]!r}?" if suggestions else ""
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
    """Raises ``UserError`` for a row that its reward functions or judges could not grade.

    So it does for a row without the metric by which groups are filtered.
    """
    # At the start, because such a row would end the run hours later.
    checks = RowChecks(cfg.environment)
    metric = reported_metric(cfg)
    for prompt in prompts:
        if prompt.env_class == "reward":
            try:
                graded_row = reward_inputs(prompt.extras, prompt.messages, "")
                checks.check(graded_row)
                if metric and not is_eval:
                    checks.check_metric(metric, graded_row)
            except UserError as error:
                raise UserError(f"data row {prompt.id.row}: {error}") from error


def _check_env_classes(prompts: Sequence[Prompt], cfg: Config) -> None:
    """Raises ``UserError`` if there are reward functions, and all rows name another environment."""
    funcs = judges(cfg.environment)
    env_classes = sorted({p.env_class for p in prompts})
    if funcs and "reward" not in env_classes:
        raise UserError(
            f"the reward functions {', '.join(funcs)} would judge no row, since all rows name their env_class "
            f"({', '.join(env_classes)}): set environment.env_class_from_rows=false"
        )
