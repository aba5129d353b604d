"""Rewards that compare the response's answer with the label: as text, number, letter, mathematics.

All but ``math_verify`` return at once. That library's own time limits are signals, which work in a
main thread only and cannot stop a computation inside one big number. It is called without them, in
a process with a time limit.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from types import ModuleType
from typing import Any

from skyasync.errors import MissingExtraError, UserError
from skyasync.rewards import REWARDS, Capabilities, quick

FINAL_NUMBER = re.compile(r"####\s*(-?[\d,]*\.?\d+)")
_CHOICES = re.compile(
    r"\\boxed\{\s*(?:\\(?:text|math)[a-z]*\{)?\(?([A-Za-z])\)?\s*\}"
    # The a of "the answer is a city" is an article: a word follows it.
    r"|[Aa]nswer\**(?:\s+is|\s*:)[\s:*$]*\(?([A-Zb-z]|a(?! +\w))\b"
)
# The empty second group gives matches the form of those of _CHOICES, which has two groups.
_ONLY = re.compile(r"^\W*([A-Za-z])()\W*$")
_NUMBER_AT_THE_END = re.compile(r"####\s*-?[\d,]*\.?\d+\s*")
_DELIMITERS = ("$", "\\boxed", "\\(", "\\[")  # the beginnings of mathematics in LaTeX


def final_number(text: str) -> str | None:
    """The last number after ``####``, without thousands separators; None if there is none."""
    numbers = FINAL_NUMBER.findall(text)
    if numbers:
        return numbers[-1].replace(",", "")
    return None


@REWARDS.register("exact_match")
@quick
def exact_match(response: str, label: object) -> float:
    """1 if the response is the label, leaving aside spaces and newlines around both."""
    truth = _checked_label(label, "exact_match")
    return float(response.strip() == truth.strip())


@REWARDS.register("gsm8k")
@quick
def gsm8k(response: str, label: object) -> float:
    """1 if the last number after ``####`` is the label, or the one after ``####`` in the label."""
    truth = _checked_label(label, "gsm8k")
    # GSM8K's answers end with "#### 72"; other data sets have the number alone.
    target = final_number(truth) or truth.strip().replace(",", "")
    return float(final_number(response) == target)


@REWARDS.register("gsm8k_format")
@quick
def gsm8k_format(response: str) -> float:
    """1 if the response ends with ``####`` and a number, and has no other ``####``."""
    if response.count("####") != 1:
        return 0.0
    ending = response[response.find("####") :]
    return float(bool(_NUMBER_AT_THE_END.fullmatch(ending)))


@REWARDS.register("multiple_choice")
@quick
def multiple_choice(response: str, label: object) -> float:
    """1 if the last letter that the response gives as its choice is the label.

    Read are ``\\boxed{B}``, ``answer: B``, ``answer is (B)``, and a letter alone on the last line;
    not the article in ``answer is a city``.
    """
    truth = _checked_label(label, "multiple_choice").strip().strip("()").upper()
    lines = response.strip().splitlines()
    choices = _CHOICES.findall(response)
    if not choices and lines:
        choices = _ONLY.findall(lines[-1])
    if not choices:
        return 0.0
    letter = max(choices[-1])  # of the groups of a match one is the letter and the others are empty
    return float(letter.upper() == truth)


@REWARDS.register("zero")
@quick
def zero() -> float:
    """0 for every response: for runs in which a reward model alone gives the reward."""
    return 0.0


def _checked_label(label: object, function: str) -> str:
    if label is None:
        raise UserError(
            f"reward function {function} needs the right answer, and the row has none: set data.label_key"
        )
    return str(label)


def _library() -> ModuleType:
    try:
        import math_verify
    except ModuleNotFoundError as error:
        raise MissingExtraError("math-verify", "math-verify") from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own limits are off
    return math_verify


@REWARDS.register("math_verify", extra="math-verify")
@Capabilities(load=_library)
def math_verify(response: str, label: object) -> float:
    """1 if an expression in the response equals the label's.

    Raises:
        UserError: if the label is no mathematical expression.
    """
    truth = "" if label is None else str(label).strip()
    if not any(delimiter in truth for delimiter in _DELIMITERS):
        truth = f"${truth}$"  # a label without delimiters is the expression itself
    if label is None or not _expressions(truth):
        raise UserError(
            f"reward function math_verify finds no mathematical expression in the label {label!r}"
        )
    return _equal(response, truth)


@lru_cache(maxsize=4096)  # the samples of a group share the label, and often the answer
def _equal(response: str, truth: str) -> float:
    return float(
        _library().verify(_expressions(truth), _expressions(response), timeout_seconds=None)
    )


@lru_cache(maxsize=4096)  # as above; parsing takes most of the time
def _expressions(text: str) -> list[Any]:
    expressions: list[Any] = _library().parse(text, parsing_timeout=None)
    return expressions


def extract_boxed_answer(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}``, nested braces included; None if there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1  # open braces
    for position in range(begin, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
        if depth == 0:
            return text[begin:position].strip()
    return None
