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
from skyasync.rewards.signature import Score, as_score

_NUMBER = r"([-+]?\d+(?:\.\d+)?)"
_WORDS = {"yes": 1.0, "true": 1.0, "correct": 1.0, "no": 0.0, "false": 0.0, "incorrect": 0.0}
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
    """What follows the last ``</think>``; all of it without one, and nothing of thinking that did
    not end."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def prompt_text(name: str, judge: JudgeConfig) -> str:
    """The prompt itself, where the configuration names its file.

    Raises:
        UserError: if there is no such file.
    """
    if is_text(judge.prompt):
        return judge.prompt
    path = Path(judge.prompt).expanduser()
    if not path.is_file():
        close = nearest(
            path.name, [file.name for file in path.parent.glob("*") if file.is_file()], count=1
        )
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(
            f"environment.judges.{name}.prompt={judge.prompt}: there is no such file{hint} (to write the prompt itself "
            f"here, include a placeholder such as {{response}})"
        )
    return path.read_text(encoding="utf-8")


def known_to_judge(known: Mapping[str, Any]) -> dict[str, Any]:
    """What a prompt may show: the row's columns, the response, and the usual names for what they
    hold."""
    label = known.get("label")
    usual = {
        "question": known.get("prompt"),
        "ground_truth": label,
        "answer": label,
        "reference": label,
    }
    response = str(known.get("response", ""))
    conversation = "\n\n".join(
        f"{message.get('role')}: {message.get('content')}" for message in known["messages"]
    )
    return {
        **usual,
        **known,
        "final_response": without_thinking(response).strip(),
        "conversation": conversation,
    }


def fill_prompt(name: str, prompt: str, known: Mapping[str, Any]) -> str:
    """The prompt with what is known in the place of its placeholders.

    Raises:
        UserError: for one of which the row says nothing, naming the judge.
    """

    def value(match: re.Match[str]) -> str:
        literal, placeholder = match.groups()
        if literal:
            return f"{{{literal}}}"
        return str(_value(name, placeholder, known))

    return PLACEHOLDER.sub(value, prompt)


def check_placeholders(name: str, prompt: str, known: Mapping[str, Any]) -> None:
    """Raises ``UserError`` for a placeholder of which the row says nothing."""
    for placeholder in placeholders(prompt):
        _value(name, placeholder, known)


def _value(name: str, placeholder: str, known: Mapping[str, Any]) -> object:
    value: Any = known
    for part in [placeholder] if placeholder in known else placeholder.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if value is not None:
        return value
    start = f"the prompt of judge {name} shows {{{placeholder}}},"
    if placeholder in ("ground_truth", "answer", "reference", "label"):
        fix = "set data.label_key, or judges.NAME.prompt to one without it"
        raise UserError(f"{start} the right answer, and the row has none: {fix}")
    close = nearest(placeholder, known, count=1)
    hint = f"did you mean {{{close[0]}}}? " if close else ""
    given = ", ".join(known)
    raise UserError(
        f"{start} which the row does not have: {hint}it gives: {given} (text in double braces is left as it is)"
    )


def parse_grade(parser: str, text: str) -> Score | None:
    """The grade in an answer by ``environment.judges.NAME.parser``, or None.

    Raises:
        UserError: for what a function of the user's returned.
    """
    text = without_thinking(text)
    if is_reference(parser):
        returned = parser_function(parser)(text)
        if returned is None:
            return None
        return as_score(parser, returned)
    if parser in BUILTIN_PARSERS:
        number = BUILTIN_PARSERS[parser](text)
    else:
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
    """Raises ``UserError`` if there is no such function."""
    function: Callable[[str], object] = resolve_reference(reference, kind="judge's parser")
    if not callable(function):
        raise UserError(f"the parser {reference!r} cannot be called: it is {function!r}")
    return function


def _yes_no(text: str) -> float | None:
    """The last word, or what follows "answer" and the like, or the first word: whichever is a yes
    or a no."""
    words = re.findall(r"[a-z]+", text.lower())
    candidates = [*words[-1:], *(word.lower() for word in _NAMED.findall(text)[-1:]), *words[:1]]
    return next((_WORDS[word] for word in candidates if word in ("yes", "no")), None)


def _score(text: str) -> float | None:
    """The last ``[[7]]``, ``\\boxed{7}`` or ``score: 7``, or the number that is all there is."""
    for pattern in _SCORES:
        numbers = pattern.findall(text)
        if numbers:
            return float(numbers[-1])
    alone = _ALONE.fullmatch(text)
    if alone:
        return float(alone[1])
    return None


#: These take no longer than their text is long, whatever it is.
BUILTIN_PARSERS: dict[str, Callable[[str], float | None]] = {"yes_no": _yes_no, "score": _score}
