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
from skyasync.data.datasets import is_conversation, messages_of, placed, short_enough
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
    """``messages`` is the whole conversation, with its responses.

    ``sequences``: its tokens; actions are learned. It is more than one where the chat template
    shows earlier turns differently as the conversation grows.
    """

    sequences: list[list[Segment]] = field(default_factory=list)


def load_demonstrations(
    sources: Sequence[str],
    cfg: Config,
    tokenizer: Tokenizer,
    *,
    is_eval: bool = False,
    known: Mapping[str, Iterable[Row]] = MappingProxyType({}),
) -> list[Demonstration]:
    """The demonstrations of all sources, numbered through; arguments as for ``load_prompts``.

    Raises:
        UserError: naming the source or the row that is wrong.
    """
    chat = ChatTokenizer(tokenizer, cfg.data.apply_chat_template)
    every = list[Demonstration]()
    for source in sources:
        for row in known[source] if source in known else rows(source, cfg, is_eval=is_eval):
            index = len(every)
            messages, first = read_demonstration(index, row, cfg.data)
            try:
                sequences = tokenized(chat, messages, first, row.get("tools"))
            except UserError as error:
                raise UserError(f"data row {index}: {error}") from error
            every.append(Demonstration(PromptId(0, index), messages, "", sequences=sequences))
    limit = cfg.trainer.max_prompt_length + cfg.generator.sampling_params.max_generate_length
    lengths = [
        max(sum(len(segment.tokens) for segment in s) for s in each.sequences) for each in every
    ]
    keys = "trainer.max_prompt_length + generator.sampling_params.max_generate_length"
    return short_enough(every, lengths, limit, f"{keys} = {limit}", "row")


def read_demonstration(index: int, row: object, data: DataConfig) -> tuple[Conversation, int]:
    """The whole conversation of a row, and the number of its first messages whose responses are not
    learned.

    Raises:
        UserError: for a column that is missing, or that is neither text nor messages.
    """
    if not isinstance(row, Mapping):
        raise UserError(f"data row {index} is not an object with columns; found {str(row)[:80]!r}")
    column = next((name for name in RESPONSES if row.get(name) is not None), "")
    if not column and row.get(MESSAGES) is None:
        raise UserError(
            f"data row {index} has no response: it needs the column completion (or response) next to "
            f"{data.prompt_key!r}, or messages; it has: {', '.join(map(str, row))}"
        )
    rest = dict(row)
    if not column:
        prompt, _ = messages_of(index, rest, replace(data, prompt_key=MESSAGES))
        whole = placed(index, rest, prompt)
        first = 0
    else:
        prompt, _ = messages_of(index, rest, data)
        prompt = placed(index, rest, prompt)
        given = rest.pop(column)
        first = len(prompt)
        if isinstance(given, str):
            given = [{"role": ASSISTANT, "content": given}]
        elif not is_conversation(given) or not data.apply_chat_template:
            raise UserError(
                f"data row {index}: {column!r} must be a string, or with data.apply_chat_template=true a list of "
                f"messages with role and content; found {str(given)[:80]!r}"
            )
        whole = [*prompt, *placed(index, {}, [dict(message) for message in given])]
    if whole[0]["role"] == ASSISTANT or not any(
        message["role"] == ASSISTANT for message in whole[first:]
    ):
        raise UserError(
            f"data row {index}: {column or MESSAGES!r} must have a message of the role {ASSISTANT!r}, after another"
        )
    return whole, first


def tokenized(
    chat: ChatTokenizer, messages: Conversation, first: int, tools: Tools = None
) -> list[list[Segment]]:
    """The sequences of a conversation; actions are the assistant's messages from ``first`` on."""
    sequences: list[list[Segment]] = []
    before = NO_INTS
    for turn in range(first, len(messages)):
        if messages[turn]["role"] != ASSISTANT:
            continue
        read = chat.prompt(messages[:turn], tools)
        wrote = chat.response(messages[:turn], messages[turn], tools)
        action = Segment("action", wrote, np.full(len(wrote), np.nan), np.full(len(wrote), -1))
        images = images_of(messages[:turn])
        if sequences and np.array_equal(read[: len(before)], before):
            shown = images[len(images_in(sequences[-1])) :]
            sequences[-1] += [Segment("observation", read[len(before) :], images=shown), action]
        else:
            sequences.append([Segment("prompt", read, images=images), action])
        before = joined(read, wrote)
    return sequences
