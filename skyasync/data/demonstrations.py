"""Rows to demonstrations: conversations whose responses the policy learns (``skyasync sft``).

A row has a prompt and a ``completion`` (or ``response``), text or messages; or it has ``messages``,
a whole conversation. It may have ``tools``. Invariant: the tokens are those that a rollout of the
same conversation would read and write, so that reinforcement learning goes on where this has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from skyasync.arrays import NO_INTS, joined
from skyasync.config.schema import Config, DataConfig
from skyasync.data.datasets import is_conversation, messages_of, short_enough, with_row_images
from skyasync.data.sources import Row, rows
from skyasync.envs.base import Conversation
from skyasync.errors import UserError
from skyasync.models.images import images_of
from skyasync.rollout.chat import ChatTokenizer, Tools
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.rollout.types import Prompt, PromptId, Segment, images_in

MESSAGES = "messages"
RESPONSES = ("completion", "response")
ASSISTANT = "assistant"


@dataclass(frozen=True)
class Demonstration(Prompt):
    """A conversation with its responses in ``messages``.

    Args:
        sequences: its tokens; actions are learned. There are several if the chat template shows
            earlier turns differently as the conversation grows.
    """

    sequences: list[list[Segment]] = field(default_factory=list)


def load_demonstrations(
    sources: Sequence[str],
    cfg: Config,
    tokenizer: Tokenizer,
    *,
    is_eval: bool = False,
    loaded_rows: Mapping[str, Iterable[Row]] = MappingProxyType({}),
) -> list[Demonstration]:
    """The demonstrations of all sources, numbered through; arguments as for ``load_prompts``.

    Raises:
        UserError: naming the source or the row that is wrong.
    """
    chat = ChatTokenizer(tokenizer, cfg.data.apply_chat_template)
    demonstrations = list[Demonstration]()
    for source in sources:
        if source in loaded_rows:
            source_rows = loaded_rows[source]
        else:
            source_rows = rows(source, cfg, is_eval=is_eval)
        for row in source_rows:
            index = len(demonstrations)
            messages, prompt_length = read_demonstration(index, row, cfg.data)
            try:
                sequences = tokenized(chat, messages, prompt_length, row.get("tools"))
            except UserError as error:
                raise UserError(f"data row {index}: {error}") from error
            identity = PromptId(0, index)
            demonstrations.append(Demonstration(identity, messages, "", sequences=sequences))
    limit = cfg.trainer.max_prompt_length + cfg.generator.sampling_params.max_generate_length
    lengths = [max(map(_length, example.sequences)) for example in demonstrations]
    keys = "trainer.max_prompt_length + generator.sampling_params.max_generate_length"
    return short_enough(demonstrations, lengths, limit, f"{keys} = {limit}", "row")


def _length(sequence: Sequence[Segment]) -> int:
    return sum(len(segment.tokens) for segment in sequence)


def read_demonstration(index: int, row: object, data: DataConfig) -> tuple[Conversation, int]:
    """The conversation of a row, and the number of messages that are its prompt.

    Responses in the prompt are not learned.

    Raises:
        UserError: for a column that is missing, or that is neither text nor messages.
    """
    if not isinstance(row, Mapping):
        raise UserError(f"data row {index} is not an object with columns; found {str(row)[:80]!r}")
    column = ""
    for name in RESPONSES:
        if row.get(name) is not None:
            column = name
            break
    if not column and row.get(MESSAGES) is None:
        raise UserError(
            f"data row {index} has no response: it needs the column completion (or response) next to "
            f"{data.prompt_key!r}, or messages; it has: {', '.join(map(str, row))}"
        )
    columns = dict(row)
    if not column:
        prompt, _ = messages_of(index, columns, replace(data, prompt_key=MESSAGES))
        messages = with_row_images(index, columns, prompt)
        prompt_length = 0
    else:
        prompt, _ = messages_of(index, columns, data)
        prompt = with_row_images(index, columns, prompt)
        response = columns.pop(column)
        prompt_length = len(prompt)
        if isinstance(response, str):
            response = [{"role": ASSISTANT, "content": response}]
        elif not is_conversation(response) or not data.apply_chat_template:
            raise UserError(
                f"data row {index}: {column!r} must be a string, or with data.apply_chat_template=true a list of "
                f"messages with role and content; found {str(response)[:80]!r}"
            )
        response = with_row_images(index, {}, [dict(message) for message in response])
        messages = [*prompt, *response]
    roles = [message["role"] for message in messages]
    if roles[0] == ASSISTANT or ASSISTANT not in roles[prompt_length:]:
        raise UserError(
            f"data row {index}: {column or MESSAGES!r} must have a message of the role {ASSISTANT!r}, after another"
        )
    return messages, prompt_length


def tokenized(
    chat: ChatTokenizer, messages: Conversation, prompt_length: int, tools: Tools = None
) -> list[list[Segment]]:
    """The sequences of a conversation; actions are the assistant's messages after the prompt.

    Args:
        prompt_length: the number of messages of the prompt.
    """
    sequences: list[list[Segment]] = []
    context = NO_INTS  # all tokens of the current sequence
    for turn in range(prompt_length, len(messages)):
        if messages[turn]["role"] != ASSISTANT:
            continue
        history = messages[:turn]
        read = chat.prompt(history, tools)
        wrote = chat.response(history, messages[turn], tools)
        # No engine sampled the action: it has no log-probabilities and no version.
        logprobs = np.full(len(wrote), np.nan)
        versions = np.full(len(wrote), -1)
        action = Segment("action", wrote, logprobs, versions)
        images = images_of(history)
        if sequences and np.array_equal(read[: len(context)], context):
            sequence = sequences[-1]
            new_images = images[len(images_in(sequence)) :]
            observation = Segment("observation", read[len(context) :], images=new_images)
            sequence += [observation, action]
        else:
            sequences.append([Segment("prompt", read, images=images), action])
        context = joined(read, wrote)
    return sequences
