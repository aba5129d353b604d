"""The prompts of judges (language models that grade), and how a verdict is parsed from their answers.

Invariant: the text of a response or a row is inserted as it is and never searched for placeholders. An answer without a
verdict gives None, never a guess.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from skyasync.config.schema.judges import PLACEHOLDER, JudgeConfig, is_reference, is_text, placeholders
from skyasync.errors import UserError, nearest
from skyasync.registry import resolve_reference
from skyasync.rewards.score import Score, as_score

_NUMBER = r"([-+]?\d+(?:\.\d+)?)"
_WORDS = {"yes": 1.0, "true": 1.0, "correct": 1.0, "no": 0.0, "false": 0.0, "incorrect": 0.0}
_SAID = re.compile(r"\b(?:verdict|answer|judge?ment)\b\W{1,8}(?:is\W{1,4})?(yes|no)\b", re.IGNORECASE)
_SCORES = (
    re.compile(r"\[\[\s*" + _NUMBER + r"\s*\]\]"),
    re.compile(r"\\boxed\{\s*" + _NUMBER + r"\s*\}"),
    re.compile(r"\b(?:score|rating|grade)\b\W{0,4}(?:is|of)?[\s:=*\"']{1,6}" + _NUMBER, re.IGNORECASE),
)
_ALONE = re.compile(r"\W*?" + _NUMBER + r"(?:\s*/\s*\d+)?\W*")
_THOUGHT_BEGINS, _THOUGHT_ENDS = "<think>", "</think>"


def without_thinking(text: str) -> str:
    """What stands behind the last ``</think>``; all of it without one, and nothing of thinking that did not end."""
    return text.rpartition(_THOUGHT_ENDS)[2].partition(_THOUGHT_BEGINS)[0]


def prompt_text(name: str, judge: JudgeConfig) -> str:
    """The prompt itself, where the configuration names its file.

    Raises:
        UserError: if there is no such file.
    """
    if is_text(judge.prompt):
        return judge.prompt
    path = Path(judge.prompt).expanduser()
    if not path.is_file():
        close = nearest(path.name, [beside.name for beside in path.parent.glob("*") if beside.is_file()], count=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(
            f"environment.judges.{name}.prompt={judge.prompt}: there is no such file{hint} (to write the prompt itself "
            f"here, include a placeholder such as {{response}})"
        )
    return path.read_text(encoding="utf-8")


def known_to_judge(known: Mapping[str, Any]) -> dict[str, Any]:
    """What a question may show: the row's columns, the response, and the field's usual names for what they hold."""
    label = known.get("label")
    usual = {"question": known.get("prompt"), "ground_truth": label, "answer": label, "reference": label}
    response = str(known.get("response", ""))
    conversation = "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in known["messages"])
    return {**usual, **known, "final_response": without_thinking(response).strip(), "conversation": conversation}


def fill_prompt(name: str, prompt: str, known: Mapping[str, Any]) -> str:
    """The prompt with what is known in the place of its placeholders.

    Raises:
        UserError: for one of which the row says nothing, naming the judge.
    """

    def shown(found: re.Match[str]) -> str:
        literal, place = found.groups()
        return f"{{{literal}}}" if literal else str(_value(name, place, known))

    return PLACEHOLDER.sub(shown, prompt)


def check_placeholders(name: str, prompt: str, known: Mapping[str, Any]) -> None:
    """Raises ``UserError`` for a placeholder of which the row says nothing."""
    for place in placeholders(prompt):
        _value(name, place, known)


def _value(name: str, place: str, known: Mapping[str, Any]) -> object:
    value: Any = known
    for part in [place] if place in known else place.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
        if value is None:
            raise UserError(f"the prompt of judge {name} shows {{{place}}}, {_lacking(place, known)}")
    return value


def _lacking(place: str, known: Mapping[str, Any]) -> str:
    if place in ("ground_truth", "answer", "reference", "label"):
        return "the right answer, and the row has none: set data.label_key, or judges.NAME.prompt to one without it"
    close = nearest(place, known, count=1)
    hint = f"did you mean {{{close[0]}}}? " if close else ""
    return f"which the row does not have: {hint}it gives: {', '.join(known)} (text in double braces is left as it is)"


@dataclass(frozen=True)
class VerdictParser:
    """``environment.judges.NAME.parser``; it is pickled by its name."""

    parser: str

    @property
    def trusted(self) -> bool:
        """Whether it takes no longer than its text is long, whatever that is."""
        return self.parser in _BUILTIN

    @property
    def portable(self) -> bytes:
        return pickle.dumps(self)

    def __call__(self, text: str) -> Score | None:
        """The verdict, or None.

        Raises:
            UserError: for what a function of the user's returned.
        """
        text = without_thinking(text)
        if self.trusted:
            return _scored(_BUILTIN[self.parser](text))
        if is_reference(self.parser):
            returned = _function(self.parser)(text)
            return None if returned is None else as_score(self.parser, returned)
        return _scored(_by_pattern(self.parser, text))

    def check(self) -> None:
        """Raises ``UserError`` if a function is not there."""
        if is_reference(self.parser) and not callable(_function(self.parser)):
            raise UserError(f"the parser {self.parser!r} cannot be called: it is {_function(self.parser)!r}")


def adjusted(score: Score, judge: JudgeConfig) -> Score:
    """The verdict by ``offset``, ``scale`` and ``clip``; the plain one is the metric ``raw``."""
    reward = (score.reward - judge.offset) * judge.scale
    if judge.clip:
        reward = min(max(reward, judge.clip[0]), judge.clip[1])
    return Score(reward, {**score.metrics, "raw": score.reward})


def _scored(number: float | None) -> Score | None:
    return None if number is None or not math.isfinite(number) else Score(number)


def _yes_no(text: str) -> float | None:
    """The last word, or what follows "verdict" or "answer", or the first word: whichever is a yes or a no."""
    words = re.findall(r"[a-z]+", text.lower())
    said = _SAID.findall(text)
    candidates: Iterable[str] = [*words[-1:], *(word.lower() for word in said[-1:]), *words[:1]]
    return next((_WORDS[word] for word in candidates if word in ("yes", "no")), None)


def _score(text: str) -> float | None:
    """The last ``[[7]]``, ``\\boxed{7}`` or ``score: 7``, or the number that is all there is."""
    for pattern in _SCORES:
        if found := pattern.findall(text):
            return float(found[-1])
    alone = _ALONE.fullmatch(text)
    return float(alone[1]) if alone else None


def _by_pattern(pattern: str, text: str) -> float | None:
    found = re.compile(pattern).findall(text)
    if not found:
        return None
    said = str(found[-1]).strip()
    try:
        return float(said)
    except ValueError:
        return _WORDS.get(said.lower())


@cache
def _function(reference: str) -> Callable[[str], object]:
    found: Callable[[str], object] = resolve_reference(reference, kind="judge's parser")
    return found


_BUILTIN: dict[str, Callable[[str], float | None]] = {"yes_no": _yes_no, "score": _score}
