"""A judge's prompt, and how its answer is parsed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyasync.config.schema.judges import PROMPT
from skyasync.errors import UserError
from skyasync.rewards.judge_prompts import (
    check_placeholders,
    fill_prompt,
    judge_inputs,
    parse_grade,
)

ROW: dict[str, Any] = {
    "prompt": "2 + 2?", "messages": [{"role": "user", "content": "2 + 2?"}], "response": "4", "label": "4",
    "rubric": "be kind", "meta": {"level": 3},
}  # fmt: skip


def judge_prompt(prompt: str, **row: Any) -> str:
    return fill_prompt("j", prompt, judge_inputs({**ROW, **row}))


def read(parser: str, text: str) -> float | None:
    found = parse_grade(parser, text)
    return None if found is None else found.reward


def test_every_name_of_the_field_and_every_column_can_be_shown() -> None:
    names = "{question}|{prompt}|{ground_truth}|{answer}|{reference}|{label}|{response}|{rubric}|{meta.level}"
    assert judge_prompt(names) == "2 + 2?|2 + 2?|4|4|4|4|4|be kind|3"
    assert judge_prompt("{conversation}") == "user: 2 + 2?"
    assert judge_prompt("{final_response}", response="<think>hm {x}</think>\n 4") == "4"


def test_other_braces_stay_as_they_are() -> None:
    assert judge_prompt('{response} {"score": 1} {{response}} {} {0} { response }') == (
        '4 {"score": 1} {response} {} {0} { response }'
    )


@given(st.text())
def test_a_response_is_shown_as_it_is(response: str) -> None:
    assert judge_prompt("<{response}>", response=response) == f"<{response}>"


@pytest.mark.parametrize(
    ("prompt", "row", "line"),
    [
        (
            "{response} {rubrik}",
            {},
            r"judge j shows {rubrik}, which the row does not have: did you mean {rubric}\?",
        ),
        ("{response} {meta.lvel}", {}, "shows {meta.lvel}, which the row does not have"),
        (
            PROMPT,
            {"label": None},
            "shows {ground_truth}, the right answer, and the row has none: set data.label_key",
        ),
    ],
)
def test_a_prompt_that_shows_what_a_row_lacks_is_told_before_the_run(
    prompt: str, row: Any, line: str
) -> None:
    with pytest.raises(UserError, match=line):
        check_placeholders("j", prompt, judge_inputs({**ROW, **row}))


@pytest.mark.parametrize(
    ("text", "grade"),
    [
        ("yes", 1.0), ("No.", 0.0), ("**Yes**", 1.0), ("The answer is right. Verdict: yes\n\nThank you!", 1.0),
        ("Yes, both are 4.", 1.0), ("Both are 4, so yes", 1.0), ("<think>no no no</think> yes", 1.0),
        ("Verdict: **no**, since it is 5", 0.0), ("I see no error in it", None), ("nothing", None), ("", None),
        ("It is not yesterday", None), ("<think>yes", None),
    ],
)  # fmt: skip
def test_yes_or_no(text: str, grade: float | None) -> None:
    assert read("yes_no", text) == grade


@pytest.mark.parametrize(
    ("text", "grade"),
    [
        ("Score: 7", 7.0), ("7", 7.0), ("8/10", 8.0), ("**Rating:** 4.5", 4.5), ('{"why": "x", "score": 3}', 3.0),
        ("[[9]]", 9.0), (r"\boxed{2}", 2.0), ("score: 3 at first, but then score: 5", 5.0), ("Score is -1", -1.0),
        ("There are 3 mistakes in it", None), ("I would score it highly", None), ("", None),
        ("<think>score: 1</think>score = 6", 6.0),
    ],
)  # fmt: skip
def test_a_score(text: str, grade: float | None) -> None:
    assert read("score", text) == grade


@pytest.mark.parametrize(
    ("pattern", "text", "grade"),
    [
        (r"<v>(.*?)</v>", "<v>1</v><v>2</v>", 2.0), (r"\d+", "3 of 4", 4.0), ("A|B", "A", None),
        (r"is (\w+)", "it is CORRECT", 1.0), (r"(\S+)$", "nan", None),
    ],
)  # fmt: skip
def test_a_pattern(pattern: str, text: str, grade: float | None) -> None:
    assert read(pattern, text) == grade


@given(st.text())
def test_whatever_a_judge_says_is_read_or_not(text: str) -> None:
    for parser in ("yes_no", "score"):
        assert read(parser, text) is None or isinstance(read(parser, text), float)
