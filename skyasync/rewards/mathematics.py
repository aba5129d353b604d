"""Equality of mathematical expressions, by ``math-verify``.

Its own limits are signals, which work in a main thread only, and cannot stop a computation inside one big number.
Hence it is called without them, and the caller's limit holds (``skyasync.processes.apart`` kills what exceeds it).
"""

from __future__ import annotations

import logging
from functools import lru_cache
from types import ModuleType
from typing import Any

from skyasync.errors import MissingExtraError, UserError
from skyasync.rewards.registry import REWARDS, loading

_DELIMITERS = ("$", "\\boxed", "\\(", "\\[")


def _library() -> ModuleType:
    try:
        import math_verify
    except ModuleNotFoundError as error:
        raise MissingExtraError("math-verify", "math-verify") from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own limits are off
    return math_verify


@REWARDS.register("math_verify", extra="math-verify")
@loading(_library)
def math_verify(response: str, label: object) -> float:
    """1 if an expression in the response equals the label's.

    Raises:
        UserError: if the label is no mathematical expression.
    """
    if label is None or not _expressions(truth := _delimited(str(label).strip())):
        raise UserError(f"reward function math_verify finds no mathematical expression in the label {label!r}")
    return _equal(response, truth)


def _delimited(label: str) -> str:
    """A label without any mark is the expression itself."""
    return label if any(mark in label for mark in _DELIMITERS) else f"${label}$"


@lru_cache(maxsize=4096)  # the samples of a group share the label, and often the answer
def _equal(response: str, truth: str) -> float:
    return float(_library().verify(_expressions(truth), _expressions(response), timeout_seconds=None))


@lru_cache(maxsize=4096)
def _expressions(text: str) -> list[Any]:
    found: list[Any] = _library().parse(text, parsing_timeout=None)
    return found
