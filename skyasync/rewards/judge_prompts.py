"""The prompts of judges (language models that grade), and how a grade is parsed from their answers.

Invariant: the text of a response or a row is inserted as it is and never searched for placeholders.
An answer without a grade gives None, never a guess.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from skyasync.config.schema.judges import (
    PLACEHOLDER,
    JudgeConfig,
    is_reference,
    is_text,
    placeholders,
)
from skyasync.errors import UserError, nearest
from skyasync.registry import resolve_reference
from skyasync.rewards.signature import Inputs, Score, as_score

_NUMBER = r"([-+]?\d+(?:\.\d+)?)"
_WORDS = {"yes": 1.0, "true": 1.0, "correct": 1.0, "no": 0.0, "false": 0.0, "incorrect": 0.0}
# Repetitions are bounded: an answer of any content must be parsed in time linear in its length.
_NAMED = re.compile(
    r"\b(?:verdict|answer|judge?ment)\b\W{1,8}(?:is\W{1,4})?(yes|no)\b", re.IGNORECASE
)
_SCORES = (
    re.compile(r"\[\[\s*" + _NUMBER + r"\s*\]\]"),
    re.compile(r"\\boxed\{\s*" + _NUMBER + r"\s*\}"),
    re.compile(
        r"\b(?:score|rating|grade)\b\W{0,4}(?:is|of)?[\s:=*\"']{1,6}" + _NUMBER, re.IGNORECASE
    ),
)
_ALONE = re.compile(r"\W*?" + _NUMBER + r"(?:\s*/\s*\d+)?\W*")


def without_thinking(text: str) -> str:
    """The text after the last ``</think>``, or all of it without one.

    Thinking that did not end is left out.
    """
    answer = text.rpartition("</think>")[2]
    return answer.partition("<think>")[0]


def prompt_text(name: str, judge: JudgeConfig) -> str:
    """The text of a judge's prompt, which the configuration gives itself or by its file.

    Raises:
        UserError: if there is no such file.
    """
    if is_text(judge.prompt):
        return judge.prompt
    path = Path(judge.prompt).expanduser()
    if not path.is_file():
        files = [file.name for file in path.parent.glob("*") if file.is_file()]
        close = nearest(path.name, files, count=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(
            f"environment.judges.{name}.prompt={judge.prompt}: there is no such file{hint} (to write the prompt itself "
            f"here, include a placeholder such as {{response}})"
        )
    return path.read_text(encoding="utf-8")


def judge_inputs(inputs: Inputs) -> dict[str, Any]:
    """The values that a prompt may show: the inputs of a reward function, also by usual names."""
    label = inputs.get("label")
    response = str(inputs.get("response", ""))
    messages = [
        f"{message.get('role')}: {message.get('content')}" for message in inputs["messages"]
    ]
    return {
        "question": inputs.get("prompt"),
        "ground_truth": label,
        "answer": label,
        "reference": label,
        **inputs,  # after the usual names: a column of the row counts more
        "final_response": without_thinking(response).strip(),
        "conversation": "\n\n".join(messages),
    }


def fill_prompt(name: str, prompt: str, inputs: Inputs) -> str:
    """The prompt with the inputs in the place of its placeholders.

    Raises:
        UserError: for a placeholder without an input, naming the judge.
    """

    def replacement(match: re.Match[str]) -> str:
        literal, placeholder = match.groups()
        if literal:  # text in double braces
            return f"{{{literal}}}"
        return str(_value(name, placeholder, inputs))

    # One pass: inserted text is not searched for placeholders.
    return PLACEHOLDER.sub(replacement, prompt)


def check_placeholders(name: str, prompt: str, inputs: Inputs) -> None:
    """Raise ``UserError`` for a placeholder without an input."""
    for placeholder in placeholders(prompt):
        _value(name, placeholder, inputs)


def _value(name: str, placeholder: str, inputs: Inputs) -> object:
    """The input of a placeholder; dots lead into nested mappings, unless a column has that name."""
    value: Any = inputs
    path = [placeholder] if placeholder in inputs else placeholder.split(".")
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    if value is not None:
        return value
    start = f"the prompt of judge {name} shows {{{placeholder}}},"
    if placeholder in ("ground_truth", "answer", "reference", "label"):
        fix = "set data.label_key, or judges.NAME.prompt to one without it"
        raise UserError(f"{start} the right answer, and the row has none: {fix}")
    close = nearest(placeholder, inputs, count=1)
    hint = f"did you mean {{{close[0]}}}? " if close else ""
    columns = ", ".join(inputs)
    raise UserError(
        f"{start} which the row does not have: {hint}it gives: {columns} (text in double braces is left as it is)"
    )


def parse_grade(parser: str, text: str) -> Score | None:
    """The grade in an answer by ``environment.judges.NAME.parser``, or None.

    Raises:
        UserError: if a function of the user returned anything but a score or None.
    """
    text = without_thinking(text)
    if is_reference(parser):
        returned = parser_function(parser)(text)
        if returned is None:
            return None
        return as_score(parser, returned)
    if parser in BUILTIN_PARSERS:
        number = BUILTIN_PARSERS[parser](text)
    else:  # a regular expression; its group is a number or a word
        matches = re.compile(parser).findall(text)
        grade = str(matches[-1]).strip() if matches else ""
        try:
            number = float(grade)
        except ValueError:
            number = _WORDS.get(grade.lower())
    if number is None or not math.isfinite(number):
        return None
    return Score(number)


@cache
def parser_function(reference: str) -> Callable[[str], object]:
    """The user's parser ``module:function``. Raises ``UserError`` if there is none."""
    function: Callable[[str], object] = resolve_reference(reference, kind="judge's parser")
    if not callable(function):
        raise UserError(f"the parser {reference!r} cannot be called: it is {function!r}")
    return function


def _yes_no(text: str) -> float | None:
    """The first yes or no among: the last word, the word after "answer" or "judgement", the first.

    A judge that reasons concludes at the end; one that does not begins with its answer.
    """
    words = re.findall(r"[a-z]+", text.lower())
    after_names = _NAMED.findall(text)
    candidates = words[-1:]
    if after_names:
        candidates.append(after_names[-1].lower())
    candidates += words[:1]
    for word in candidates:
        if word in ("yes", "no"):
            return _WORDS[word]
    return None


def _score(text: str) -> float | None:
    """The last ``[[7]]``, or else ``\\boxed{7}``, or ``score: 7``, or a number alone."""
    for pattern in _SCORES:
        numbers = pattern.findall(text)
        if numbers:
            return float(numbers[-1])
    alone = _ALONE.fullmatch(text)
    if alone:
        return float(alone[1])
    return None


#: Their time is linear in the length of the text, for any text.
BUILTIN_PARSERS: dict[str, Callable[[str], float | None]] = {"yes_no": _yes_no, "score": _score}
