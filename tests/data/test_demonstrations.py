"""Rows to demonstrations: which messages of a conversation are trained, and errors."""

from __future__ import annotations

import logging
from copy import copy
from typing import Any

import pytest

from skyasync.config.schema import Config
from skyasync.data.demonstrations import Demonstration, load_demonstrations
from skyasync.errors import UserError
from skyasync.rollout.types import Segment
from tests.rollout.episodes import tokenizer

FORGETS = (
    "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}"
    "{{ '<|im_start|>assistant\n<|im_end|>' }}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


def load(
    *rows: dict[str, Any], template: str = "", apply: bool = True, limit: int = 512
) -> list[Demonstration]:
    cfg, speaks = Config(), copy(tokenizer())
    cfg.data.apply_chat_template, cfg.trainer.max_prompt_length = apply, limit
    cfg.generator.sampling_params.max_generate_length = 1
    speaks.chat_template = template or speaks.chat_template
    return load_demonstrations(["rows"], cfg, speaks, loaded_rows={"rows": rows})


def shown(sequence: list[Segment]) -> list[tuple[str, str]]:
    return [(segment.kind, tokenizer().decode(segment.tokens.tolist())) for segment in sequence]


def test_text_and_messages_are_the_same_demonstration() -> None:
    text, messages = load(
        {"prompt": "a", "response": "b"}, {"prompt": TALK[:1], "completion": TALK[1:2], "other": 1}
    )
    assert shown(text.sequences[0]) == [
        ("prompt", "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"), ("action", "b<|im_end|>\n"),
    ]  # fmt: skip
    assert shown(messages.sequences[0]) == shown(text.sequences[0])
    assert text.messages == messages.messages == TALK[:2]


def test_all_messages_of_the_assistant_are_learnt_of_a_conversation_and_the_last_of_a_prompt() -> (
    None
):
    whole, last = load({"messages": TALK}, {"prompt": TALK[:3], "completion": "d"})
    kinds = [[segment.kind for segment in each.sequences[0]] for each in (whole, last)]
    assert kinds == [["prompt", "action", "observation", "action"], ["prompt", "action"]]
    texts = ["".join(text for _, text in shown(each.sequences[0])) for each in (whole, last)]
    assert texts[0] == texts[1]


def test_turns_that_the_template_shows_differently_later_are_sequences_of_their_own() -> None:
    (row,) = load({"messages": TALK}, template=FORGETS)
    assert [[kind for kind, _ in shown(sequence)] for sequence in row.sequences] == [
        ["prompt", "action"]
    ] * 2
    assert [shown(sequence)[1][1] for sequence in row.sequences] == ["b<|im_end|>", "d<|im_end|>"]


def test_without_a_template_the_end_of_the_sequence_follows_the_text() -> None:
    (row,) = load({"prompt": "ask:", "completion": " it"}, apply=False)
    assert shown(row.sequences[0]) == [("prompt", "ask:"), ("action", " it<|im_end|>")]


def test_long_rows_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    short, long = {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "9" * 50}
    with caplog.at_level(logging.WARNING):
        assert [row.id.row for row in load(long, short, limit=40)] == [1]
    assert (
        "1 of 2 rows have more than trainer.max_prompt_length + generator.sampling_params"
        in caplog.text
    )
    with pytest.raises(UserError, match="= 6 tokens: the shortest of 1 has"):
        load(long, limit=5)


def test_a_template_that_changes_the_prompt_is_one_line() -> None:
    template = "{{ messages | length }}{% if add_generation_prompt %}:{% endif %}"
    with pytest.raises(
        UserError, match="data row 0: the chat template shows '1:' before the response, and with"
    ):
        load({"prompt": "a", "completion": "b"}, template=template)
