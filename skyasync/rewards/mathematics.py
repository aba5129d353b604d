"""Equality of mathematical expressions, by ``math-verify``.

Its own limits are signals, which work in a main thread only, and cannot stop a computation inside one big number.
Hence it is called without them, and the caller's limit holds (``skyasync.rewards.judge`` kills what exceeds it).
"""

from __future__ import annotations

import logging
from typing import Any

from skyasync.errors import MissingExtraError, UserError
from skyasync.rewards.registry import REWARDS

_DELIMITERS = ("$", "\\boxed", "\\(", "\\[")


@REWARDS.register("math_verify")
def math_verify(response: str, label: Any) -> float:
    """1 if an expression in the response equals the label's.

    Raises:
        UserError: if the label is no mathematical expression.
    """
    try:
        from math_verify import parse, verify
    except ModuleNotFoundError as error:
        raise MissingExtraError("math-verify", "math-verify") from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own limits are off
    truth = str(label).strip()
    delimited = any(mark in truth for mark in _DELIMITERS)  # else the label is the expression itself
    gold = parse(truth if delimited else f"${truth}$", parsing_timeout=None)
    if label is None or not gold:
        raise UserError(f"reward function math_verify finds no mathematical expression in the label {label!r}")
    return float(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))
