"""The answers that responses give, for votes among the samples of a prompt.

Invariant: two responses give the same answer if and only if the texts here are equal. One that gives none is None, and
has no vote.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from skyasync.config.schema.judges import is_reference
from skyasync.registry import resolve_reference
from skyasync.rewards.text import extract_boxed_answer
from skyasync.rewards.verdicts import without_thinking
from skyasync.rewards.judge_prompts import without_thinking
from skyasync.rewards.openrlhf import extract_boxed_answer

Answer = Callable[[str], str | None]

SHORT = 64  # characters of a response that is an answer by itself
_AFTER_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
_SAID = re.compile(r"\banswer(?:\s+is|\s*:)[\s*]*([^\s*][^\n]{0,200}?)[\s*]*(?:[.!]?[ \t]*$|[.!]\s)", re.I | re.M)


def reader(spec: str) -> Answer:
    """What ``trainer.eval_answer`` says: ``auto``, a regular expression, or a function of the user's.

    Raises:
        UserError: if there is no such function.
    """
    if spec == "auto":
        return _auto
    if is_reference(spec):
        own: Callable[[str], object] = resolve_reference(spec, kind="trainer.eval_answer")
        return lambda text: None if (found := own(text)) is None else _same(str(found))
    pattern = re.compile(spec)

    def last(text: str) -> str | None:
        found = pattern.findall(text)
        return _same(found[-1]) if found else None

    return last


def _auto(text: str) -> str | None:
    r"""The last ``\boxed{}``, or what follows the last ``####``, or "answer is", or a short response itself."""
    text = without_thinking(text).strip()
    boxed = extract_boxed_answer(text)
    if boxed is not None:
        return _same(boxed)
    for pattern in (_AFTER_HASHES, _SAID):
        if found := pattern.findall(text):
            return _same(found[-1])
    return _same(text) if text and len(text) <= SHORT and "\n" not in text else None


def _same(answer: str) -> str:
    """One text for the ways of writing a number or a formula that differ in spaces, marks and case."""
    plain = re.sub(r"\\[!,;]|[\s$,]|\\left|\\right", "", answer).rstrip(".").lower()
    try:
        return repr(float(plain))
    except (ValueError, OverflowError):
        return plain
