"""Verifiable instructions: each followed and not followed, strictly and loosely, and rows without instructions."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyasync.errors import UserError
from skyasync.rewards import capabilities_of
from skyasync.rewards.instruction_following import (
    CONSTRAINTS,
    count_sentences,
    follows,
    instruction_following,
    instruction_following_loose,
    instruction_following_share,
    instructions_of,
    parameters,
    variants,
)

AT_LEAST, LESS = "at least", "less than"
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("keywords:existence", {"keywords": ["Ox", "plough"]}, ["the ox and its PLOUGH"], ["the ox", ""]),
    ("keywords:forbidden_words", {"forbidden_words": ["cat", "c++"]}, ["concatenate c+"], ["a Cat", "in c++ only"]),
    ("keywords:frequency", {"keyword": "ox", "frequency": 2, "relation": AT_LEAST}, ["Ox ox"], ["an ox"]),
    ("keywords:frequency", {"keyword": "ox", "frequency": 2, "relation": LESS}, ["an ox"], ["ox ox"]),
    ("keywords:letter_frequency", {"letter": "q", "let_frequency": 2, "let_relation": "exactly"}, ["Qq"], ["q", "qqq"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": AT_LEAST}, ["one, two three"], ["one two"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": LESS}, ["one two"], ["one two three"]),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": AT_LEAST}, ["One. Two!"], ["One, two."]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, ["a\n***\nb", "***a***b***"],
     ["a", "a***b***c", "a******b"]),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
     ["First.\n\nthen, more", 'a\n\n\n\n"Then" b'], ["then", "a\n\nnow", "a\n\nthen\n\nb", "a\n\nthenceforth"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[name] of [place]"], ["[name]", "[] []"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["Dear\nP.S. bye", "a\n p. s. b"],
     ["so P.S. no"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["a\nP.P.S b"], ["a\nP.S. b"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, ["* a\n* b", "- a\n  - b"], ["* a", "**a**\n* b"]),
    ("detectable_format:constrained_response", {}, ["Well. My answer is maybe."], ["My answer is perhaps."]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, ["*a* and **b**"], ["*a*", "* * ** **"]),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2},
     ["Section 1 a\nSection 2 b"],
     ["Section 1", "sections"]),
    ("detectable_format:json_format", {}, ['{"a": 1}', '```json\n[1]\n```', "3"], ["{a: 1}", "so: {}", "[" * 9999]),
    ("detectable_format:json_format", {}, [" ```\n{}\n``` ", "```JSON {}```"], ["```xml\n{}\n```", "```json", "````"]),
    ("detectable_format:title", {}, ["<<A title>>\ntext"], ["<< >>", "<title>", "<<a\nb>>"]),
    ("combination:two_responses", {}, ["a\n******\nb"], ["a", "a******a", "a******b******c"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "What is it?"}, ["what is it? A cat"], ["A cat. What is it?"]),
    ("startend:end_checker", {"end_phrase": "The end."}, ['... the end.\n', '"... the END."'], ["The end. Or not"]),
    ("startend:start_checker", {"start_phrase": "Dear"}, ["dear me"], ["my dear"]),
    ("startend:quotation", {}, ['"so"'], ['"so', '"', "'so'"]),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at most"},
     ["A BIG ox"], ["A BIG OX"]),
    ("change_case:english_capital", {}, ["ALL OF IT, 3!"], ["All of it", "3"]),
    ("change_case:english_lowercase", {}, ["all of it, 3!"], ["All of it", "3"]),
    ("punctuation:no_comma", {}, ["a; b"], ["a, b"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "right", "wrong"), CASES)
def test_an_instruction_is_followed_or_not(
    name: str, arguments: Any, right: list[str], wrong: list[str]
) -> None:
    assert [text for text in right if not follows(text, name, arguments)] == []
    assert [text for text in [*wrong, " \n"] if follows(text, name, arguments)] == []


def test_every_instruction_is_tried_above() -> None:
    assert {name for name, *_ in CASES} == set(CONSTRAINTS) - {"language:response_language"}
    assert len(CONSTRAINTS) == 26  # IFEval's 25, and one that begins


@given(st.text(), st.sampled_from([(name, arguments) for name, arguments, *_ in CASES]))
def test_any_response_has_a_result(text: str, asked: tuple[str, dict[str, Any]]) -> None:
    assert isinstance(follows(text, *asked), bool)


@pytest.mark.parametrize(
    ("text", "count"),
    [("", 0), ("One", 1), ("Dr. No met Mr. J. Bond at 3.14 p.m. He left.", 2), ("Hm... Why?! So \"be it.\" Yes", 4),
     ("A title\n\nOne. Two.", 3), ("e.g. this", 1)],
)  # fmt: skip
def test_sentences(text: str, count: int) -> None:
    assert count_sentences(text) == count


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("length_constraints:number_sentences", "Thinking" + "." * 20_000 + "x"),
        ("detectable_format:json_format", "```json" + "\n" * 1_000 + "x"),
    ],
)
def test_repeated_characters_take_no_longer_than_others(name: str, text: str) -> None:
    before = time.process_time()
    follows(text, name, {"num_sentences": 2, "relation": AT_LEAST})
    assert time.process_time() - before < 1.0


@given(st.text(max_size=60))
def test_loose_asks_for_no_more_than_strict(text: str) -> None:
    assert variants(text)[0] == text
    row = {
        "instruction_id_list": ["punctuation:no_comma", "change_case:english_lowercase"],
        "kwargs": [{}, {}],
    }
    found = instruction_following(text, **row)
    assert (
        found["loose"] >= found["reward"]
        and found["loose_share"] >= found["share"] >= found["reward"]
    )


ROW: dict[str, Any] = {
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [{"num_words": None}, {"num_words": 3, "relation": "at least", "keywords": None}],
}


def test_a_response_is_read_strictly_loosely_and_by_share() -> None:
    text = "<think>one, two</think>Well, sure:\nHere *they* are"
    assert instruction_following(text, **ROW) == {
        "reward": 0.0,
        "loose": 1.0,
        "share": 0.5,
        "loose_share": 1.0,
    }
    assert instruction_following_loose(text, **ROW)["reward"] == 1.0
    assert instruction_following_share(text, **ROW)["reward"] == 0.5
    assert instruction_following("Here they are", **ROW)["reward"] == 1.0


@pytest.mark.parametrize(
    "written",
    [lambda said: said, json.dumps, repr, lambda said: json.dumps([said]), lambda said: [said]],
)
def test_a_label_may_say_it_all(written: Any) -> None:
    said = {"instruction_id": ROW["instruction_id_list"], "kwargs": [None, ROW["kwargs"][1]]}
    assert instruction_following("one two three", label=written(said))["reward"] == 1.0


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({}, "needs the row's instructions: columns instruction_id_list and kwargs, or a label .*; found None"),
        ({"label": "7"}, "found '7'"),
        ({"label": {"kwargs": []}}, "needs the row's instructions"),
        ({"instruction_id_list": []}, "needs the row's instructions"),
        ({"instruction_id_list": ["punctuation:no_coma"]}, "unknown instruction 'punctuation:no_coma': did you mean"),
        ({**ROW, "kwargs": [{}]}, "instruction_id_list has 2 entries and kwargs 1"),
        ({**ROW, "kwargs": [{}, {"num_word": 3, "relation": "at least"}]}, r"needs 'num_words' .* num_word, r"),
        ({**ROW, "kwargs": [{}, {"num_words": 3, "relation": "atleast"}]}, "unknown relation 'atleast': did you mean"),
        ({**ROW, "kwargs": [{}, {"num_words": "many", "relation": "at least"}]}, "num_words must be a whole number"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": "ox"}]}, "must be a list of words"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_graded_is_reported_before_the_run(
    row: dict[str, Any], line: str
) -> None:
    with pytest.raises(UserError, match=line):
        capabilities_of(instruction_following).check({"label": None, **row})


def test_one_instruction_may_stand_alone() -> None:
    assert instructions_of("punctuation:no_comma", None, None) == [("punctuation:no_comma", {})]
    assert parameters("keywords:frequency") == ["keyword", "frequency", "relation"]
